"""Quantized products show every bad number, also of large arrays, in which a `max` of XLA:CPU loses a nan."""

import jax
import numpy as np
import pytest

from jmp_policy import quant
from jmp_policy.quant._numbers import measure_amax, measure_bounds

BAD = [np.nan, np.inf, -np.inf]
POLICIES = ["int8", "int8(activations=false)", "int4", "float8(recipe=current)", "float8(recipe=current/row)", "float8"]
ROWS, SUMMED, COLUMNS = 16, 8192, 16
DIMENSIONS = (((1,), (0,)), ((), ()))


def _draw(*shape):
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def _with(bad, array, *position):
    spoilt = array.copy()
    spoilt[position] = bad
    return spoilt


def _product(name):
    """A jitted product of `x` and `w` in 8 or 4 bits."""
    state = quant.float8_state(quant.Float8()) if name == "float8" else None
    return jax.jit(lambda x, w: quant.dot_general(x, w, DIMENSIONS, quantization=name, state=state))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axes", [None, (0,), (1,), (0, 1)])
def test_amax_is_infinite_where_a_number_is_not_finite(axes, dtype):
    x = _draw(ROWS, SUMMED)
    amax = jax.jit(lambda x: measure_amax(x.astype(dtype), axes))
    expected = np.abs(np.asarray(x, dtype)).max(axis=axes, keepdims=axes is not None)
    np.testing.assert_array_equal(amax(x), expected)
    for bad in BAD:
        got = np.asarray(amax(_with(bad, x, 3, 5000)))
        spoilt = np.isnan(_with(np.nan, x, 3, 5000))
        bad_ones = spoilt.any(axis=axes, keepdims=axes is not None)
        np.testing.assert_array_equal(np.isinf(got), bad_ones)
        np.testing.assert_array_equal(got[~bad_ones], np.asarray(expected)[~bad_ones])


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad", BAD)
def test_bounds_are_infinite_where_a_number_is_not_finite(bad):
    low, high = jax.jit(lambda x: measure_bounds(x, (1,)))(_with(bad, _draw(ROWS, SUMMED), 3, 5000))
    not_finite = ~np.isfinite(np.concatenate([low, high], 1)).all(1)
    assert not_finite.tolist() == [row == 3 for row in range(ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_bad_input_is_not_made_finite(name):
    product = _product(name)
    x, w = _draw(ROWS, SUMMED), _draw(SUMMED, COLUMNS)
    assert np.isfinite(product(x, w)).all()
    for bad in BAD:
        assert not np.isfinite(product(_with(bad, x, 3, 5000), w)[3]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_bad_weight_is_not_made_finite(name):
    product = _product(name)
    x, w = _draw(ROWS, SUMMED), _draw(SUMMED, COLUMNS)
    for bad in BAD:
        assert not np.isfinite(product(x, _with(bad, w, 5000, 2))[:, 2]).any()


@pytest.mark.slow
def test_a_nan_behind_a_relu_that_xla_fuses_into_the_product_is_not_made_finite():
    product = _product("int8")
    x, w = _draw(ROWS, SUMMED), _draw(SUMMED, COLUMNS)
    rows = jax.jit(lambda x, w: product(jax.nn.relu(x), w))(_with(np.nan, x, 3, 5000), w)
    assert np.isfinite(rows).all(1).tolist() == [row != 3 for row in range(ROWS)]
