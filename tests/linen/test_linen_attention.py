"""The matmuls of linen's attention under a quantized policy."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jmp_policy as jmp

X = jnp.ones((2, 32, 64))


def list_products(layer, policy):
    """Returns the operand dtypes of the matmuls of an attention layer in the order in which they run."""
    model = jmp.with_policy(layer, policy)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    program = jax.make_jaxpr(model.apply)(variables, X)
    eqns, found = list(program.eqns), []
    while eqns:
        eqn = eqns.pop(0)
        if eqn.primitive.name == "dot_general":
            found.append(eqn.invars[0].aval.dtype.name)
        inner = [value for value in eqn.params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
        eqns = [each for value in inner for each in getattr(value, "jaxpr", value).eqns] + eqns
    return found


def test_attention_is_quantized_if_the_format_says_so():
    layer = nn.MultiHeadDotProductAttention(num_heads=2)
    wide = list_products(layer, "int8_from_mixed_bfloat16")
    assert (wide.count("int8"), wide.count("bfloat16")) == (4, 2)
    assert list_products(layer, "int8(attention=true)_from_mixed_bfloat16") == ["int8"] * 6
    assert list_products(layer, "int8(act_scale=static,attention=true)_from_mixed_bfloat16") == ["int8"] * 6


@pytest.mark.parametrize(
    "options",
    [
        {"attention_fn": functools.partial(nn.dot_product_attention)},
        {"precision": "highest"},
        {f"{name}_einsum_cls": lambda: jnp.einsum for name in ("qk_attn_weights", "attn_weights_value")},
    ],
)
def test_the_products_of_an_author_stay(options):
    layer = nn.MultiHeadDotProductAttention(num_heads=2, **options)
    assert list_products(layer, "int8(attention=true)_from_mixed_bfloat16").count("bfloat16") == 2


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "mxfp8", "float8(recipe=current,min_size=0)"])
def test_attention_equals_einsums_by_hand(format):
    layer, x = nn.MultiHeadDotProductAttention(num_heads=2), jax.random.normal(jax.random.key(0), X.shape)
    variables = layer.init(jax.random.key(1), x)
    multiply = lambda: functools.partial(jmp.quant.einsum, quantization=format)
    by_hand = layer.clone(qk_attn_weights_einsum_cls=multiply, attn_weights_value_einsum_cls=multiply)
    policy = f"{format.rstrip(')')}{',' if '(' in format else '('}attention=true)_from_float32"
    run = lambda layer: jax.jit(jmp.with_policy(layer, policy).apply)(variables, x)
    assert (run(layer) == run(by_hand)).all()
