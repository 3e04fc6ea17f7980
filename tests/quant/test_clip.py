"""Clipping of the range: a percentile is NumPy's, and "mse" the best of all tried and never worse than absmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quant_reference as reference

from jmp_policy.quant import quantize_array
from jmp_policy.quant._numbers import _FRACTIONS, choose_peak

LENGTH = 64
quantized = jax.jit(quantize_array, static_argnums=1, static_argnames="clip")


def heavy_tailed():
    weight = reference.fresh(LENGTH, 8)
    return np.asarray(weight * np.abs(weight), np.float32)


def square_error(array, weight):
    """For each scale, in float64: of the exact numbers that the integers stand for."""
    numbers = np.asarray(array.dequantize("float32"), np.float64)
    return ((numbers - weight) ** 2).reshape(array.scale.size // weight.shape[1], -1, weight.shape[1]).mean(axis=1)


def searched(weight, format):
    """The least mean square error over all fractions, by the formulas in float64."""
    blocks = weight.astype(np.float64).reshape(1 if format == "int8" else -1, LENGTH if format == "int8" else 16, 8)
    errors = []
    for fraction in _FRACTIONS:
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
@pytest.mark.parametrize("percentile", [100, 99.5, 90])
def test_a_percentile_is_that_of_the_magnitudes(percentile):
    weight = heavy_tailed()
    expected = np.percentile(np.abs(weight.astype(np.float64)), percentile, axis=0)
    array = quantized(weight, "int8", clip=percentile)
    np.testing.assert_allclose(array.scale[0] * 127, expected, rtol=1e-5)
    inside = np.abs(weight) <= expected
    error = np.abs(np.asarray(array.dequantize(), np.float64) - weight)
    assert (error <= expected / 127 * reference.HALF)[inside].all()
    np.testing.assert_allclose((np.abs(np.asarray(array.values)) == 127)[~inside], True)


def test_a_percentile_clips_both_ends_of_four_bits_and_widens_neither():
    weight = heavy_tailed()
    weight[:, 0] = np.abs(weight[:, 0])  # of one sign: its range ends at zero
    array = quantized(weight, f"int4/{LENGTH}", clip=90.0)
    limit = np.percentile(np.abs(weight.astype(np.float64)), 90.0, axis=0)
    low, high = np.maximum(np.minimum(weight.min(axis=0), 0), -limit), np.minimum(weight.max(axis=0), limit)
    np.testing.assert_allclose(array.scale[0, 0], (high - low) / 15, rtol=1e-5)
    assert array.zero_point[0, 0, 0] == 0


@pytest.mark.slow
def test_the_whole_percentile_is_absmax_bit_for_bit():
    weight = heavy_tailed()
    jax.tree.map(np.testing.assert_array_equal, quantized(weight, "int8", clip=100), quantized(weight, "int8"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("clip", ["mse", 90.0])
def test_a_number_that_is_not_finite_is_not_clipped_away(clip):
    weight = heavy_tailed()
    weight[3, 1:3] = np.inf, np.nan
    for format in ("int8", f"int4/{LENGTH}"):
        finite = np.isfinite(quantized(weight, format, clip=clip).dequantize())
        assert finite.all(axis=0).tolist() == [True, False, False, *[True] * 5]
        assert not finite[:, 1:3].any()


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["max", 0, -1, 100.5, True, None, float("nan")])
def test_a_clip_that_is_none_is_an_error(bad):
    with pytest.raises(ValueError, match=r"^clip is 'absmax', 'mse' or a percentile in \(0, 100\], got .*: clip=99\.9"):
        choose_peak(jnp.ones(3), (0,), bad)
