"""What linen modules under quantized policies say to weights that they cannot compute with."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax.errors import ScopeParamShapeError

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


class Table(nn.Module):
    """A head tied to a table by code of a user's own."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(8, 12, name="embed")
        return embed(tokens) @ embed.embedding.T


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


@pytest.mark.parametrize(
    ("module", "path"),
    [
        (Net(), "head/kernel"),
        (nn.Einsum((12, 4), "bc,cd->bd"), "kernel"),
        (nn.WeightNorm(nn.Dense(4)), "layer_instance/kernel"),
    ],
)
def test_weight_that_blocks_do_not_divide_is_named_in_training(module, path):
    message = (
        f"Blocks of 5 do not divide the 12 inputs of the weight {path!r}. The largest size that does is 4: 'int4/4', "
        "or leave the weight out by a rule of a PolicyMap: {'path': 'float32'}."
    )
    with raises(ValueError, message):
        jax.eval_shape(jmp.with_policy(module, "int4/5(min_size=0)_from_float32").init, KEY, X)


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [nn.WeightNorm, nn.SpectralNorm])
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


@pytest.mark.slow
def test_table_that_a_users_code_reads_past_its_layer_is_refused():
    model = jmp.with_policy(Table(), INT8)
    variables = jax.jit(Table().init)(KEY, jnp.arange(2))
    with raises(AttributeError, "A quantized weight has no attribute 'T'; the array of its dequantize() may have it."):
        model.apply(quant.quantize(variables, INT8), jnp.arange(2))
