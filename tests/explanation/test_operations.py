"""Flat programs: operations are found, and values followed, through everything that has a program inside."""

import jax
import jax.numpy as jnp
import pytest

from jmp_policy.explanation._operations import operations

X = jnp.ones(3)


@jax.custom_jvp
def custom(x):
    return jnp.sin(x)


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))

BODIES = {
    "jit": jax.jit(jnp.sin),
    "remat": jax.checkpoint(jnp.sin),
    "custom_jvp": custom,
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0],
    "cond": lambda x: jax.lax.cond(jnp.zeros(()) > 0, jnp.sin, lambda x: x, x),
    "while with constants": lambda x: (
        lambda limit, scale: jax.lax.while_loop(lambda c: limit > 0, lambda c: jnp.sin(c) * scale, x)
    )(jnp.zeros(()), jnp.zeros(())),
    "vmap": jax.vmap(jax.jit(jnp.sin)),
}


def flat(fun, *args):
    program = jax.make_jaxpr(fun)(*args)
    return program, list(operations(program.jaxpr))


@pytest.mark.parametrize("name", BODIES)
def test_value_is_followed_into_a_body_and_out_again(name):
    def program(x):
        with jax.named_scope("outside"):
            return jnp.tanh(BODIES[name](jnp.exp(x)))

    _keep, found = flat(program, X)
    reached = {value.key for op in found if op.name == "exp" for value in op.results}
    seen = []
    for operation in found:
        if reached & {value.key for value in operation.operands}:
            reached |= {value.key for value in operation.results}
            seen.append(operation.name)
    assert [op for op in seen if op in ("sin", "tanh")] == ["sin", "tanh"]
    assert all("outside" in operation.scope for operation in found)


def test_operands_have_their_floating_dtypes():
    _keep, found = flat(lambda x, y: x @ y.astype(x.dtype) + 1, jnp.ones((2, 2), jnp.bfloat16), jnp.ones((2, 2), int))
    dtypes = [str(v.dtype) for op in found if op.computes for v in op.operands]
    assert set(dtypes) == {"bfloat16"}
    convert = next(op for op in found if op.name == "convert_element_type")
    assert [v.dtype for v in convert.operands] == [None]
    assert not convert.computes
