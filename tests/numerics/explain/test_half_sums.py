"""Which sums in half precision lose numbers, and how many numbers become one in each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy.numerics import audit


def find_sums(fun, *shape):
    findings = audit(fun)(jax.ShapeDtypeStruct(shape, jnp.bfloat16)).findings
    return [finding.message for finding in findings if finding.id in ("half-reduction", "half-cumulative")]


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
    [message] = find_sums(HALF_SUMS[said], 16, 8)
    assert f"({said} in bfloat16)" in message


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
    assert find_sums(fun, 8) == []
