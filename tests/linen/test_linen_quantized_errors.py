"""Quantized policies in linen alone: what modules say to weights that they cannot compute with, and Flax's tools."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from programs import products

import jmp_policy as jmp
from jmp_policy import quant

INT8, INT4 = "int8(min_size=0)_from_float32", "int4/4(min_size=0)_from_float32"
X = jnp.ones((2, 12))
KEY = jax.random.key(0)


class Net(nn.Module):
    features: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features, name="head")(nn.tanh(x))


VARIABLES = jax.jit(Net().init)(KEY, X)


def raises(kind, text):
    return pytest.raises(kind, match=f"^{re.escape(text)}")


@pytest.mark.slow
def test_weight_of_another_format_is_named():
    quantized = quant.quantize(VARIABLES, INT4)
    message = (
        "The weight 'head/kernel' is stored as 'int4/4(min_size=0)', and its policy says 'int8(min_size=0)'. Give the "
        "model the policy it was quantized with, such as 'int4/4(min_size=0)_from_mixed_bfloat16', or quantize it "
        "again from the original."
    )
    with raises(ValueError, message):
        jmp.with_policy(Net(), INT8).apply(quantized, X)


def test_weight_of_other_sizes_is_named():
    quantized = quant.quantize(VARIABLES, INT8)
    message = (
        "The quantized weight 'head/kernel' has the shape (12, 4), but the layer needs (12, 6). Quantize the variables "
        "of a model of this size."
    )
    with raises(ValueError, message):
        jmp.with_policy(Net(6), INT8).apply(quantized, X)


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_integers_without_a_policy_for_them_are_refused(policy):
    model = Net() if policy is None else jmp.with_policy(Net(), policy)
    message = (
        "QuantizedArray(int8(min_size=0), shape=(12, 4), dtype=float32) is quantized, and was read by a layer or "
        "code that computes with floats. Give the model the policy it was quantized with: with_policy(model, "
        "policy); in your own code, call its dequantize()."
    )
    with raises(TypeError, message):
        model.apply(quant.quantize(VARIABLES, INT8), X)


def test_error_of_flax_about_the_shape_of_bytes_is_explained():
    model = jmp.with_policy(Net(), "mixed_bfloat16")
    with pytest.raises(ScopeParamShapeError) as caught:
        model.apply(quant.quantize(VARIABLES, INT4), X)
    assert caught.value.__notes__[0] == (
        "The variables have quantized weights: QuantizedArray(int4/4(min_size=0), shape=(12, 4), "
        "dtype=float32). Give the model the policy that they were quantized with. For example: with_policy(model, "
        "'int4/4(min_size=0)_from_mixed_bfloat16')."
    )


@pytest.mark.parametrize("kind", [nn.WeightNorm, pytest.param(nn.SpectralNorm, marks=pytest.mark.slow)])
def test_weight_that_a_wrapper_rewrites_is_left_out_by_a_rule(kind):
    options = {"update_stats": False} if kind is nn.SpectralNorm else {}
    model = kind(nn.Dense(4))
    variables = jax.jit(lambda: model.init(KEY, X, **options))()
    message = (
        f"{kind.__name__} rewrites the weights of 'layer_instance', but "
        "QuantizedArray(int8(min_size=0), shape=(12, 4), dtype=float32) is quantized. Leave that layer out of the "
        "quantization by a rule of the map. "
        "For example: PolicyMap({'layer_instance': 'mixed_bfloat16'}, 'int8_from_mixed_bfloat16')."
    )
    with raises(ValueError, message):
        jmp.with_policy(model, INT8).apply(quant.quantize(variables, INT8), X, **options)


def test_jitted_siblings_have_the_format_of_their_own_rule():
    class Siblings(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.jit(nn.Dense)(8, name="left")(x), nn.jit(nn.Dense)(8, name="right")(x)

    model = jmp.with_policy(Siblings(), jmp.PolicyMap({"left": "mixed_bfloat16"}, INT8))
    variables = jax.eval_shape(model.init, KEY, X)
    found = products(jax.make_jaxpr(model.apply)(variables, X))
    assert [dtype for _, dtype in found] == ["bfloat16", "int8"]


def test_plain_function_under_a_quantized_policy_is_cast_and_no_more():
    with pytest.warns(UserWarning, match="has no effect, because only the layers of a model are quantized"):
        fun = jmp.with_policy(lambda x: x @ x.T, "int8(min_size=0)_from_mixed_bfloat16")
    assert jax.eval_shape(fun, X).dtype == jnp.bfloat16
