"""What hardware gets: the operations that XLA fuses into products of 8-bit floating point, or none of them."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from float8_reference import NHWC, TWO_AXES
from programs import program_text

from jmp_policy.quant import Float8, conv_general_dilated, einsum, float8_state
from jmp_policy.quant._float8_product import needs_state

Float8 = functools.partial(Float8, amax_history_length=4, min_size=0)
DELAYED, CURRENT = Float8(), Float8("current")


def shape(*lengths, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(lengths, dtype)


def lowered(product, x, w, format, platform="cuda"):
    """A product with its gradients and its next state, for a platform."""
    state = jax.eval_shape(lambda: float8_state(format)) if needs_state(format) else None

    def run(x, w, state, cotangent):
        out, backward = jax.vjp(lambda x, w, s: product(x, w, quantization=format, state=s), x, w, state)
        return out, backward(cotangent)

    out = jax.eval_shape(lambda x, w: product(x, w), x, w)
    return jax.jit(run).trace(x, w, state, out).lower(lowering_platforms=(platform,))


class Program:
    """The operations of a StableHLO program, by the names of their results."""

    def __init__(self, text):
        found = re.findall(r"(%\S+) = stablehlo\.(\w+) (.*)", text)
        self.operations = {name: (operation, re.findall(r"%\w+", rest), rest) for name, operation, rest in found}

    def named(self, operation, pattern=""):
        of_kind = {name: rest for name, (own, _, rest) in self.operations.items() if own == operation}
        return [name for name, rest in of_kind.items() if re.search(pattern, rest)]

    def made_of(self, name, operation):
        """The operands of a value, which such an operation made."""
        own, operands, _ = self.operations[name]
        assert own == operation
        return operands

    def is_scalar(self, name):
        operation, _, rest = self.operations[name]
        return operation == "broadcast_in_dim" and ": (tensor<f32>) ->" in rest

    def used_by(self, name):
        return [user for user, (_, operands, _) in self.operations.items() if name in operands]

    def products(self):
        """The dtypes of the operands and the results of products."""
        types = [re.search(r": \((.*?)\) -> (.*)", self.operations[name][2]) for name in self.named("dot_general")]
        return [tuple(re.findall(r"x([a-z]\w*)>", " ".join(found.groups()))) for found in types]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "sums"), [("bfloat16", "bf16"), ("float32", "f32"), ("float16", "f32")])
@pytest.mark.parametrize("format", [DELAYED, CURRENT], ids=str)
def test_a_product_is_the_program_that_xla_fuses(format, dtype, sums):
    text = lowered(TWO_AXES, shape(32, 64, dtype=dtype), shape(64, 16, dtype=dtype), format).as_text()
    program = Program(text)
    e4m3, e5m2 = "f8E4M3FN", "f8E5M2"
    assert program.products() == [(e4m3, e4m3, sums), (e5m2, e4m3, sums), (e4m3, e5m2, sums)]
    casts = program.named("convert", r"-> tensor<\w+xf8E")
    assert len(casts) == len(program.named("clamp")) == 3  # each operand once, for both of its products
    for cast in casts:
        (clamped,) = program.made_of(cast, "convert")
        _, quotient, _ = program.made_of(clamped, "clamp")
        assert program.is_scalar(program.made_of(quotient, "divide")[1])
    for product in program.named("dot_general"):
        wide = product if sums == "f32" else program.used_by(product)[0]
        (scaled,) = program.used_by(wide)
        assert program.is_scalar(program.made_of(scaled, "multiply")[1])
    assert "call @" not in text


def test_the_weight_gradient_in_the_compute_dtype_is_a_product_of_that():
    text = lowered(TWO_AXES, shape(32, 64), shape(64, 16), Float8(weight_grad=False)).as_text()
    assert Program(text).products()[2] == ("bf16", "bf16", "bf16")


@pytest.mark.sample(1)
@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_other_platforms_get_the_same_products(platform):
    texts = [lowered(TWO_AXES, shape(32, 64), shape(64, 16), DELAYED, p).as_text() for p in ("cuda", platform)]
    assert Program(texts[0]).products() == Program(texts[1]).products()


CONVOLUTION = functools.partial(conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC)
GROUPS = functools.partial(CONVOLUTION, feature_group_count=2)


@pytest.mark.parametrize("format", [DELAYED, CURRENT], ids=str)
@pytest.mark.parametrize(
    ("product", "x", "w", "options"),
    [
        (TWO_AXES, (30, 64), (64, 16), {}),
        (TWO_AXES, (32, 60), (60, 16), {}),
        (TWO_AXES, (32, 64), (64, 24), {}),
        (TWO_AXES, (32, 64), (64, 16), {"min_size": 1025}),
        (functools.partial(einsum, "ab,cb->a"), (16, 16), (16, 16), {}),
        (functools.partial(einsum, "ab,bc->ac"), (16, 1), (16, 16), {}),
        (CONVOLUTION, (1, 4, 4, 8), (3, 3, 8, 16), {}),
        (CONVOLUTION, (1, 4, 4, 16), (3, 3, 16, 8), {}),
        (GROUPS, (1, 4, 4, 32), (3, 3, 16, 32), {}),
    ],
    ids=["rows", "inputs", "outputs", "size", "a lone sum", "broadcasting", "channels", "features", "groups"],
)
def test_what_gains_nothing_is_the_program_without_quantization(product, x, w, options, format):
    x, w = shape(*x), shape(*w)
    format = Float8(format.recipe, **options)

    state = float8_state(format) if needs_state(format) else None

    def gradients(options, x, w, grad):
        out, backward = jax.vjp(lambda x, w: product(x, w, **options), x, w)
        return out, backward(grad)

    out = jax.eval_shape(product, x, w)
    ours, plain = (
        program_text(jax.jit(functools.partial(gradients, options)).lower(x, w, out))
        for options in ({"quantization": format, "state": state}, {})
    )
    assert "f8E" not in ours
    assert ours == plain
