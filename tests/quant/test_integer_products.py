"""Products with quantized weights against NumPy's of integers, and within a bound of those of real numbers."""

import dataclasses
import functools
import re
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from properties import examples
from quant_reference import HALF, find_ties, fresh, rounded_rows

from jmp_policy.quant import (
    Layout,
    conv_general_dilated,
    dot_general,
    einsum,
    quantize_array,
)

EPS = 2.0**-22  # a sum of integers becomes a float32 and is multiplied twice
ROWS = (((1,), (0,)), ((), ()))
NO_KERNEL = "an H200 had no kernel for int8 matmuls of 2 and 6 elements with autotuning off (jax 0.11.2)"


def array(*shape, dtype="float32"):
    return jnp.asarray(fresh(*shape), dtype)


def integers(equation, x, w):
    """The product of the integers, what ties may change of it, the scale of each result, a bound on its error."""
    (left, right), out = equation.split("->")[0].split(","), equation.split("->")[1]
    summed = [axis for axis, label in enumerate(right) if label not in out]
    together = tuple(range(summed[0], summed[-1] + 1)) if summed else (len(right) - 1,)
    rows, row_scale = rounded_rows(x, tuple(axis for axis, label in enumerate(left) if label not in out))
    columns, column_scale = rounded_rows(w, together)
    row_steps, column_steps = (np.broadcast_to(s, a.shape) for s, a in ((row_scale, rows), (column_scale, columns)))
    scale = np.einsum(equation, row_steps.astype(np.float64), column_steps.astype(np.float64))
    scale /= np.einsum(equation, np.ones(x.shape), np.ones(w.shape))  # constant over what is summed over
    bound = np.einsum(equation, np.abs(x).astype(np.float64) + row_steps / 2, column_steps * HALF)
    bound += np.einsum(equation, row_steps * HALF, np.abs(w).astype(np.float64))
    doubts = find_ties(x, row_scale), find_ties(w, column_scale)
    ties = sum_doubts(functools.partial(np.einsum, equation), rows, columns, *doubts)
    return np.einsum(equation, rows, columns), ties, scale, bound


def sum_doubts(product, rows, columns, row_doubts, column_doubts):
    """How far off a product of integers may be: one step of either operand times the magnitude of the other."""
    return product(row_doubts, np.abs(columns) + column_doubts) + product(np.abs(rows), column_doubts)


quantized = jax.jit(quantize_array, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=2)
def multiplied(x, w, format=None):
    return dot_general(x, w, ROWS, quantization=format)


def check(result, equation, x, w):
    sums, ties, scale, bound = integers(equation, x, w)
    assert_integers(result, sums, ties, scale)
    exact = np.einsum(equation, *(np.asarray(a, np.float64) for a in (x, w)))
    assert (np.abs(np.asarray(result, np.float64) - exact) <= bound).all()


def assert_integers(result, sums, ties, scale):
    error = np.abs(np.asarray(result, np.float64) - sums * scale)
    assert (error <= EPS * np.abs(sums * scale) + (1 + EPS) * ties * scale).all()


@st.composite
def dots(draw):
    """Any dimension numbers: their equation, the labels of both operands, and a length for each label."""
    counts = [draw(st.integers(low, 2)) for low in (0, 1, 0, 0)]
    letters = iter(string.ascii_lowercase)
    batch, summed, left, right = ([next(letters) for _ in range(count)] for count in counts)
    labels = [draw(st.permutations([*batch, *summed, *own])) for own in (left, right)]
    out = [*batch, *(a for a in labels[0] if a in left), *(a for a in labels[1] if a in right)]
    numbers = tuple(tuple(tuple(own.index(a) for a in group) for own in labels) for group in (summed, batch))
    lengths = {a: draw(st.integers(1, 4)) for a in (*batch, *summed, *left, *right)}
    shapes = [tuple(lengths[a] for a in own) for own in labels]
    return f"{''.join(labels[0])},{''.join(labels[1])}->{''.join(out)}", numbers, shapes


