"""In which dtypes a function reads its parameters, whatever stands between the parameter and the cast."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

# A program shows one gather of many leaves, and takes a second to export.
from jmp_policy.sharding._gather_params import find_reads

HALF = {jnp.dtype(jnp.bfloat16)}
W, X = jnp.ones((4, 4)), jnp.ones((4, 4), jnp.bfloat16)


def cast(w):
    return w.astype(jnp.bfloat16)


@jax.custom_vjp
def product(w):
    return X @ cast(w)


product.defvjp(lambda w: (product(w), None), lambda _, ct: (ct.astype(jnp.float32),))


READS_HALF = {
    "a cast": lambda w: X @ cast(w),
    "moved first": lambda w: X @ cast(jnp.flip(w.T.reshape(2, 8).reshape(4, 4))[:, ::-1]),
    "looked up": lambda w: cast(jnp.take(w, jnp.arange(3), axis=0)),
    "sliced": lambda w: cast(lax.dynamic_slice(w, (1, 0), (2, 4))),
    "jit": lambda w: jax.jit(cast)(w),
    "remat": lambda w: jax.checkpoint(cast)(w),
    "custom derivative": product,
    "a layer of a scan": lambda w: lax.scan(lambda h, row: (h @ cast(row), None), X, jnp.stack([w, w]))[0],
    "a constant of a scan": lambda w: lax.scan(lambda h, _: (h @ cast(w), None), X, length=3)[0],
    "both branches": lambda w: lax.cond(X[0, 0] > 0, cast, lambda w: cast(w.T), w),
    "a barrier": lambda w: cast(lax.optimization_barrier((w, X))[0]),
}
READS_WHOLE = {
    "a product beside a cast": lambda w: (cast(w), w.sum()),
    "a result": lambda w: (cast(w), w),
    "a loop": lambda w: cast(lax.fori_loop(0, 2, lambda i, w: w * 0.5, w)),
    "one branch": lambda w: lax.cond(X[0, 0] > 0, cast, lambda w: cast(w * 2), w),
    "a cast after a product": lambda w: cast(w * 2),
    "a cast to integers": lambda w: w.astype(jnp.int32),
    "inside jit": lambda w: jax.jit(lambda w: w + 1)(w),
}


@pytest.mark.parametrize("name", READS_HALF | READS_WHOLE)
def test_a_parameter_is_read_in_half_precision_alone_or_as_it_is(name):
    assert find_reads((READS_HALF | READS_WHOLE)[name], W) == [HALF if name in READS_HALF else None]


def test_two_dtypes_and_none_are_told_apart():
    assert find_reads(lambda w: (cast(w), w.astype(jnp.float16)), W) == [HALF | {jnp.dtype(jnp.float16)}]
    assert find_reads(lambda w: X, W) == [set()]
    assert find_reads(lambda x: x.astype(jnp.float16), X) == [None]  # which loses nothing in size
    assert find_reads(cast, W, lambda w: w * 2) == [HALF]  # the function that prepares them does not count


@pytest.mark.parametrize("narrow_first", [True, False])
def test_one_body_that_is_called_twice_tells_its_calls_apart(narrow_first):
    """JAX traces a jitted function once, so that both calls have the variables of one body."""
    body = jax.jit(lambda x: x.T)

    def fun(params):
        first, second = body(params["a"]), body(params["b"])
        return (cast(first), second * 2) if narrow_first else (first * 2, cast(second))

    assert find_reads(fun, {"a": W, "b": W}) == ([HALF, None] if narrow_first else [None, HALF])
    constant = functools.partial(lambda w: (cast(body(w)), body(jnp.ones((4, 4))) * 2))
    assert find_reads(constant, W) == [HALF]


def test_integers_and_keys_are_passed_over():
    params = {"ids": jnp.arange(4), "key": jax.random.key(0), "w": W}
    fun = lambda p: (p["ids"] + 1, jax.random.key_data(p["key"]), cast(p["w"]))
    assert find_reads(fun, params) == [set(), set(), HALF]
