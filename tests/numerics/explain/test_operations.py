"""Flat programs: operations are found, and values followed, through everything that has a program inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy._jaxpr import find_half_sum, walk
from jmp_policy.numerics._explain import computes, list_read_dtypes

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
    return program, [step for step in walk(program.jaxpr) if step.name != "constant"]


@pytest.mark.parametrize("name", BODIES)
def test_value_is_followed_into_a_body_and_out_again(name):
    def program(x):
        with jax.named_scope("outside"):
            return jnp.tanh(BODIES[name](jnp.exp(x)))

    _keep, found = flat(program, X)
    reached = {id(value) for op in found if op.name == "exp" for value in op.results}
    seen = []
    for operation in found:
        if reached & set(map(id, operation.operands)):
            reached |= set(map(id, operation.results))
            seen.append(operation.name)
    assert [op for op in seen if op in ("sin", "tanh")] == ["sin", "tanh"]
    assert all("outside" in operation.scope for operation in found)


HALF_SUMS = {
    "reduce_window_sum of 9 numbers": lambda x: jax.lax.reduce_window(x, ZERO, jax.lax.add, (3, 3), (2, 2), "VALID"),
    "reduce_window_sum of 16 numbers": lambda x: jax.lax.reduce_window(x, ZERO, jax.lax.add, (99, 1), (1, 1), "SAME"),
    "reduce_window_sum of 4 numbers": lambda x: jax.lax.reduce_window(
        x, ZERO, jax.lax.add, (4, 3), (1, 1), "SAME", base_dilation=(2, 2)
    ),
    "reduce_window of 6 numbers": lambda x: jax.lax.reduce_window(x, ZERO + 1, jax.lax.mul, (3, 2), (2, 2), "VALID"),
    "reduce of 16 numbers": lambda x: jax.lax.reduce(x, ZERO, lambda a, b: a + b, (0,)),
    "reduce_sum of 32 numbers": lambda x: jax.lax.reduce_sum(x.reshape(4, 32), axes=(1,)),
    "scatter-add of 8 numbers": lambda x: x[:2].at[jnp.arange(16) % 2].add(x),
    "scatter-add of 6 numbers": lambda x: jax.ops.segment_sum(x, jnp.arange(16) % 3, 3),  # 16 rows to 3, on average
    "scatter-add of 4 numbers": lambda x: x[:4, 2:5].at[jnp.arange(16) % 4].add(x[:, :3]),
    "scatter-mul of 2 numbers": lambda x: x[:8].at[jnp.arange(16) % 8].mul(x),
    "cumsum of 16 numbers": jax.jit(lambda x: jnp.cumsum(x, 0)),
    "select_and_scatter_add of 4 numbers": jax.grad(
        lambda x: jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 3), (2, 2), "VALID").astype("float32"))
    ),
}
ZERO = np.zeros((), jnp.bfloat16)[()]


@pytest.mark.parametrize("said", HALF_SUMS)
def test_sums_in_half_are_told_with_how_many_numbers_become_one(said):
    _keep, found = flat(HALF_SUMS[said], jnp.ones((16, 8), jnp.bfloat16))
    assert [str(half) for half in map(find_half_sum, found) if half is not None] == [f"{said} in bfloat16"]


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.sum(x, 0),  # in float32
        lambda x: jax.lax.reduce_sum(x.reshape(1, 8), axes=(0,)),
        lambda x: jax.lax.reduce(x, ZERO, jax.lax.max, (0,)),
        lambda x: jax.lax.reduce_window(x, -ZERO - jnp.inf, jax.lax.max, (3,), (2,), "VALID"),
        lambda x: jnp.cumsum(x.astype(jnp.float32)),
        lambda x: x.at[0].add(1),
        lambda x: jnp.ones((4, 8), x.dtype).at[0].add(x),
        lambda x: jnp.ones((4, 8), x.dtype).at[2, 3:6].add(x[:3]),
        lambda x: jax.ops.segment_sum(x, jnp.arange(8) % 5, 8),  # a message per node
        lambda x: jnp.ones((4, 8), x.dtype).at[jnp.arange(4), 0].add(x[:4], unique_indices=True),
        jax.vmap(lambda x: jnp.ones(3, x.dtype).at[1].add(x)),
    ],
)
def test_what_loses_nothing_is_no_sum_in_half(fun):
    _keep, found = flat(fun, jnp.ones(8, jnp.bfloat16))
    assert [half for half in map(find_half_sum, found) if half is not None] == []


def test_read_dtypes_are_of_floating_operands_that_are_computed_with():
    _keep, found = flat(lambda x, y: x @ y.astype(x.dtype) + 1, jnp.ones((2, 2), jnp.bfloat16), jnp.ones((2, 2), int))
    assert {str(dtype) for step in found for dtype in list_read_dtypes(step)} == {"bfloat16"}
    convert = next(step for step in found if step.name == "convert_element_type")
    assert not computes(convert)
    assert list_read_dtypes(convert) == []