@pytest.mark.slow
@pytest.mark.cpu(NO_KERNEL)
@given(dots())
@examples(4)
def test_any_dot_general_is_that_of_the_integers(case):
    equation, numbers, shapes = case
    x, w = (array(*shape) for shape in shapes)
    result = jax.jit(lambda x, w: dot_general(x, w, numbers, quantization="int8"))(x, w)
    check(result, equation, np.asarray(x), np.asarray(w))


W4A8 = {
    "a matmul": ("ab,bc->ac", (5, 32), (32, 6)),
    "a weight with its outputs first": ("ab,cb->ac", (5, 32), (6, 32)),
    "heads and a batch in another order": ("xbhd,bhdnm->mxbn", (3, 2, 4, 8), (2, 4, 8, 3, 2)),
}


@pytest.mark.parametrize("name", W4A8)
def test_int4_with_activations_multiplies_the_integers_of_each_block(name):
    equation, *shapes = W4A8[name]
    x, w = (array(*shape) for shape in shapes)
    product = functools.partial(einsum, equation, quantization="int4/16(activations=true)")
    (line,) = (line for line in str(jax.make_jaxpr(product)(x, w)).splitlines() if "dot_general" in line)
    assert ":i32[" in line
    labels, right = equation.split("->")[0].split(",")
    summed = [axis for axis, label in enumerate(labels) if label in right and label not in equation.split("->")[1]]
    first, channels = right.index(labels[summed[0]]), len(right) - right.index(labels[summed[-1]]) - 1
    layout = Layout(w.shape[first : w.ndim - channels], channels)
    weight = np.asarray(quantized(w, "int4/16", layout).dequantize(), np.float64)
    rows, scale = rounded_rows(x, tuple(summed))
    multiply = functools.partial(np.einsum, equation)
    exact, size = multiply(rows * np.float64(scale), weight), multiply(np.abs(rows) * np.float64(scale), np.abs(weight))
    ties = multiply(find_ties(np.asarray(x), scale) * scale, np.abs(weight))
    # Each weight is rounded once in the reference; each block's sum is scaled twice and added to one other.
    assert (np.abs(np.asarray(jax.jit(product)(x, w), np.float64) - exact) <= 2.0**-21 * size + ties).all()


@pytest.mark.parametrize("format", ["int4/4(activations=true)", "e4m3/4(activations=true)"])
def test_a_weight_whose_blocks_lie_along_its_outputs_is_dequantized(format):
    x, w = array(5, 8), quantize_array(jax.ShapeDtypeStruct((8, 8), jnp.float32), format)
    program = jax.make_jaxpr(functools.partial(einsum, "ab,cb->ac"))(x, w)
    (line,) = (line for line in str(program).splitlines() if "dot_general" in line)
    assert ":f32[5,8]" in line


@pytest.mark.parametrize("format", ["int4/2(activations=true)", "e4m3/2(activations=true)"])
def test_the_sums_of_many_blocks_are_not_in_memory_at_once(format):
    x, w = array(544, 256), array(256, 256)  # 128 blocks, of which each has sums as large as the output
    compiled = multiplied.lower(x, w, format).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 32 * 4 * 544 * 256
    halves = [multiplied(half, w, format) for half in (x[:128], x[128:256])]  # at once
    # Sums of 128 blocks in two orders.
    tolerance = 128 * 2.0**-23 * float(jnp.max(jnp.abs(x[:256]) @ jnp.abs(w)))
    np.testing.assert_allclose(compiled(x, w)[:256], jnp.concatenate(halves), rtol=0, atol=tolerance)


