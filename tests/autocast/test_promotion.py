"""The dtypes of a random program under autocast are those of a model of its rule, in plain Python."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax
from programs import trace
from properties import examples

import jmp_policy as jmp

HALF, FULL, CONSTANT = "bfloat16", "float32", "constant"
POLICY = f"params=float32,compute={HALF},output=none"
SIDE = 3
WHICH = np.eye(SIDE, dtype=bool)


def scan(x, y):
    return lax.scan(lambda c, r: (c * 0.5 + r, c), x, jnp.stack([y, y]))[0]


# Each operation of two square arrays, and of the weight and bias of a dense layer.
PROMOTING = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "max": jnp.maximum,
    "select": lambda x, y: jnp.where(WHICH, x, y),
    "select by a number": lambda x, y: lax.select_n(x[0, 0] > 0, x, y),
    "concatenate": lambda x, y: jnp.concatenate([x[:1], y[1:]]),
    "set": lambda x, y: x.at[0].set(y[0]),
    "update": lambda x, y: lax.dynamic_update_slice(x, y[:2, :2], (0, 0)),
    "pad": lambda x, y: lax.pad(x[1:], y[0, 0], [(1, 0, 0), (0, 0, 0)]),
    "cond": lambda x, y: lax.cond(x[0, 0] > 0, lambda: x, lambda: y),
    "jit": jax.jit(lambda x, y: jnp.minimum(x, y)),
    "vmap": jax.vmap(lambda x, y: x - y),
    "transpose": lambda x, y: x.T + y.reshape(SIDE, SIDE),
    "remat": jax.checkpoint(lambda x, y: x * y - y),
    "row": lambda x, y: x - y[0],
    "column": lambda x, y: x + y[:, :1],
    "element": lambda x, y: x + y[0, 0],
}
OTHERS = {
    "matmul": lambda x, y: x @ y,
    "exp": lambda x, y: jnp.exp(x - y),
    "scan": scan,
    "dense": lambda x, y: jnp.tanh(x @ y + BIAS),
    "biased twice": lambda x, y: x @ y + BIAS + BIAS,
    "scaled": lambda x, y: x @ y * BIAS,
    "target": lambda x, y: x @ y - BIAS,
}
BIAS = jnp.full(SIDE, 0.1)


def model(name: str, operands: tuple[str, str]) -> str:
    """The rule: matmuls are half and what is steep is float32; else the widest dtype, to which constants give way."""
    if name in ("matmul", "dense"):
        return HALF
    if name in ("exp", "scan", "biased twice", "scaled", "target"):
        return FULL
    arrays = [dtype for dtype in operands if dtype != CONSTANT]
    return FULL if FULL in arrays or not arrays else HALF


STEPS = st.lists(
    st.tuples(st.sampled_from([*PROMOTING, *OTHERS]), st.integers(0, 99), st.integers(0, 99)), min_size=3, max_size=9
)


@pytest.mark.slow
@examples(40)
@given(STEPS)
def test_dtypes_follow_promotion(steps):
    def run(values, operate):
        for name, i, j in steps:
            left, right = i % len(values), j % len(values)
            right -= left == right == 3  # an operation of constants alone makes another constant
            values.append(operate(name, values[left], values[right]))
        return values[4:]

    operate = lambda name, x, y: (PROMOTING.get(name) or OTHERS[name])(x, y)
    program = lambda a, b: run([a, b, a @ b, jnp.ones((SIDE, SIDE))], operate)
    expected = run([FULL, FULL, HALF, CONSTANT], lambda name, x, y: model(name, (x, y)))
    assert dtypes_of_results(jmp.autocast(program, POLICY)) == expected, steps


def dtypes_of_results(fun) -> list[str]:
    """The dtypes of results before they are cast to float32, in which they were traced."""
    program = trace(fun)(jnp.ones((SIDE, SIDE)), jnp.ones((SIDE, SIDE)))
    casts = {
        eqn.outvars[0]: str(eqn.invars[0].aval.dtype)
        for eqn in program.eqns
        if eqn.primitive.name == "convert_element_type"
    }
    return [casts.get(var, FULL) for var in program.jaxpr.outvars]


BROADCAST = {
    "bias": (lambda x, w, b: x @ w + b, HALF),
    "bias of a convolution": (lambda x, w, b: lax.conv(x.T[None], w[:, :, None], (1,), "SAME").T[..., 0] + b, HALF),
    "bias of a product and a stream": (lambda x, w, b: jnp.tanh(x @ w) + x @ w + b, HALF),
    "scale": (lambda x, w, b: x @ w * b, FULL),
    "computed": (lambda x, w, b: x @ w + b * b, FULL),
    "state of as many axes": (lambda x, w, b: x @ w + x, FULL),
    "state with an axis before its own": (lambda x, w, b: (x @ w)[None] + x[None], FULL),
    "outer product of arguments": (lambda x, w, b: x[:, :1] @ w[:1], FULL),
    "outer product in a layer": (lambda x, w, b: (x @ w)[:, :1] @ w[:1], HALF),
    "mask of attention": (lambda x, w, b: jnp.einsum("hij,hkj->hik", x[None], x[None]) + x, FULL),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_only_a_bias_gives_way(name):
    fun, expected = BROADCAST[name]
    ours = jmp.autocast(lambda x, w, b: jnp.tanh(fun(x, w, b)), POLICY)
    for rows in (1, SIDE):  # a dtype does not depend on the size of a batch
        program = trace(ours)(jnp.ones((rows, SIDE)), jnp.ones((SIDE, SIDE)), BIAS)
        [dtype] = {str(eqn.invars[0].aval.dtype) for eqn in program.eqns[-3:] if eqn.primitive.name == "tanh"}
        assert dtype == expected


def test_an_outer_product_with_a_quantized_weight_or_with_integers_is_traced():
    """Nothing is known of the operands when quantized matmuls are looked for, and integers have no level."""
    quantized = jmp.autocast(lambda w, x: x @ w["one"] @ w["two"], "int8_from_mixed_bfloat16", weights=0)
    weights = {"one": jnp.ones((1, 64)), "two": jnp.ones((64, 64))}
    assert jax.eval_shape(quantized, weights, jnp.ones((4, 1))).shape == (4, 64)
    mixed = jmp.autocast(lambda w, i: lax.dot_general(w, i, (((1,), (0,)), ((), ()))), POLICY)
    assert jax.eval_shape(mixed, jnp.ones((4, 1)), jnp.ones((1, 4), jnp.int8)).shape == (4, 4)


def test_a_search_in_sorted_numbers_runs_inside_jit():
    """JAX 0.12 lowers it by its own type, and only where the jaxpr around it says so."""
    search = jmp.autocast(jnp.searchsorted, "p=f32,c=bf16,o=f32")
    assert jax.jit(search)(jnp.arange(4.0), jnp.float32(2.5)) == 3
