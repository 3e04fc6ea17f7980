"""The formulas of int8 and int4 against NumPy in float64: edges, bounds, and the same bits in and out of a jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quant_reference as reference
from quant_reference import DTYPES, HALF, TINY

from jmp_policy.quant import quantize_array
from jmp_policy.quant._block_numbers import unpack
from jmp_policy.quant._numbers import measure_amax, measure_bounds, quantize_asymmetric, quantize_symmetric

LENGTH, BLOCK = 33, 11
FORMATS = ("int8", f"int4/{BLOCK}")
EDGES = reference.edge_columns(LENGTH)

quantized = jax.jit(quantize_array, static_argnums=1)


def columns(dtype):
    return jnp.asarray(np.stack([*EDGES.values(), reference.fresh(LENGTH, 1)[:, 0]], axis=1), dtype)


def numbers_of(array):
    return np.array(array, np.float64)  # a copy, and no promotion of JAX's


def in_blocks(weight):
    return np.asarray(weight, np.float64).reshape(-1, BLOCK, weight.shape[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_the_nearest_multiple_of_a_127th_of_the_largest_magnitude(dtype):
    weight = columns(dtype)
    array = quantized(weight, "int8")
    exact, scale = reference.int8(weight, (0,))
    np.testing.assert_allclose(array.scale, scale, rtol=2**-22)
    assert (array.values.dtype, array.scale.dtype, array.scale.shape) == (jnp.int8, jnp.float32, (1, weight.shape[1]))
    assert np.abs(array.values).max() == 127
    normal = np.abs(np.asarray(weight, np.float64)) >= TINY  # others are flushed to zero by this backend
    assert np.abs(numbers_of(array.values) - exact)[normal].max() <= HALF
    assert not np.asarray(array.values)[np.asarray(weight, np.float64) == 0].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_is_the_nearest_of_16_numbers_of_which_one_is_zero(dtype):
    weight = columns(dtype)
    array = quantized(weight, f"int4/{BLOCK}")
    values, zero_point = numbers_of(unpack(array.values, 1, jnp.uint4)[:, :BLOCK]), numbers_of(array.zero_point)
    exact, scale, zero = reference.uint4(in_blocks(weight), (1,))
    np.testing.assert_allclose(array.scale, scale, rtol=2**-21)
    assert (array.values.dtype, array.zero_point.dtype, array.scale.shape) == (jnp.uint8, jnp.uint8, scale.shape)
    assert values.max() == 15
    assert values.min() == 0
    normal = np.broadcast_to(scale > TINY, values.shape)
    assert np.abs(zero_point - zero)[scale > TINY].max() <= HALF
    assert np.abs(values - zero_point - exact)[normal].max() <= HALF
    assert not np.asarray(array.dequantize(), np.float32)[np.asarray(weight, np.float64) == 0].any()


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_dequantized_is_half_a_step_away_and_rounded_once(format, dtype):
    weight = columns(dtype)
    array = quantized(weight, format)
    numbers, wide = (np.asarray(array.dequantize(d), np.float64) for d in (None, "float32"))
    steps = np.repeat(np.asarray(array.scale, np.float64).reshape(-1, weight.shape[1]), BLOCK, axis=0)[-LENGTH:]
    steps = np.broadcast_to(array.scale, weight.shape) if format == "int8" else steps
    assert (np.abs(wide - np.asarray(weight, np.float64)) <= steps * HALF + TINY).all()
    assert array.dequantize().dtype == weight.dtype
    half_ulp = {"float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    subnormal = 2.0**-25 if dtype == "float16" else TINY
    assert (np.abs(numbers - wide) <= np.abs(wide) * half_ulp + subnormal).all()


@pytest.mark.slow
@pytest.mark.parametrize(("format", "dtype"), [("int8", "bfloat16"), (f"int4/{BLOCK}", "float32")])
def test_eager_equals_jit_bit_for_bit(format, dtype):
    weight = columns(dtype)
    eager, jitted = quantize_array(weight, format), quantized(weight, format)
    jax.tree.map(np.testing.assert_array_equal, eager, jitted)
    np.testing.assert_array_equal(eager.dequantize(), jax.jit(lambda array: array.dequantize())(jitted))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_number_that_is_not_finite_spoils_what_shares_its_scale_and_nothing_else(format, bad):
    weight = columns("float32")
    array, spoilt = quantized(weight, format), quantized(weight.at[2, 3].set(bad), format)
    numbers = numbers_of(spoilt.dequantize())
    group = slice(0, LENGTH if format == "int8" else BLOCK)
    assert not np.isfinite(numbers[group, 3]).any()
    numbers[group, 3] = array.dequantize()[group, 3]
    np.testing.assert_array_equal(numbers, array.dequantize())


@pytest.mark.slow
def test_ties_go_to_the_even_integer_and_nothing_passes_127():
    x = jnp.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 200, -np.inf])
    values, scale, zero_point = quantize_symmetric(x, jnp.array([127.0]))
    assert scale == 1
    assert values.tolist() == [127, 0, 2, 2, 0, -2, 126, 127, -127]
    assert zero_point is None
    x = jnp.array([0.5, 1.5, -2.5, 99, -99])
    values, scale, zero_point = quantize_asymmetric(x, jnp.array([-5.0]), jnp.array([10.0]))
    assert (scale, zero_point) == (1, 5)
    assert values.tolist() == [5, 7, 3, 15, 0]


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_a_block_of_one_sign_is_decoded_with_its_sign(sign):
    weight = sign * jnp.linspace(5, 6, 16)[:, None]  # far from zero, which the range holds all the same
    array = quantized(weight, "int4/16")
    assert array.zero_point.tolist() == [[[0 if sign > 0 else 15]]]
    assert np.abs(array.dequantize() - weight).max() <= 6 / 15 * HALF


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_of_a_dtype_neither_overflow_nor_lose_their_scale(dtype):
    for format, steps in (("int8", 127), ("int4", 15 / 2)):
        largest = float(jnp.finfo(dtype).max) * (1 if format == "int8" else 15 / 16)  # zero shifts 4 bits
        weight = jnp.array([[largest], [-largest], [0]], dtype)
        error = numbers_of(quantized(weight, format).dequantize()) - numbers_of(weight)
        assert np.abs(error).max() <= largest / steps * (HALF + 2.0**-4)


@pytest.mark.slow
def test_range_and_peak_are_float32_and_keep_their_axes():
    x = jnp.array([[1, -3], [2, -4]], jnp.float16)
    assert measure_amax(x, (0,)).tolist() == [[2, 4]]
    assert [bound.tolist() for bound in measure_bounds(x, (0,))] == [[[0, -4]], [[2, 0]]]
    assert {array.dtype for array in (measure_amax(x, (1,)), *measure_bounds(x, (1,)))} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_one_element_and_one_of_each_channel_are_their_own_scale():
    for format in ("int8", "int4"):
        np.testing.assert_allclose(quantized(jnp.array([-0.3]), format).dequantize(), [-0.3], rtol=2**-21)
        rows = quantized(jnp.array([[0.3, -5]]), format)
        np.testing.assert_allclose(rows.dequantize(), [[0.3, -5]], rtol=2**-21)


@pytest.mark.slow
def test_int4_per_output_channel_is_one_block_however_long():
    weight = jnp.asarray(reference.fresh(LENGTH * 8, 4))
    whole, block = (quantized(weight, f"int4/{size}") for size in (-1, LENGTH * 8))
    assert whole.scale.shape == whole.zero_point.shape == block.scale.shape
    assert whole.scale.size == 4
    for name in ("values", "scale", "zero_point"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(block, name))
