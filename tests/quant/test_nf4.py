"""4-bit NormalFloat weights against NumPy, and against the table of the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quant_reference import TINY, edge_columns, fresh

from jmp_policy.quant import NF4, Layout, dot_general, quantize_array

# QLoRA, appendix E, and `create_normal_map` of bitsandbytes.
TABLE = np.float64([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
quantized = jax.jit(quantize_array, static_argnums=(1, 2))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_it_is_the_nearest_of_16_values_times_the_largest_magnitude_of_a_block(dtype):
    weight = jnp.asarray(np.stack([*edge_columns(33).values(), *fresh(33, 9).T], axis=1), dtype)
    made, wide = quantized(weight, "nf4/11"), np.asarray(weight, np.float64)
    blocks = wide.reshape(3, 11, -1)
    scale = np.maximum(np.abs(blocks).max(axis=1, keepdims=True), TINY)
    np.testing.assert_array_equal(made.scale, scale.astype(np.float32))
    assert (made.values.dtype, made.values.shape, made.zero_point) == (jnp.uint8, (3, 6, weight.shape[1]), None)
    distances = np.abs(blocks[..., None] / scale[..., None] - TABLE)
    found = np.asarray(made.dequantize("float32"), np.float64).reshape(blocks.shape) / scale
    # One rounding of the product by the scale, and one of the quotient, which decides near a midpoint.
    assert (np.abs(found[..., None] - TABLE).min(axis=-1) <= 2.0**-23).all()
    normal = np.abs(blocks) >= TINY  # others are flushed to zero by this backend
    assert (np.abs(found - blocks / scale) <= distances.min(axis=-1) + 2.0**-22)[normal].all()
    assert not np.asarray(made.dequantize("float32"))[wide == 0].any()
    jax.tree.map(np.testing.assert_array_equal, quantize_array(weight, "nf4/11"), made)


def test_every_value_of_the_table_is_kept_and_packed_two_to_a_byte():
    weight = jnp.asarray(np.stack([TABLE, -2 * TABLE[::-1]], axis=1), jnp.float32)
    made = quantize_array(weight, "nf4/16")
    assert made.values.shape == (1, 8, 2)
    np.testing.assert_array_equal(made.dequantize()[:, 0], weight[:, 0])
    assert made.values[0, :, 0].tolist() == [low | (low + 8) << 4 for low in range(8)]


def test_the_values_are_quantiles_of_a_normal_distribution():
    """Of each sign the means of neighbors of 9 and of 8 quantiles: `create_normal_map` of bitsandbytes."""
    scipy = pytest.importorskip("scipy.stats")
    offset = 0.9677083
    positive = scipy.norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    negative = -scipy.norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    np.testing.assert_allclose(np.sort([*positive, 0, *negative]) / positive.max(), TABLE, atol=2e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_spoils_its_block_alone(bad):
    weight = jnp.asarray(fresh(32, 4), jnp.float32)
    plain, found = (np.array(quantized(w, "nf4/8").dequantize()) for w in (weight, weight.at[9, 2].set(bad)))
    assert not np.isfinite(found[9, 2])
    found[8:16, 2] = plain[8:16, 2]
    np.testing.assert_array_equal(found, plain)


def test_a_stack_is_sliced_and_a_matmul_reads_the_rounded_weight():
    weight, x = jnp.asarray(fresh(3, 16, 4), jnp.float32), jnp.asarray(fresh(5, 16), jnp.float32)
    made = quantized(weight, "nf4/8", Layout((16,), 1))
    second = jax.tree.map(lambda leaf: leaf[1], made)
    np.testing.assert_array_equal(second.dequantize(), quantized(weight[1], "nf4/8").dequantize())
    product = dot_general(x, second, (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(product, jax.lax.dot(x, second.dequantize()))


def test_its_class_says_what_it_is():
    assert (str(NF4()), str(NF4(-1)), NF4().bits, NF4().for_tables.kind) == ("nf4/64", "nf4/-1", 4, "int8")
    with pytest.raises(ValueError, match=r"^clip=99\.0 is for integers, and 'nf4/64' scales each block of the weight"):
        quantize_array(jnp.ones((64, 4)), "nf4", clip=99.0)