def test_int4_with_activations_clips_its_inputs_where_they_were_calibrated():
    x, w = array(5, 32), array(32, 6)
    clipped = quantize_array(w, "int4/16(activations=true)", input_clip=1.0)
    assert clipped.input_clip.shape == ()
    plain = dataclasses.replace(clipped, input_clip=None)
    x = x.at[:, 0].set(1.0)  # a largest magnitude that all rows have
    multiply = jax.jit(lambda x, w: dot_general(x, w, ROWS))
    np.testing.assert_array_equal(multiply(x, clipped), multiply(jnp.clip(x, -1, 1), plain))
    assert quantize_array(w, "int4/16", input_clip=1.0).input_clip is None


IMAGES = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
CONVOLUTIONS = {
    "strides and padding": {"window_strides": (2, 1), "padding": [(1, 0), (2, 2)]},
    "groups": {"feature_group_count": 2},
    "dilated": {"rhs_dilation": [2, 1], "lhs_dilation": (1, 2), "padding": ((0, 1), (2, 0))},
}


def test_odd_groups_of_a_convolution_are_multiplied_as_floats_on_gpus():
    convolve = functools.partial(conv_general_dilated, **IMAGES, quantization="int8")
    types = {}
    for groups, channels in ((1, 3), (2, 8), (2, 6), (4, 4)):
        x, w = jnp.ones((1, 5, 5, channels)), jnp.ones((3, 3, channels // groups, channels))
        exported = jax.export.export(
            jax.jit(lambda x, w, n=groups: convolve(x, w, feature_group_count=n)), platforms=["cuda"]
        )
        (line,) = (line for line in exported(x, w).mlir_module().splitlines() if "stablehlo.convolution" in line)
        types[groups, channels] = re.findall(r"tensor<[0-9x]+x(\w+)>", line.rpartition(" : ")[2])
    assert types == {
        (1, 3): ["i8", "i8", "i32"],
        (2, 8): ["i8", "i8", "i32"],
        (2, 6): ["bf16", "bf16", "f32"],
        (4, 4): ["bf16", "bf16", "f32"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_that_of_the_integers(name):
    options = IMAGES | CONVOLUTIONS[name]
    x, w = array(2, 5, 6, 4), array(3, 2, 4 // options.get("feature_group_count", 1), 6)
    result = jax.jit(lambda x, w: conv_general_dilated(x, w, **options, quantization="int8"))(x, w)
    (rows, row_scale), (columns, scale) = rounded_rows(x, (1, 2, 3)), rounded_rows(w, (0, 1, 2))
    doubts = find_ties(x, row_scale), find_ties(w, scale)
    convolve = lambda *of: np.asarray(lax.conv_general_dilated(*(jnp.asarray(a, jnp.float32) for a in of), **options))
    sums = convolve(rows, columns)  # of at most 24 products of 127²: exact in float32
    ties = sum_doubts(convolve, rows, columns, *doubts)
    assert_integers(result, sums, ties, row_scale.astype(np.float64) * scale)


@pytest.mark.slow
def test_a_convolution_that_joins_the_batch_rounds_the_weight_alone():
    options = {"window_strides": (1,), "padding": "VALID", "batch_group_count": 2}
    x, w = array(2, 4, 5), array(2, 4, 3)
    result = conv_general_dilated(x, w, **options, quantization="int8")
    rounded = quantize_array(w, "int8", Layout((4, 3), 0)).dequantize()
    np.testing.assert_array_equal(result, lax.conv_general_dilated(x, rounded, **options))


@pytest.mark.slow
def test_scales_whose_product_is_too_small_or_too_large_lose_nothing():
    tiny = jnp.full((1, 64), 1e-17)
    product = multiplied(tiny, tiny.T, "int8")
    np.testing.assert_allclose(product, [[64e-34]], rtol=1e-5)
    row, column = jnp.array([[1e32, 0]]), jnp.array([[0], [1e12]])
    assert multiplied(row, column, "int8").tolist() == [[0]]


def test_without_a_quantization_it_is_the_operation_of_jax():
    x, w = array(5, 16), array(16, 6)
    np.testing.assert_array_equal(einsum("ab,bc->ac", x, w), jnp.einsum("ab,bc->ac", x, w))
