"""Which sums in half precision lose numbers, how many numbers become one in each, and what is advised mends it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_policy as jmp
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
    "reduce of 8 numbers": lambda x: jax.lax.reduce(
        (x.astype(jnp.float32), x), (np.float32(0), ZERO), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,)
    ),
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


MIXED = "params=float32,compute=bfloat16,output=float32"
X = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)


def average(x, pool):
    return pool(x, (64, 64)).reshape(-1, 8)  # pooled here


class ConvNet(nn.Module):
    pool: object = nn.avg_pool

    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(average(nn.relu(nn.Conv(8, (3, 3))(x)), self.pool))


def in_a_loss(fun):
    return jax.grad(lambda params, x: jnp.mean(jax.nn.log_softmax(fun(params, x)) ** 2))


@pytest.mark.slow
def test_pooling_that_flax_computes_in_half_is_found_unless_it_is_of_few_elements_or_in_full_precision():
    with jax.numpy_dtype_promotion("standard"):  # Flax divides by the window, an integer of NumPy's
        model = jmp.with_policy(ConvNet(), MIXED)  # adds in bfloat16 on a CPU: the logits are .066 off
        params = jax.eval_shape(model.init, jax.random.key(0), X)
        for fun in (model.apply, in_a_loss(model.apply)):
            [finding] = audit(fun)(params, X).findings
            assert (finding.id, finding.dtypes, finding.backward) == ("half-reduction", ("bfloat16",), False)
            assert "reduce_window_sum of 4096 numbers in bfloat16" in finding.message
            assert "jmp.force_full_precision(nn.avg_pool)" in finding.message
            assert re.search(r"test_half_sums.py:\d+ \(average\)$", finding.source)
        explanation = jmp.explain(model, X)
        assert [row.path for row in explanation.rows if row.half_sums] == [""]
        text = " ".join(str(explanation).split())
        assert "the model itself (!): reduce_window_sum of 4096 numbers in bfloat16, whose error grows" in text
        small = jmp.with_policy(ConvNet(lambda x, _: nn.avg_pool(x, (2, 2)).mean((1, 2))), MIXED)
        assert jmp.explain(small, X)[""].half_sums == ()
        mended = jmp.with_policy(ConvNet(jmp.force_full_precision(nn.avg_pool)), MIXED)
        for fun in (mended.apply, jmp.autocast(ConvNet().apply, MIXED)):
            assert audit(fun)(params, X).findings == audit(in_a_loss(fun))(params, X).findings == ()
