"""Products of numbers in blocks, forward and backward, against NumPy's in float64 of what a model of the rules says."""

import functools
import math

import block_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float8_reference import UNIT

import jmp_policy.quant as quant
from jmp_policy.quant import MXFP4, MXFP8, NVFP4, conv_general_dilated, einsum

FORMATS = {
    "mxfp8": MXFP8(block_size=8),
    "mxfp8 as hardware has it": MXFP8(),
    "mxfp8 with the OCP text's scales and e5m2": MXFP8(block_size=8, gradients="e5m2", scale_rounding="floor"),
    "mxfp4": MXFP4(block_size=8, activations=True),
    "nvfp4": NVFP4(block_size=8),
    "nvfp4 without squares": NVFP4(block_size=8, square_weights=False),
}
"""Block size 8 for all but one: the rules have no number in them, and small arrays have many blocks."""
CASES = {
    "no dimension that blocks divide": ("abd,dn->abn", {"a": 3, "b": 7, "n": 5}),
    "a batch that moves": ("bed,edn->bne", {"n": 3}),
    "two summed axes, crossed": ("bdh,hdn->bn", {"h": 2}),
    "summed axes with another between": ("bhd,hnd->bn", {"h": 2}),
    "outputs around": ("abd,ndm->namb", {"a": 2, "n": 3, "m": 2}),
    "a vector": ("d,dn->n", {}),
}
"""Equations, and the lengths of their axes where these are not 16."""


def random_array(*shape, dtype="float32"):
    random = np.random.default_rng()
    numbers = random.normal(size=shape) * np.exp(random.normal(size=shape[-1:] or (1,)) * 2)
    return jnp.asarray(numbers.reshape(shape), dtype)


def round_operand(matrices, name, format, axis):
    """What an operand `(batch, rows, columns)` of a product is rounded to, in float64, where sums are along `axis`."""
    widths = [(0, -n % format.block_size if i == axis else 0) for i, n in enumerate(matrices.shape)]
    padded = np.pad(np.asarray(matrices, np.float32), widths)
    if isinstance(format, NVFP4):
        square = 3 - axis if name == "weight" and format.square_weights else None
        made = block_model.nv(padded, axis, format.block_size, square, tensor_axes=(1, 2))
    else:
        narrow = block_model.E2M1 if isinstance(format, MXFP4) else block_model.E4M3
        dtype = block_model.E5M2 if name == "gradient" and getattr(format, "gradients", "") == "e5m2" else narrow
        made = block_model.mx(padded, dtype, axis, format.block_size, format.scale_rounding)
    return block_model.numbers(made, axis)[tuple(map(slice, matrices.shape))]


def merge(array, term, *groups):
    """The axes of an array in three groups of labels, each merged to one axis; and what splits them again."""
    order = [term.index(label) for group in groups for label in group]
    lengths = [array.shape[axis] for axis in order]
    split = lambda merged: np.transpose(merged.reshape(lengths), np.argsort(order))
    return np.transpose(array, order).reshape([math.prod(array.shape[term.index(a)] for a in g) for g in groups]), split


