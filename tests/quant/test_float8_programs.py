"""What hardware gets: the operations that XLA fuses into products of 8-bit floating point, or none of them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from float8_reference import NHWC, TWO_AXES
from programs import program_text

from jmp_policy.quant import Float8, conv_general_dilated, einsum, float8_state

Float8 = functools.partial(Float8, amax_history_length=4, min_size=0)
DELAYED, CURRENT = Float8(), Float8("current")


def shape(*lengths, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(lengths, dtype)


def state_of(format):
    return float8_state(format) if format.recipe == DELAYED.recipe else None


def lowered(product, x, w, format, platform="cuda"):
    """A product with its gradients and its next state, for a platform."""
    state = jax.eval_shape(lambda: state_of(format))

    def run(x, w, state, cotangent):
        out, backward = jax.vjp(lambda x, w, s: product(x, w, quantization=format, state=s), x, w, state)
        return out, backward(cotangent)

    out = jax.eval_shape(lambda x, w: product(x, w), x, w)
    return jax.jit(run).trace(x, w, state, out).lower(lowering_platforms=(platform,))


def products_of(text):
    """The dtypes of the operands and the results of products."""
    found = re.findall(r"stablehlo\.dot_general.*: \((.*?)\) -> (.*)", text)
    return [tuple(re.findall(r"x([a-z]\w*)>", " ".join(types))) for types in found]


def is_scalar(text, name):
    return bool(re.search(rf"{name} = stablehlo\.broadcast_in_dim .*: \(tensor<f32>\) ->", text))


@pytest.mark.parametrize(
    ("format", "dtype", "sums"), [(DELAYED, "bfloat16", "bf16"), (CURRENT, "float16", "f32")], ids=str
)
def test_a_product_is_the_program_that_xla_fuses(format, dtype, sums):
    text = lowered(TWO_AXES, shape(32, 64, dtype=dtype), shape(64, 16, dtype=dtype), format).as_text()
    e4m3, e5m2 = "f8E4M3FN", "f8E5M2"
    assert products_of(text) == [(e4m3, e4m3, sums), (e5m2, e4m3, sums), (e4m3, e5m2, sums)]
    casts = re.findall(r"stablehlo\.convert (%\w+) : \(.*\) -> tensor<\w+xf8E", text)
    assert len(casts) == text.count("stablehlo.clamp") == 3  # each operand once, for both of its products
    for cast in casts:
        (quotient,) = re.findall(rf"{cast} = stablehlo\.clamp %\w+, (%\w+),", text)
        (divisor,) = re.findall(rf"{quotient} = stablehlo\.divide %\w+, (%\w+) ", text)
        assert is_scalar(text, divisor)
    for product in re.findall(r"(%\w+) = stablehlo\.dot_general", text):
        (wide,) = [product] if sums == "f32" else re.findall(rf"(%\w+) = stablehlo\.convert {product} ", text)
        (scale,) = re.findall(rf"stablehlo\.multiply {wide}, (%\w+) ", text)
        assert is_scalar(text, scale)
    assert "call @" not in text


@pytest.mark.slow
def test_the_weight_gradient_in_the_compute_dtype_and_other_platforms_have_the_products_that_they_should():
    text = lowered(TWO_AXES, shape(32, 64), shape(64, 16), Float8(weight_grad=False)).as_text()
    assert products_of(text)[2] == ("bf16", "bf16", "bf16")
    texts = [lowered(TWO_AXES, shape(32, 64), shape(64, 16), DELAYED, p).as_text() for p in ("cuda", "tpu", "cpu")]
    assert products_of(texts[0]) == products_of(texts[1]) == products_of(texts[2])


CONVOLUTION = functools.partial(conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC)
GROUPS = functools.partial(CONVOLUTION, feature_group_count=2)


@pytest.mark.parametrize(
    ("product", "x", "w", "format"),
    [
        (TWO_AXES, (30, 64), (64, 16), DELAYED),
        (TWO_AXES, (32, 60), (60, 16), CURRENT),
        (TWO_AXES, (32, 64), (64, 24), DELAYED),
        (TWO_AXES, (32, 64), (64, 16), dataclasses.replace(CURRENT, min_size=1025)),
        (functools.partial(einsum, "ab,cb->a"), (16, 16), (16, 16), DELAYED),
        (functools.partial(einsum, "ab,bc->ac"), (16, 1), (16, 16), CURRENT),
        (CONVOLUTION, (1, 4, 4, 8), (3, 3, 8, 16), DELAYED),
        (CONVOLUTION, (1, 4, 4, 16), (3, 3, 16, 8), CURRENT),
        (GROUPS, (1, 4, 4, 32), (3, 3, 16, 32), DELAYED),
    ],
    ids=["rows", "inputs", "outputs", "size", "a lone sum", "broadcasting", "channels", "features", "groups"],
)
def test_what_gains_nothing_is_the_program_without_quantization(product, x, w, format):
    x, w, options = shape(*x), shape(*w), {"quantization": format, "state": state_of(format)}

    def gradients(options, x, w, grad):
        out, backward = jax.vjp(lambda x, w: product(x, w, **options), x, w)
        return out, backward(grad)

    out = jax.eval_shape(product, x, w)
    ours, plain = (program_text(jax.jit(functools.partial(gradients, o)).lower(x, w, out)) for o in (options, {}))
    assert "f8E" not in ours
    assert ours == plain
