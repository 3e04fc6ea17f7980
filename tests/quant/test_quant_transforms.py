"""Derivatives of quantized products, what JAX's transformations make of them, and the operations that hardware gets."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import Mesh, PartitionSpec
from meshes import find_devices
from quant_reference import fresh

from jmp_policy.quant import Int8, conv_general_dilated, dot_general, embedding_lookup, quantize_array
from jmp_policy.quant._layout import Layout, kernel_layout, table_layout
from jmp_policy.quant._quantizer import FakeQuantized

ROWS = (((1,), (0,)), ((), ()))
FORMATS = ("int8", "int8(activations=false)", "int4/8")


quantized = jax.jit(quantize_array, static_argnums=(1, 2))


def array(*shape, dtype="float32"):
    return jnp.asarray(fresh(*shape), dtype)


def straight_through(original, rounded):
    """By hand: the numbers of the second, the derivative of the first."""
    return lax.stop_gradient(rounded) + (original - lax.stop_gradient(original))


def by_hand(x, w, format):
    """The product of both operands as they were rounded, in floats."""
    if format == "int8":  # a row of the input is a column of its transpose
        x = straight_through(x, quantize_array(x.T, "int8").dequantize().T)
    return x @ straight_through(w, quantize_array(w, format).dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_derivatives_are_those_of_the_fake_quantized_program(format):
    (x, dx), (w, dw), cotangent = [array(5, 16) for _ in "ab"], [array(16, 6) for _ in "ab"], array(5, 6)

    @jax.jit
    def derivatives(x, w):
        def of(multiply):
            _, forward = jax.jvp(multiply, (x, w), (dx, dw))
            _, backward = jax.vjp(multiply, x, w)
            # At the same point, so that the bits in which the two differ have no say.
            curved = lambda x, w: jnp.sum(cotangent * multiply(x, w) * multiply(x * 2, w))
            return forward, backward(cotangent), jax.jvp(jax.grad(curved, (0, 1)), (x, w), (dx, dw))[1]

        return [of(lambda x, w: dot_general(x, w, ROWS, quantization=format)), of(lambda x, w: by_hand(x, w, format))]

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), *derivatives(x, w))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_have_the_dtypes_of_what_they_are_of(format, dtype):
    x, w = jax.ShapeDtypeStruct((5, 16), dtype), jax.ShapeDtypeStruct((16, 6), "float32")
    loss = lambda x, w: jnp.sum(dot_general(x, w, ROWS, quantization=format).astype(jnp.float32) ** 2)
    dx, dw = jax.eval_shape(jax.grad(loss, (0, 1)), x, w)
    assert (dx.dtype, dw.dtype) == (dtype, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_stored_weight_gets_no_gradient_and_the_input_gets_its_own(format):
    x, w, cotangent = array(5, 16), array(16, 6), array(5, 6)
    loss = lambda x, w: jnp.sum(cotangent * dot_general(x, w, ROWS))
    dx, dw = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(x, stored := quantized(w, format))
    numbers = np.asarray(stored.dequantize(), np.float64)
    np.testing.assert_allclose(dx, np.asarray(cotangent, np.float64) @ numbers.T, rtol=1e-4, atol=1e-4)
    assert not any(leaf.any() for leaf in jax.tree.leaves(dw) if leaf.dtype == jnp.float32)


@pytest.mark.slow
def test_a_table_passes_gradients_to_the_rows_that_were_read():
    table, indices = array(7, 16), jnp.array([0, 3, 3])
    weight = lambda table: FakeQuantized(table, Int8(), table_layout(table.shape))
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(embedding_lookup(weight(table), indices))))(table)
    np.testing.assert_array_equal(gradient, jnp.zeros((7, 16)).at[indices].add(1.0))


def loss_and_gradients(x, w, format):
    loss = lambda x, w: jnp.sum(jnp.sin(dot_general(x, w, ROWS, quantization=format)), axis=-1)
    out, backward = jax.vjp(loss, x, w)
    return out, *backward(jnp.cos(out))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_maps_and_meshes_give_what_the_plain_call_gives(format):
    x, w = array(8, 16), array(16, 6)
    mesh = Mesh(np.array(find_devices(4)), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def mapped(x, w):
        out, dx, dw = jax.vmap(lambda row: loss_and_gradients(row[None], w, format))(x)
        return out[:, 0], dx[:, 0], dw.sum(axis=0)

    def sharded(x, w):
        over = jax.shard_map(
            lambda x, w: loss_and_gradients(x, w, format),
            mesh=mesh,
            in_specs=(rows, whole),
            out_specs=(rows, rows, whole),
        )  # which checks that the gradient of a weight that all devices have is one of all devices
        return over(x, w)

    plain, remat, *others = jax.jit(
        lambda x, w: [
            loss_and_gradients(x, w, format),
            jax.checkpoint(lambda x, w: loss_and_gradients(x, w, format))(x, w),
            mapped(x, w),
            sharded(x, w),
        ]
    )(x, w)
    jax.tree.map(np.testing.assert_array_equal, plain, remat)
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, other)
        np.testing.assert_array_equal(np.sign(plain[0]), np.sign(other[0]))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS[::2])
def test_a_scan_over_a_stack_is_the_loop_over_its_layers(format):
    x, stack = array(5, 16), array(3, 16, 16) / 16
    stored = quantized(stack, format, kernel_layout(stack.shape, stacked=1))
    layer = lambda x, w: jnp.tanh(dot_general(x, w, ROWS, quantization=format))

    def scanned(x, stack):
        return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, stack)[0]

    def looped(x, stack):
        for i in range(3):
            x = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], stack))
        return x

    @jax.jit
    def results(x, stack, stored):
        gradients = [jax.grad(lambda x, s, f=f: jnp.sum(f(x, s)), (0, 1))(x, stack) for f in (scanned, looped)]
        return scanned(x, stored), scanned(x, stack), looped(x, stack), gradients

    of_stored, of_floats, of_loop, gradients = results(x, stack, stored)
    np.testing.assert_array_equal(of_stored, of_floats)
    np.testing.assert_allclose(of_floats, of_loop, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *gradients)


def exported(function, *arguments, platform="cuda"):
    return export.export(jax.jit(function), platforms=[platform])(*arguments).mlir_module()


def types_of(text, operation):
    """The element types of the operands and the result of each such operation."""
    lines = re.findall(rf"stablehlo\.{operation}.*: \((.*?)\) -> (tensor<\S*)", text)
    return [tuple(re.findall(r"x([a-z]+\d+)>", f"{operands} {result}")) for operands, result in lines]


X, W = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (64, 32)))
IMAGE, FILTER = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 9, 9, 16), (3, 3, 16, 8)))
NUMBERS = ("NHWC", "HWIO", "NHWC")


@pytest.mark.sample(1)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("stored", [True, False])
def test_hardware_gets_products_of_integers(stored, platform):
    w, kernel = (quantize_array(a, "int8") if stored else a for a in (W, FILTER))
    form = None if stored else "int8"
    text = exported(lambda x, w: dot_general(x, w, ROWS, quantization=form), X, w, platform=platform)
    assert types_of(text, "dot_general") == [("i8", "i8", "i32")]
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NUMBERS, "quantization": form}
    text = exported(lambda x, w: conv_general_dilated(x, w, **options), IMAGE, kernel, platform=platform)
    assert types_of(text, "convolution") == [("i8", "i8", "i32")]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("format", FORMATS[1:])
def test_weights_alone_are_multiplied_wide(format, platform):
    text = exported(lambda x, w: dot_general(x, w, ROWS), X, quantize_array(W, format), platform=platform)
    assert types_of(text, "dot_general") == [("bf16", "bf16", "bf16")]
    # XLA for TPUs fuses shifts of both halves of a block into the matmul, but neither interleaved values nor a
    # concatenation: a matmul of 2048 rows then moves 1.14 instead of 1.08 of bfloat16's bytes.
    assert "bitcast_convert" not in text
    assert "concatenate" not in text
    assert bool(re.search(r"shift_right_logical.*xui8>", text)) == format.startswith("int4")


def test_the_backward_pass_is_of_two_products_in_the_compute_dtype():
    loss = lambda x, w: jnp.sum(dot_general(x, w, ROWS, quantization="int8").astype(jnp.float32) ** 2)
    text = exported(jax.grad(loss, (0, 1)), X, W)
    assert sorted(types_of(text, "dot_general")) == [("bf16", "bf16", "bf16")] * 2 + [("i8", "i8", "i32")]
    assert text.count("stablehlo.round_nearest_even") == 2  # each operand is rounded once for both passes


def test_an_integer_product_moves_no_scale_about():
    text = exported(lambda x, w: dot_general(x, w, ROWS), X, quantize_array(W, "int8"))
    assert "stablehlo.transpose" not in text
    assert "stablehlo.reshape" not in text
    split = quantize_array(jax.ShapeDtypeStruct((64, 4, 8), jnp.bfloat16), "int8", Layout((64,), 2))
    text = exported(lambda x, w: dot_general(x, w, ROWS), X, split)
    assert "stablehlo.transpose" not in text
