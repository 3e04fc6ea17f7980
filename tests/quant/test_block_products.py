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
from jmp_policy.quant import MXFP4, MXFP8, NVFP4, conv_general_dilated, dot_general, einsum

ROWS = (((1,), (0,)), ((), ()))
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
    "rows by columns": ("bd,dn->bn", {}),
    "no dimension that blocks divide": ("abd,dn->abn", {"a": 3, "b": 7, "n": 5}),
    "one row and one column": ("bd,dn->bn", {"b": 1, "n": 1}),
    "a batch": ("ebd,edn->ebn", {"b": 5}),
    "a batch that moves": ("bed,edn->bne", {"n": 3}),
    "two summed axes": ("bhd,hdn->bn", {"h": 2}),
    "two summed axes, crossed": ("bdh,hdn->bn", {"h": 2}),
    "summed axes with another between": ("bhd,hnd->bn", {"h": 2}),
    "outputs first": ("bd,nd->nb", {}),
    "outputs around": ("abd,ndm->namb", {"a": 2, "n": 3, "m": 2}),
    "a batch last": ("bde,dne->bne", {"e": 3}),
    "a vector": ("d,dn->n", {}),
    "no outputs": ("bd,d->b", {}),
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


def shapes_of(equation, lengths, size=16):
    terms = equation.replace("->", ",").split(",")
    return [tuple(lengths.get(label, size) for label in term) for term in terms]


def check(equation, format, dtype, lengths):
    """Sums of n summands in float32 lose at most n units of their magnitudes, and the result is rounded once more."""
    size = max(format.block_size, 16)
    shapes = shapes_of(equation, lengths, size)
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
@pytest.mark.parametrize(
    ("case", "format", "dtype"),
    [
        *((case, "mxfp8", "float32") for case in CASES),
        *((case, "nvfp4", "float32") for case in CASES),
        *(("no dimension that blocks divide", format, "bfloat16") for format in FORMATS),
        ("a batch that moves", "mxfp8", "float16"),
    ],
)
def test_a_product_and_its_gradients_are_those_of_the_rounded_numbers(case, format, dtype):
    equation, lengths = CASES[case]
    check(equation, FORMATS[format], dtype, lengths)