def products_by_hand(equation, format, x, w, grad):
    """The three products of the rounded operands, each beside the sum of its summands' magnitudes."""
    (left, right), out = equation.split("->")[0].split(","), equation.split("->")[1]
    batch, summed = ([a for a in right if a in left and (a in out) == kept] for kept in (True, False))
    rows, columns = [a for a in left if a not in right], [a for a in right if a not in left]
    x, split_x = merge(x, left, batch, rows, summed)
    w, split_w = merge(w, right, batch, summed, columns)
    grad, split_out = merge(grad, out, batch, rows, columns)
    at = lambda array, name, axis: round_operand(array, name, format, axis)
    turned = lambda array: np.swapaxes(array, 1, 2)
    return [
        (split(left @ right), split(np.abs(left) @ np.abs(right)))
        for split, left, right in (
            (split_out, at(x, "input", 2), at(w, "weight", 1)),
            (split_x, at(grad, "gradient", 2), turned(at(w, "weight", 2))),
            (split_w, turned(at(x, "input", 1)), at(grad, "gradient", 1)),
        )
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def computed(equation, format, x, w, grad):
    out, backward = jax.vjp(lambda x, w: einsum(equation, x, w, quantization=format), x, w)
    return out, *backward(grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "format", "dtype"),
    [
        ("a batch that moves", "mxfp8", "float16"),
        ("outputs around", "nvfp4", "float32"),
        ("two summed axes, crossed", "nvfp4 without squares", "float32"),
        ("summed axes with another between", "mxfp8 with the OCP text's scales and e5m2", "float32"),
        ("a vector", "mxfp8 as hardware has it", "float32"),
        ("no dimension that blocks divide", "mxfp4", "bfloat16"),
    ],
)
def test_a_product_and_its_gradients_are_those_of_the_rounded_numbers(case, format, dtype):
    """Sums of n summands in float32 lose at most n units of their magnitudes, and the result is rounded once more."""
    (equation, lengths), format = CASES[case], FORMATS[format]
    size = max(format.block_size, 16)
    shapes = [tuple(lengths.get(label, size) for label in term) for term in equation.replace("->", ",").split(",")]
    x, w, grad = (random_array(*shape, dtype=dtype) for shape in shapes)
    w = w.astype(jnp.float32)  # a parameter, which stays in its dtype
    by_hand = products_by_hand(equation, format, *(np.asarray(a, np.float32) for a in (x, w, grad)))
    count = max(math.prod(shape) for shape in shapes)
    for result, (exact, magnitude), wanted in zip(
        computed(equation, format, x, w, grad), by_hand, (dtype, dtype, "float32"), strict=True
    ):
        assert result.dtype == wanted
        error = np.abs(np.asarray(result, np.float64) - exact)
        assert (error <= (count + 4) * UNIT["float32"] * magnitude + UNIT[wanted] * np.abs(exact)).all()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp8/8", "mxfp4/8"])
def test_what_is_no_matmul_is_computed_with_the_rounded_weight(format):
    """An equation that repeats an operand or sums it alone, and a convolution, in the dtype of its input."""
    x, w, summed = random_array(3, 1), random_array(16, 5), random_array(3, 16)
    rounded = quant.quantize_array(w, format).dequantize()
    for equation, left in (("bd,dn->bn", x), ("bd,dn->n", summed)):
        ours = einsum(equation, left, w, quantization=format)
        np.testing.assert_allclose(ours, jnp.einsum(equation, left, rounded), rtol=1e-5, atol=1e-5)
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    x, w = random_array(2, 5, 6, 4, dtype="bfloat16"), random_array(2, 2, 4, 6)
    rounded = quant.quantize_array(w, format).dequantize("bfloat16")

    @jax.jit
    def both(x, w):
        convolve = functools.partial(jax.lax.conv_general_dilated, **options)
        ours, backward = jax.vjp(lambda x, w: conv_general_dilated(x, w, **options, quantization=format), x, w)
        plain, plain_backward = jax.vjp(convolve, x, rounded)
        size, size_backward = jax.vjp(convolve, jnp.abs(x), jnp.abs(rounded))
        return (ours, *backward(ours)), (plain, *plain_backward(ours)), (size, *size_backward(jnp.abs(ours)))

    for results in zip(*both(x, w), strict=True):
        ours, plain, size = (np.asarray(each, np.float64) for each in results)
        # A rounding to bfloat16 each, of sums of at most 60 products in two orders.
        assert (np.abs(ours - plain) <= 2.0**-7 * np.abs(plain) + 128 * 2.0**-24 * size).all()


@pytest.mark.slow
def test_a_transposed_result_of_a_batch_finds_a_kernel():
    """XLA on CPUs had none for a product of bfloat16 that it had made one with a transpose."""
    for equation, *shapes in (("ebd,edn->ebn", (16, 5, 16), (16, 16, 16)), ("bd,nd->nb", (64, 64), (64, 64))):
        x, w = (random_array(*shape) for shape in shapes)
        out, of_x, of_w = computed(equation, "mxfp8/8", x, w, jnp.einsum(equation, x, w))
        assert all(np.isfinite(array).all() for array in (out, of_x, of_w))
