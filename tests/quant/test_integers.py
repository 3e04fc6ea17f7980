"""The formulas of int8 and int4 against NumPy in float64: edges, bounds, clipped ranges, the same bits under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quant_reference as reference
from quant_reference import HALF, TINY

from jmp_policy.quant import quantize_array, quantize_asymmetric, quantize_symmetric

LENGTH, BLOCK = 33, 11
EDGES = reference.edge_columns(LENGTH)

quantized = jax.jit(quantize_array, static_argnums=1, static_argnames="clip")


def columns(dtype):
    return jnp.asarray(np.stack([*EDGES.values(), reference.fresh(LENGTH, 1)[:, 0]], axis=1), dtype)


def numbers_of(array):
    return np.array(array, np.float64)  # a copy, and no promotion of JAX's


def in_blocks(weight):
    return np.asarray(weight, np.float64).reshape(-1, BLOCK, weight.shape[-1])


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
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
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_int4_is_the_nearest_of_16_numbers_of_which_one_is_zero(dtype):
    weight = columns(dtype)
    array = quantized(weight, f"int4/{BLOCK}")
    exact, scale, zero = reference.uint4(in_blocks(weight), (1,))
    np.testing.assert_allclose(array.scale, scale, rtol=2**-21)
    assert (array.values.dtype, array.zero_point.dtype, array.scale.shape) == (jnp.uint8, jnp.uint8, scale.shape)
    normal = np.broadcast_to(scale > TINY, exact.shape)
    assert np.abs(numbers_of(array.zero_point) - zero)[scale > TINY].max() <= HALF
    values = in_blocks(array.dequantize("float32")) / np.asarray(array.scale, np.float64)
    assert np.abs(values - exact)[normal].max() <= HALF + 1e-4  # the values are computed with a rounded scale
    assert not np.asarray(array.dequantize(), np.float32)[np.asarray(weight, np.float64) == 0].any()


@pytest.mark.slow
@pytest.mark.parametrize(("format", "dtype"), [("int8", "bfloat16"), (f"int4/{BLOCK}", "float16")])
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
@pytest.mark.parametrize(("format", "bad"), [("int8", np.nan), (f"int4/{BLOCK}", -np.inf)])
def test_a_number_that_is_not_finite_spoils_what_shares_its_scale_and_nothing_else(format, bad):
    weight = columns("float32")
    array, spoilt = quantized(weight, format), quantized(weight.at[2, 3].set(bad), format)
    numbers = numbers_of(spoilt.dequantize())
    group = slice(0, LENGTH if format == "int8" else BLOCK)
    assert not np.isfinite(numbers[group, 3]).any()
    numbers[group, 3] = array.dequantize()[group, 3]
    np.testing.assert_array_equal(numbers, array.dequantize())


@pytest.mark.parametrize(("format", "bad"), [("int8", np.nan), ("int8", np.inf), ("int4/-1", np.nan)])
def test_one_bad_number_of_a_large_array_is_seen_where_a_maximum_of_xla_loses_it(format, bad):
    weight = np.random.default_rng().normal(size=(8192, 16)).astype(np.float32)
    weight[5000, 3] = bad
    is_finite = np.isfinite(np.asarray(quantized(weight, format).scale)).ravel()
    assert is_finite.tolist() == [column != 3 for column in range(16)]


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


def heavy_tailed():
    weight = reference.fresh(64, 8)
    return np.asarray(weight * np.abs(weight), np.float32)


def square_error(array, weight):
    """For each scale, in float64: of the exact numbers that the integers stand for."""
    numbers = np.asarray(array.dequantize("float32"), np.float64)
    return ((numbers - weight) ** 2).reshape(array.scale.size // weight.shape[1], -1, weight.shape[1]).mean(axis=1)


def searched(weight, format):
    """The least mean square error over all fractions, by the formulas in float64."""
    blocks = weight.astype(np.float64).reshape(-1, 64 if format == "int8" else 16, 8)
    errors = []
    for fraction in np.arange(1, 0.49, -0.02):
        if format == "int8":
            scale = np.abs(blocks).max(1, keepdims=True) * fraction / 127
            rounded = np.clip(np.rint(blocks / scale), -127, 127) * scale
        else:
            low, high = np.minimum(blocks.min(1, keepdims=True), 0), np.maximum(blocks.max(1, keepdims=True), 0)
            scale = (high - low) * fraction / 15
            zero = np.rint(-low * fraction / scale)
            rounded = (np.clip(np.rint(blocks / scale) + zero, 0, 15) - zero) * scale
        errors.append(((rounded - blocks) ** 2).mean(axis=1))
    return np.min(errors, axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "int4/16"])
def test_mse_is_the_best_fraction_of_a_search_in_float64_and_never_worse_than_absmax(format):
    weight = heavy_tailed()
    best, whole = (square_error(quantized(weight, format, clip=clip), weight) for clip in ("mse", "absmax"))
    assert (best <= whole * (1 + 1e-5)).all()  # the search is in float32
    np.testing.assert_allclose(best, searched(weight, format), rtol=1e-4)
    assert format == "int8" or (best < 0.99 * whole).any()


@pytest.mark.slow
def test_a_percentile_is_that_of_the_magnitudes_and_the_whole_one_absmax_bit_for_bit():
    percentile, weight = 99.5, heavy_tailed()
    expected = np.percentile(np.abs(weight.astype(np.float64)), percentile, axis=0)
    array = quantized(weight, "int8", clip=percentile)
    np.testing.assert_allclose(array.scale[0] * 127, expected, rtol=1e-5)
    inside = np.abs(weight) <= expected
    error = np.abs(np.asarray(array.dequantize(), np.float64) - weight)
    assert (error <= expected / 127 * reference.HALF)[inside].all()
    np.testing.assert_allclose((np.abs(np.asarray(array.values)) == 127)[~inside], True)
    jax.tree.map(np.testing.assert_array_equal, quantized(weight, "int8", clip=100), quantized(weight, "int8"))


def test_a_percentile_clips_both_ends_of_four_bits_and_widens_neither():
    weight = heavy_tailed()
    weight[:, 0] = np.abs(weight[:, 0])  # of one sign: its range ends at zero
    array = quantized(weight, f"int4/{64}", clip=90.0)
    limit = np.percentile(np.abs(weight.astype(np.float64)), 90.0, axis=0)
    low, high = np.maximum(np.minimum(weight.min(axis=0), 0), -limit), np.minimum(weight.max(axis=0), limit)
    np.testing.assert_allclose(array.scale[0, 0], (high - low) / 15, rtol=1e-5)
    assert array.zero_point[0, 0, 0] == 0


@pytest.mark.parametrize(("format", "clip"), [("int8", 90.0), ("int8", "mse"), ("int4/64", "mse")])
def test_a_number_that_is_not_finite_is_not_clipped_away(format, clip):
    weight = heavy_tailed()
    weight[3, 1:3] = np.inf, np.nan
    finite = np.isfinite(quantized(weight, format, clip=clip).dequantize())
    assert finite.all(axis=0).tolist() == [True, False, False, *[True] * 5]
    assert not finite[:, 1:3].any()


@pytest.mark.parametrize("bad", ["max", 0, -1, 100.5, True, None, float("nan")])
def test_a_clip_that_is_none_is_an_error(bad):
    with pytest.raises(ValueError, match=r"^clip is 'absmax', 'mse' or a percentile in \(0, 100\], got .*: clip=99\.9"):
        quantize_array(jnp.ones(3), "int8", clip=bad)