FIVE = ("mxfp8/8", "mxfp4/8(activations=true)", "nvfp4/8", "mxfp8/8(activations=false)", "mxfp4/8")
"""With and without rounded inputs."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.float16])
@pytest.mark.parametrize("format", FIVE)
def test_the_result_has_the_preferred_dtype_and_gradients_those_of_their_operands(format, preferred):
    product = functools.partial(dot_general, preferred_element_type=preferred, quantization=format)
    loss = lambda x, w: (lambda out: (jnp.sum(out.astype(jnp.float32)), out))(product(x, w, ROWS))
    x, w = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    (of_x, of_w), out = jax.eval_shape(jax.grad(loss, (0, 1), has_aux=True), x, w)
    assert (out.dtype, of_x.dtype, of_w.dtype) == (preferred or jnp.bfloat16, jnp.bfloat16, jnp.float32)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("format", FIVE)
def test_arrays_without_rows_outputs_or_inputs_have_products_and_gradients(format):
    x, w = jnp.ones((3, 16)), jnp.ones((16, 5))
    for rows, columns in ((x[:0], w), (x, w[:, :0]), (x[:, :0], w[:0])):
        out, backward = jax.vjp(lambda x, w: dot_general(x, w, ROWS, quantization=format), rows, columns)
        assert out.shape == (rows.shape[0], columns.shape[1])
        assert not out.any()
        assert not any(gradient.any() for gradient in backward(jnp.ones_like(out)))


@pytest.mark.slow
@pytest.mark.parametrize("format", FIVE)
def test_an_equation_that_repeats_an_operand_or_sums_it_alone_is_computed_with_the_rounded_weight(format):
    x, w, summed = random_array(3, 1), random_array(16, 5), random_array(3, 16)
    rounded = quant.quantize_array(w, format).dequantize()
    for equation, left in (("bd,dn->bn", x), ("bd,dn->n", summed)):
        ours = einsum(equation, left, w, quantization=format)
        np.testing.assert_allclose(ours, jnp.einsum(equation, left, rounded), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("format", FIVE)
def test_a_convolution_computes_with_the_rounded_filter_in_the_dtype_of_its_input(format):
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    x, w = random_array(2, 5, 6, 4, dtype="bfloat16"), random_array(2, 2, 4, 6)
    rounded = quant.quantize_array(w, format).dequantize("bfloat16")

    @jax.jit
    def both(x, w):
        ours, backward = jax.vjp(lambda x, w: conv_general_dilated(x, w, **options, quantization=format), x, w)
        plain, plain_backward = jax.vjp(lambda x, w: jax.lax.conv_general_dilated(x, w, **options), x, rounded)
        return (ours, *backward(ours)), (plain, *plain_backward(ours))

    for ours, plain in zip(*both(x, w), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(plain), rtol=2**-7, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", FIVE)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_stored_weight_gives_the_bits_of_the_floating_one(format, dtype):
    x, w = random_array(5, 16, dtype=dtype), random_array(16, 6)
    stored = quant.quantize_array(w, format)
    multiply = jax.jit(lambda x, w, format: dot_general(x, w, ROWS, quantization=format), static_argnums=2)
    plain, other = multiply(x, w, format), multiply(x, stored, None)
    assert plain.dtype == other.dtype == dtype
    np.testing.assert_array_equal(plain, other)
    # The backward pass rounds what is stored once more, along another axis.
    again = w if "activations=false" in format or format == "mxfp4/8" else stored.dequantize()
    gradient = lambda w, format: jax.jit(jax.grad(lambda x: jnp.sum(dot_general(x, w, ROWS, quantization=format))))(x)
    np.testing.assert_array_equal(gradient(stored, None), gradient(again, format))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FIVE)
def test_a_number_that_is_not_finite_shows_in_its_row_and_in_all_gradients_that_it_is_part_of(format, bad):
    """A block without a largest magnitude is nan. Only an infinity that nothing rounds stays one."""
    x, w, t = random_array(40, 16), random_array(16, 6), random_array(40, 6)
    products = jax.jit(lambda x, w: jax.value_and_grad(lambda w: (lambda y: (jnp.sum(y * t), y))(
        dot_general(x, w, ROWS, quantization=format)), has_aux=True)(w))  # fmt: skip
    ((_, plain), _), ((_, spoilt), gradient) = products(x, w), products(x.at[2, 3].set(bad), w)
    assert not np.isfinite(spoilt[2]).any()
    if not format.startswith("nvfp4"):  # whose tensor has another largest magnitude without that row
        np.testing.assert_array_equal(np.delete(spoilt, 2, axis=0), np.delete(plain, 2, axis=0))
    assert not np.isfinite(gradient[3]).any()
    spoilt_weight = products(x, w.at[4, 5].set(bad))[0][1]
    assert not np.isfinite(spoilt_weight[:, 5]).any()
    if not format.startswith("nvfp4"):
        assert np.isfinite(spoilt_weight[:, :5]).all()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_large_arrays_are_rounded_as_small_ones(format):
    x, w = random_array(4, 512), random_array(512, 256)
    multiply = jax.jit(lambda x, w: dot_general(x, w, ROWS, quantization=format))
    rounded_x = round_operand(np.asarray(x)[None], "input", FORMATS_OF[format], 2)[0]
    rounded_w = round_operand(np.asarray(w)[None], "weight", FORMATS_OF[format], 1)[0]
    error = np.abs(np.asarray(multiply(x, w), np.float64) - rounded_x @ rounded_w)
    assert (error <= 516 * UNIT["float32"] * (np.abs(rounded_x) @ np.abs(rounded_w))).all()


FORMATS_OF = {"mxfp8": MXFP8(), "nvfp4": NVFP4()}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda x, w: dot_general(x, w[:12], ROWS, quantization="mxfp8/8"), ValueError,
         r"^Blocks of 8 do not divide the 12 inputs of the weight\. The largest size that does is 6: 'mxfp8/6', or "),
        (lambda x, w: dot_general(x, w[:15], ROWS, quantization="nvfp4/8"), ValueError,
         r"^Blocks of 8 do not divide the 15 inputs of the weight\. Leave the weight out by a rule of a PolicyMap: "),
        (lambda x, w: dot_general(x, w[:14], ROWS, quantization="mxfp4/8"), ValueError,
         r"^Blocks of 8 do not divide the 14 inputs of the weight\. The largest size that does is 2: 'mxfp4/2', or "),
        (lambda x, w: einsum("bd,nm->bdnm", x, w, quantization="mxfp8/8"), ValueError,
         r"^Blocks of 8 do not divide the 1 inputs of the weight\. "),
        (lambda x, w: dot_general(x, w.astype(int), ROWS, quantization="mxfp8/8"), TypeError,
         r"^A quantized matmul takes floating arrays, got int32\[16, 6\]\. For example: dot_gen"),
        (lambda x, w: dot_general(x, w.astype(int), ROWS, quantization="mxfp4/8"), TypeError,
         r"^A quantized matmul takes floating arrays, got int32\[16, 6\]\. For example: dot_gen"),
        (lambda x, w: dot_general(x.astype(int), w, ROWS, quantization="mxfp8/8"), TypeError,
         r"^A quantized matmul takes floating arrays, got int32\[5, 16\]\. For example: dot_gen"),
        (lambda x, w: dot_general(x, quant.quantize_array(w, "mxfp8/8"), ROWS, quantization="mxfp8/16"), ValueError,
         r"^The weight is quantized already, as 'mxfp8/8', and cannot be as 'mxfp8/16'\. Leave quantization out"),
        (lambda x, w: dot_general(x, w, ROWS, quantization="mxfp8/8", state={}), ValueError,
         r"^'mxfp8/8' has no state, but got one\. For example: quantization='float8'\."),
    ],
)  # fmt: skip
def test_what_cannot_be_multiplied_in_blocks_is_an_error(make, error, text):
    w = random_array(16, 6)
    with pytest.raises(error, match=text):
        make(random_array(5, 16), w)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp8/8", "nvfp4/8"])
def test_a_transposed_result_of_a_batch_finds_a_kernel(format):
    """XLA on CPUs had none for a product of bfloat16 that it had made one with a transpose."""
    for equation, *shapes in (("ebd,edn->ebn", (16, 5, 16), (16, 16, 16)), ("bd,nd->nb", (64, 64), (64, 64))):
        x, w = (random_array(*shape) for shape in shapes)
        out, of_x, of_w = computed(equation, format, x, w, jnp.einsum(equation, x, w))
        assert all(np.isfinite(array).all() for array in (out, of_x, of_w))
