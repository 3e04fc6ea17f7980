"""What a format loses of a tensor, told from its row, is what casting it really loses."""

import itertools
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmp_policy.numerics import collect

# The bounds on these errors would be lost in whole predictions, each of which compiles a model.
from jmp_policy.numerics._predict_losses import (
    MOST_ERROR,
    choose_scale,
    estimate_error,
    find_loss,
    find_scaled_loss,
    find_span,
)
from jmp_policy.policy import parse_format

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float8_e5m2": ml_dtypes.float8_e5m2}
SIZES = [-45, -30, -24, -18, -12, -3, 4, 12]


def measure(x, formats=(), **options):
    observed = collect(lambda x: x, formats=list(formats), of="arguments", **options)
    [row] = observed(jnp.asarray(x, jnp.float32))[1].rows()
    return row


def draw(exponent, seed=0, spread=2.0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=400) * np.exp2(rng.normal(scale=spread, size=400)) * 2.0**exponent).astype(np.float32)


def cast_error(x, dtype, exponent):
    scaled = np.ldexp(x.astype(np.float64), exponent)
    cast = scaled.astype(dtype).astype(np.float64)
    return math.sqrt(((cast - scaled) ** 2).sum() / (scaled**2).sum())


@pytest.mark.parametrize("size", SIZES)
def test_the_error_of_a_cast_and_the_span_that_loses_little_are_told_from_the_histogram(size):
    x = draw(size, seed=abs(size))
    row = measure(x)
    for name, exponent in itertools.product(DTYPES, (-6, 0, 5, 11, 20)):
        known = parse_format(name)
        if np.abs(x).max() * 2.0**exponent <= known.max:
            real, told = cast_error(x, DTYPES[name], exponent), estimate_error(row, known, exponent)
            assert 2 / 3 * real - 1e-4 <= told <= 1.5 * real + 1e-4 or real > 0.9 < told
    least, most = find_span(row, "float16")
    assert np.isfinite(np.ldexp(x, int(most)).astype(np.float16)).all()
    with np.errstate(over="ignore"):
        assert not np.isfinite(np.ldexp(x, int(most) + 1).astype(np.float16)).all()
    assert cast_error(x, np.float16, int(least)) <= 1.3 * MOST_ERROR
    assert cast_error(x, np.float16, int(least) - 2) > MOST_ERROR


@pytest.mark.slow
def test_a_tensor_whose_range_is_too_wide_has_no_span():
    row = measure([1e-9] * 1000 + [1.0])
    assert find_span(row, "float16")[0] < 0  # the small numbers do not matter: they are a billionth of it
    wide = measure(np.ldexp(1.0, np.arange(-46, 40)))
    assert find_span(wide, "float8_e4m3fn")[0] <= find_span(wide, "float8_e4m3fn")[1]  # nor do they here
    assert find_span(measure(np.zeros(3)), "float16") == (-math.inf, math.inf)


def test_an_overflow_begins_where_casting_is_infinite():
    for amax in (65504.0, 65519.0, 65520.0, 1e6):
        with np.errstate(over="ignore"):
            is_infinite = not np.isfinite(np.float32(amax).astype(np.float16))
        loss = find_loss(measure([1.0, amax]), "float16")
        assert (loss.what == "overflow") == is_infinite
        assert (loss.risk > 1) == is_infinite
    scaled = find_loss(measure([1.0, 8.0]), "float16", 13)
    assert (scaled.what, scaled.amax, scaled.limit) == ("overflow", 65536.0, 65504.0)
    assert scaled.share == 0.5 or scaled.share == 0.0


def test_without_histogram_extremes_tell_where_they_can():
    known = parse_format("float16")
    assert estimate_error(measure([1.0, 2.0], histogram=False), known, 0) < 1e-3
    assert estimate_error(measure([1e-9, 2e-9], histogram=False), known, 0) == 1.0
    message = r"do not contain what 'float16' .* formats=\['float16'\], histogram=True, where='all'"
    with pytest.raises(ValueError, match=message):
        estimate_error(measure([1e-9, 2.0], histogram=False), known, 0)


@pytest.mark.slow
def test_a_quantized_format_loses_what_a_few_outliers_leave_no_room_for():
    normal = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
    outlier = normal.copy()
    outlier[0, 0] = 300.0
    for format in ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "mxfp4/64"):
        assert find_scaled_loss(measure(normal, [format]), format).what == ""
        assert find_scaled_loss(measure(normal * 2.0**-30, [format]), format).what == ""  # the scale moves it
    assert find_scaled_loss(measure(outlier, ["int8"]), "int8").what == ""  # relative to the outlier it is small
    spread = np.where(np.arange(512) % 64 == 0, 40.0, normal.reshape(-1)).reshape(4, 128).astype(np.float32)
    assert find_scaled_loss(measure(spread, ["int4"]), "int4").what in ("", "precision")
    for format in ("int8", "nvfp4"):
        message = rf"do not contain what '{format}' would lose.*formats=\['{format}'\], where='all'"
        with pytest.raises(ValueError, match=message):
            find_scaled_loss(measure(normal), format)
    assert find_scaled_loss(measure(normal), "float8_e4m3fn").share == pytest.approx(0.026, abs=0.01)


def test_the_scale_that_saves_most_scopes_is_in_the_middle_of_what_they_allow():
    assert choose_scale({"a": [(2, 20)], "b": [(4, 10)]}, None, ["float16"]) == (7, ())
    assert choose_scale({"a": [(2, 20)], "b": [(4, 10)]}, 5, ["float16"]) == (5, ())
    assert choose_scale({"a": [(2, 20)], "b": [(4, 10)]}, 15, ["float16"]) == (7, ())
    assert choose_scale({"a": [(2, 6)], "b": [(8, 12)], "c": [(9, 14)]}, None, ["float16"]).unsaved == ("a",)
    assert choose_scale({"a": [(-math.inf, math.inf)]}, None, ["float16"]).unsaved == ()
    assert choose_scale({"a": [(-100, 120)]}, None, ["bfloat16"]) == (0, ())
    assert choose_scale({"a": [(-20, 9)]}, None, ["float16"]).exponent == 0  # below 1 only where nothing else saves it
    assert choose_scale({"a": [(-20, -3)]}, None, ["float16"]).exponent < 0
