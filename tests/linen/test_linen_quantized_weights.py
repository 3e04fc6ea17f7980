"""Which weights of linen models are quantized: those of submodules that are called like weights, those that an author's
layer makes another weight of, and those that an author's code reads past their layers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_policy as jmp
from jmp_policy import quant

KEY = jax.random.key(0)
INT8, INT4 = "int8(min_size=0)_from_float32", "int4/16(min_size=0)_from_float32"
INT4_OF_4 = "int4/4(min_size=0)_from_float32"
FLOAT8 = "float8(min_size=0,recipe=current)_from_mixed_bfloat16"
IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 4)), jnp.float32)


class ViT(nn.Module):
    """What is special of vision transformers: their patches are projected by what is called `embedding`."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(16, (4, 4), (4, 4), name="embedding")(images)
        x = x.reshape(x.shape[0], -1, 16)
        x = x + nn.Dense(16, use_bias=False, name="kernel")(x)
        return Branch(name="bias")(x[:, 0])


class Branch(nn.Module):
    """What stands where a bias would."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (16, 8))
        return nn.Dense(8, name="bias")(x) + x @ kernel.astype(x.dtype)


class StandardizedConv(nn.Conv):
    """Weight standardization, as ResNets with group norm have it."""

    def param(self, name, init_fn, *args, **kwargs):
        """The kernel of mean 0 and deviation 1 for each channel."""
        value = super().param(name, init_fn, *args, **kwargs)
        if name != "kernel":
            return value
        centred = value - value.mean(range(value.ndim - 1))
        return centred / (value.std(range(value.ndim - 1)) + 1e-5)


class DoubledDense(nn.Dense):
    """Another layer."""

    def param(self, name, init_fn, *args, **kwargs):
        """The kernel, doubled."""
        return super().param(name, init_fn, *args, **kwargs) * 2


class DoubledEinsum(nn.Einsum):
    """One whose product is no field."""

    def param(self, name, init_fn, *args, **kwargs):
        """The kernel, doubled."""
        return super().param(name, init_fn, *args, **kwargs) * 2


class DoubledParamEmbed(nn.Embed):
    """A table."""

    def param(self, name, init_fn, *args, **kwargs):
        """The table, doubled."""
        return super().param(name, init_fn, *args, **kwargs) * 2


class DoubledEmbed(nn.Embed):
    """A table that its setup doubles."""

    def setup(self):
        """The table, doubled."""
        super().setup()
        self.embedding = self.embedding * 2


REWRITING = {
    "conv": (StandardizedConv(8, (3, 3)), IMAGES),
    "dense": (DoubledDense(16), IMAGES),
    "einsum": (DoubledEinsum((4, 16), "bhwc,cd->bhwd"), IMAGES),
    "table by param": (DoubledParamEmbed(32, 16), jnp.arange(8)),
    "table by setup": (DoubledEmbed(32, 16), jnp.arange(8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [INT4, FLOAT8])
def test_submodules_that_are_called_like_weights_are_explained(policy):
    found = jmp.explain(jmp.with_policy(ViT(), policy), IMAGES)
    said = {row.path: row.quantization for row in found.rows}
    if policy == FLOAT8:
        assert said["embedding"] == "left: the length 4 is not a multiple of 16"
    else:
        assert all(
            said[path].startswith(policy.split("_")[0]) for path in ("embedding", "kernel", "bias/kernel", "bias/bias")
        )
    assert said[""] == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "x", "policy"),
    [(*case, policy) for case, policy in zip(REWRITING.values(), [INT8, INT4_OF_4] * 3, strict=False)],
    ids=REWRITING,
)
def test_layer_whose_author_makes_another_weight_of_its_parameter_computes_the_same_when_quantized(layer, x, policy):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layer.clone(name="layer", parent=self)(x)

    model = jmp.with_policy(Net(), policy)
    variables = jax.jit(model.init)(KEY, x)
    quantized = quant.quantize(variables, policy)
    (weight,) = (leaf for leaf in jax.tree.leaves(quantized, is_leaf=_is_quantized) if _is_quantized(leaf))
    params = dict(variables["params"]["layer"])
    params[next(name for name in params if name != "bias")] = weight.dequantize()
    wanted = jax.jit(layer.apply)({"params": params}, x)
    trained, served = (jax.jit(model.apply)(given, x) for given in (variables, quantized))
    np.testing.assert_allclose(trained, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(served, wanted, rtol=1e-5, atol=1e-5)


def test_explain_says_that_an_author_makes_another_weight():
    model = jmp.with_policy(StandardizedConv(8, (3, 3)), INT8)
    said = jmp.explain(model, IMAGES)[""].quantization
    assert said == "int8(min_size=0), computed with as numbers: its author wrote param"


def tied_by_attribute(embed):
    return embed.variables["params"]["embedding"].T


def tied_by_index(embed):
    return embed.variables["params"]["embedding"][...]


def tied_by_update(embed):
    return embed.variables["params"]["embedding"].at[0].set(0)


def tied_by_operation(embed):
    return jnp.transpose(embed.variables["params"]["embedding"])


READERS = {
    tied_by_attribute: (AttributeError, "A quantized weight has no attribute 'T'; the array of its dequantize() may "),
    tied_by_index: (TypeError, "A quantized weight cannot be indexed; the array of its dequantize() can."),
    tied_by_update: (AttributeError, "A quantized weight has no attribute 'at'; the array of its dequantize() may "),
    tied_by_operation: (TypeError, "QuantizedArray(int8(min_size=0), shape=(16, 8), dtype=float32) is quantized, "),
}
REMEDY = (
    "Or leave 'body/embed/embedding' out by a rule beside the policy that quantizes it. For example: "
    "PolicyMap({'body/embed': 'mixed_bfloat16'}, policy)."
)


class Body(nn.Module):
    """A table, and what reads it."""

    read: object

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(16, 8, name="embed")
        return Reader(self.read, name="reader")(embed(ids), embed)


class Reader(nn.Module):
    """The code that reads a table of another module."""

    read: object

    def __call__(self, x, embed):
        table = self.read(embed)
        return x @ (table if table.shape[0] == 8 else table.T)


@pytest.mark.parametrize(
    ("read", "transform"), list(zip(READERS, [lambda kind: kind, nn.jit, nn.remat, lambda kind: kind], strict=True))
)
def test_code_that_reads_a_quantized_weight_is_told_which_and_what_leaves_it_out(read, transform):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return transform(Body)(read, name="body")(ids)

    kind, message = READERS[read]
    model, ids = jmp.with_policy(Net(), INT8), jnp.arange(4)
    quantized = quant.quantize(jax.eval_shape(model.init, KEY, ids), INT8)
    with pytest.raises(kind, match=f"^{re.escape(message)}") as caught:
        jax.eval_shape(model.apply, quantized, ids)
    assert str(caught.value).endswith(REMEDY)


@pytest.mark.slow
def test_code_outside_of_a_model_is_told_of_the_rule():
    weight = quant.quantize_array(jnp.ones((4, 4)), "int8")
    with pytest.raises(AttributeError) as caught:
        weight.T  # noqa: B018
    assert str(caught.value) == (
        "A quantized weight has no attribute 'T'; the array of its dequantize() may have it. Or leave the weight out "
        "by a rule beside the policy that quantizes it. For example: PolicyMap({'path/of/its/module': "
        "'mixed_bfloat16'}, policy)."
    )
    assert not hasattr(weight, "at")


def _is_quantized(node):
    return isinstance(node, quant.QuantizedArray)


def test_a_stored_weight_is_read_by_a_param_that_needs_a_shape(monkeypatch):
    """As `gemma` 4.0.1 replaces that of all modules."""
    param = nn.Module.param
    declare = lambda self, name, init, shape, *others: param(self, name, init, shape, *others)
    monkeypatch.setattr(nn.Module, "param", declare)
    model, x = jmp.with_policy(nn.Dense(16, use_bias=False), INT8), jnp.ones((2, 8))
    variables = model.init(KEY, x)
    np.testing.assert_array_equal(model.apply(quant.quantize(variables, INT8), x), model.apply(variables, x))
