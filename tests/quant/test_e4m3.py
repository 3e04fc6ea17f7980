"""Weights in e4m3 with float32 scales, and matmuls by them, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quant_reference import TINY, edge_columns, fresh

from jmp_policy.quant import E4M3, Layout, QuantizedArray, conv_general_dilated, dot_general, einsum, quantize_array

ROWS = (((1,), (0,)), ((), ()))
quantized = jax.jit(quantize_array, static_argnums=(1, 2))
SQUARES, CHANNELS = "e4m3/16", "e4m3/-1"


def array(*shape, dtype="float32"):
    return jnp.asarray(fresh(*shape), dtype)


def spread(per_block, shape, format):
    """A value of each scale for each element of a matrix."""
    if format == CHANNELS:
        return np.broadcast_to(per_block, shape)
    return np.repeat(np.repeat(per_block, 16, axis=0), 16, axis=1)[: shape[0], : shape[1]]


def largest(weight, format):
    """The largest magnitude that each scale is of, in float64."""
    if format == CHANNELS:
        return np.abs(weight).max(axis=0, keepdims=True)
    starts = [range(0, length, 16) for length in weight.shape]
    return np.array([[np.abs(weight[i : i + 16, j : j + 16]).max() for j in starts[1]] for i in starts[0]])


@pytest.mark.parametrize("format", [SQUARES, CHANNELS])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_it_is_the_nearest_e4m3_value_of_a_scale_that_maps_the_largest_magnitude_to_448(format, dtype):
    """Of the sizes, 16 divides neither."""
    weight = jnp.asarray(np.stack([*edge_columns(33).values(), *fresh(33, 9).T], axis=1), dtype)
    made, wide = quantized(weight, format), np.asarray(weight, np.float64)
    assert (made.values.dtype, made.values.shape, made.scale.dtype) == (jnp.float8_e4m3fn, weight.shape, jnp.float32)
    amax = largest(wide, format)
    np.testing.assert_allclose(made.scale, np.maximum(amax / 448, TINY), rtol=2**-22)
    scale = spread(np.asarray(made.scale, np.float64), wide.shape, format)
    error = np.abs(np.asarray(made.dequantize("float32"), np.float64) - wide)
    # Half a step of 3 bits of mantissa, or of the subnormal values below 2**-6; the quotient is rounded before.
    assert (error <= np.maximum(np.abs(wide) * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20) + TINY).all()
    eager = quantize_array(weight, format)
    jax.tree.map(np.testing.assert_array_equal, eager, made)


@pytest.mark.parametrize("format", [SQUARES, CHANNELS])
def test_a_weight_of_zeros_stays_so_and_a_bad_number_spoils_its_block_alone(format):
    assert not quantized(jnp.zeros((33, 20)), format).dequantize().any()
    weight = array(33, 20)
    plain = np.array(quantized(weight, format).dequantize())
    for bad in (np.nan, np.inf):
        found = np.array(quantized(weight.at[20, 3].set(bad), format).dequantize())
        place = np.s_[16:32, :16] if format == SQUARES else np.s_[:, 3]
        assert not np.isfinite(found[20, 3])
        found[place] = plain[place]
        np.testing.assert_array_equal(found, plain)


def test_a_stack_and_axes_that_are_merged_have_the_squares_of_their_matrices():
    weight = array(3, 4, 9, 5, 7)
    made = quantized(weight, SQUARES, Layout((4, 9), 2))
    assert (made.shape, made.scale.shape) == (weight.shape, (3, 3, 3))
    for n in range(3):
        alone = quantized(weight[n].reshape(36, 35), SQUARES)
        np.testing.assert_array_equal(made.dequantize()[n].reshape(36, 35), alone.dequantize())
        sliced = jax.tree.map(lambda leaf, n=n: leaf[n], made)
        np.testing.assert_array_equal(sliced.dequantize(), made.dequantize()[n])


def round_rows(x, block):
    """The e4m3 values of rows times their scales, and how far off they may be where a quotient is between two."""
    x = np.asarray(x, np.float32)
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(len(x), -1, block)
    scale = np.maximum(np.abs(padded).max(axis=2, keepdims=True) * np.float32(1 / 448), np.float32(TINY))
    low, mid, high = (
        (np.float64(padded) / scale * factor).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
        for factor in (1 - 2.0**-20, 1, 1 + 2.0**-20)
    )
    return (each.reshape(len(x), -1)[:, : x.shape[1]] for each in (mid, np.abs(high - low)))


@pytest.mark.parametrize(("format", "block"), [("e4m3/16(activations=true)", 16), ("e4m3/-1(activations=true)", 40)])
@pytest.mark.parametrize("is_transposed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_activations_e4m3_values_are_multiplied_and_summed_in_float32(format, block, is_transposed):
    x, w = array(5, 40), array(40, 20)
    equation, layout = ("ab,cb->ac", Layout((40,), 0)) if is_transposed else ("ab,bc->ac", None)
    right = w.T if is_transposed else w
    product = functools.partial(einsum, equation, quantization=format)
    (line,) = (line for line in str(jax.make_jaxpr(product)(x, right)).splitlines() if "dot_general[" in line)
    assert ":f32[" in line
    weight = np.asarray(quantized(right, format, layout).dequantize(), np.float64)
    weight = weight.T if is_transposed else weight
    rows, doubts = round_rows(x, block)
    error = np.abs(np.asarray(jax.jit(product)(x, right), np.float64) - rows @ weight)
    # Sums of at most 40 exact products, each scaled twice; weights are rounded once in the reference.
    assert (error <= 44 * 2.0**-24 * (np.abs(rows) @ np.abs(weight)) + doubts @ np.abs(weight)).all()
    eager = np.asarray(product(x, right), np.float64)
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    # Half a step of 3 bits of mantissa, or of the subnormal values of the largest scale.
    off_x, off_w = (np.maximum(np.abs(each) * 2.0**-4, np.abs(each).max() / 448 * 2.0**-10) for each in (x, w))
    assert (np.abs(eager - x @ w) <= (np.abs(x) @ off_w + off_x @ (np.abs(w) + off_w)) * (1 + 2.0**-14)).all()


def test_hardware_gets_products_of_e4m3_with_activations_and_of_floats_without():
    x, w = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    for format, dtype in (("e4m3/16", "bf16"), ("e4m3/16(activations=true)", "f8E4M3FN")):
        run = jax.jit(lambda x, w: dot_general(x, w, ROWS))
        text = jax.export.export(run, platforms=["cuda"])(x, quantize_array(w, format)).mlir_module()
        (line,) = (line for line in text.splitlines() if "stablehlo.dot_general" in line)
        assert f"x{dtype}>, tensor" in line


def test_a_convolution_rounds_the_filter_alone():
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    x, w = array(2, 5, 5, 6), array(3, 3, 6, 4)
    rounded = quantize_array(w, SQUARES, Layout((3, 3, 6), 1)).dequantize()
    found = conv_general_dilated(x, w, **options, quantization="e4m3/16(activations=true)")
    np.testing.assert_array_equal(found, jax.lax.conv_general_dilated(x, rounded, **options))


def test_its_class_says_what_it_is():
    assert (str(E4M3()), str(E4M3(-1)), E4M3().bits) == ("e4m3/128", "e4m3/-1", 8)
    assert E4M3(activations=True).for_tables.kind == "int8"
    with pytest.raises(
        ValueError, match=r"^block_size must be at least 1, got 0\. For example: E4M3\(block_size=128\)"
    ):
        E4M3(block_size=0)
    message = r"^clip='mse' is for integers, and 'e4m3/128' scales each block of the weight by its largest element\."
    with pytest.raises(ValueError, match=message):
        quantize_array(array(8, 8), "e4m3", clip="mse")
    assert isinstance(quantize_array(array(8, 8), "e4m3"), QuantizedArray)
