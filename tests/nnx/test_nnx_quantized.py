"""Every layer of nnx under every quantized policy: trained as if quantized, quantized, and left alone."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_layers import attend
from programs import program_text

import jmp_policy as jmp
from jmp_policy.quant import QuantizedArray, quantize, quantize_array
from jmp_policy.quant._layout import Layout

X = jnp.linspace(-2.0, 2.0, 2 * 3 * 8).reshape(2, 3, 8)
IMAGE = jnp.linspace(-2.0, 2.0, 2 * 4 * 4 * 8).reshape(2, 4, 4, 8)
TOKENS = jnp.array([[1, 5, 0]])
MASK = np.tril(np.ones((3, 8, 4), np.float32))
POLICIES = [
    "int8(min_size=0)_from_mixed_bfloat16",
    "int8(activations=false,min_size=0)_from_float32",
    "int4/4(min_size=0)_from_mixed_bfloat16",
]


class Subclass(nnx.Linear):
    """A user's layer, whose methods call each other."""

    def __call__(self, x):
        return self.doubled(super().__call__(x))

    def doubled(self, x):
        return x + x


class ScaledEmbed(nnx.Embed):
    """A user's embedding, which has the rows from Flax's method."""

    def __call__(self, tokens):
        return super().__call__(tokens) * jnp.sqrt(jnp.array(8.0, self.dtype))


class Block(nnx.Module):
    """Layers inside of a model."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](x)))


def einsum(equation, kernel_shape, bias_shape=None):
    return lambda rngs: nnx.Einsum(equation, kernel_shape, bias_shape, rngs=rngs)


def general(*args, **options):
    return lambda rngs: nnx.LinearGeneral(*args, **options, rngs=rngs)


def conv(*args, **options):
    return lambda rngs: nnx.Conv(*args, **options, rngs=rngs)


def transposed(*args, **options):
    return lambda rngs: nnx.ConvTranspose(*args, **options, rngs=rngs)


def call(layer, x):
    return layer(x)


class Layer(NamedTuple):
    make: Callable[[nnx.Rngs], nnx.Module]
    x: jax.Array
    call: Callable[..., Any] = call


LAYERS = {
    "Linear": Layer(lambda rngs: nnx.Linear(8, 4, rngs=rngs), X),
    "Linear without bias": Layer(lambda rngs: nnx.Linear(8, 4, use_bias=False, rngs=rngs), X),
    "LinearGeneral of two axes": Layer(general((3, 8), (2, 4), axis=(-2, -1)), X),
    "LinearGeneral of a batch": Layer(general(8, (2, 4), batch_axis={0: 2}), X),
    "LinearGeneral of a batch without bias": Layer(general(8, (2, 4), batch_axis={0: 2}, use_bias=False), X),
    "Einsum": Layer(einsum("...c,cd->...d", (8, 4), (4,)), X),
    "Einsum, heads first": Layer(einsum("nta,hab->nthb", (2, 8, 4), (2, 4)), X),
    "Einsum, channels first": Layer(einsum("nta,ba->nbt", (4, 8)), X),
    "Einsum, channels between": Layer(einsum("nta,tca->nc", (3, 4, 8)), X),
    "Einsum of a batch": Layer(einsum("nta,tba->ntb", (3, 4, 8)), X),
    "Einsum with an ellipsis in the kernel": Layer(einsum("...a,...ab->...b", (3, 8, 4)), X),
    "Einsum, equation of the call": Layer(
        lambda rngs: nnx.Einsum("ab,bc->ac", (8, 4), rngs=rngs), X[0], lambda layer, x: layer(x)
    ),
    "Conv": Layer(conv(8, 4, (3,)), X),
    "Conv of images": Layer(conv(8, 4, (3, 3), strides=2, use_bias=False), IMAGE),
    "Conv, circular": Layer(conv(8, 4, (3,), padding="CIRCULAR"), X),
    "Conv, masked": Layer(conv(8, 4, (3,), mask=MASK), X),
    "Conv of groups": Layer(conv(8, 4, (2, 2), feature_group_count=2), IMAGE),
    "ConvTranspose": Layer(transposed(8, 4, (2,)), X),
    "ConvTranspose, masked": Layer(transposed(8, 4, (3,), mask=MASK), X),
    "ConvTranspose, circular": Layer(transposed(8, 4, (3, 3), transpose_kernel=True, padding="CIRCULAR"), IMAGE),
    "Embed": Layer(lambda rngs: nnx.Embed(8, 8, rngs=rngs), TOKENS),
    "Embed of one row": Layer(lambda rngs: nnx.Embed(1, 8, rngs=rngs), TOKENS),
    "Embed, attended to": Layer(lambda rngs: nnx.Embed(8, 8, rngs=rngs), X, lambda layer, x: layer.attend(x)),
    "Embed of a user": Layer(lambda rngs: ScaledEmbed(8, 8, rngs=rngs), TOKENS),
    "MultiHeadAttention": Layer(
        lambda rngs: nnx.MultiHeadAttention(2, 8, attention_fn=attend, decode=False, rngs=rngs), X
    ),
    "MultiHeadAttention with a cache": Layer(
        lambda rngs: nnx.MultiHeadAttention(2, 8, attention_fn=attend, rngs=rngs),
        X[:, :1],
        lambda layer, x: (layer.init_cache((2, 3, 8)), layer(x, decode=True))[1],
    ),
    "LoRALinear": Layer(lambda rngs: nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs), X),
    "LoRA": Layer(lambda rngs: nnx.LoRA(8, 2, 4, base_module=nnx.Linear(8, 4, rngs=rngs), rngs=rngs), X),
    "GRUCell": Layer(lambda rngs: nnx.GRUCell(8, 8, rngs=rngs), X, lambda cell, x: cell(x, x)),
    "OptimizedLSTMCell": Layer(lambda rngs: nnx.OptimizedLSTMCell(8, 8, rngs=rngs), X, lambda cell, x: cell((x, x), x)),
    "SimpleCell": Layer(lambda rngs: nnx.SimpleCell(8, 8, rngs=rngs), X, lambda cell, x: cell(x, x)),
    "a user's layer": Layer(lambda rngs: Subclass(8, 4, rngs=rngs), X),
    "a user's method": Layer(lambda rngs: Subclass(8, 4, rngs=rngs), X, lambda layer, x: layer.doubled(layer(x))),
    "a model": Layer(Block, X),
}
READS_ROWS = ("Embed", "Embed of a user")  # quantized, of the rows that are read; before, of these rows alone


@functools.cache
def abstract(name):
    return nnx.split(nnx.eval_shape(lambda: LAYERS[name].make(nnx.Rngs(0))))


def lowered(name, attach):
    """The program of a layer, attached to inside of it, on abstract arrays: no numbers are needed, and none drawn."""
    layer, (graphdef, state) = LAYERS[name], abstract(name)
    return jax.jit(lambda state, x: layer.call(attach(nnx.merge(graphdef, state)), x)).lower(state, layer.x)


def dataflow(program):
    """What is computed from what, in whatever order: every operation, with what defines its operands in their place."""
    defined, lines = {}, []
    for line in program_text(program).splitlines():
        name, operation = re.fullmatch(r"\s*(?:(%\w+) = )?(.*)", line).groups()
        operation = re.sub(r"%\w+", lambda found: str(defined.get(found.group(), found.group())), operation)
        defined[name] = hash(operation)
        lines.append(operation)
    return sorted(lines)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in READS_ROWS])
def test_training_computes_what_the_quantized_layer_will(name, policy):
    trained = lowered(name, lambda model: jmp.with_policy(model, policy))
    assert "round_nearest_even" in trained.as_text()
    assert dataflow(trained) == dataflow(lowered(name, lambda model: quantize(model, policy)))


@pytest.mark.slow
def test_training_by_a_map_computes_what_the_quantized_model_will():
    policy = jmp.PolicyMap({"layers/0": POLICIES[2], "layers": POLICIES[0]}, "float32")
    trained = lowered("a model", lambda model: jmp.with_policy(model, policy))
    assert "i32>" in trained.as_text()  # the one layer in 8 bits
    assert "tensor<2x1x8xui8>" in trained.as_text()  # the zero points of the one in 4
    assert dataflow(trained) == dataflow(lowered("a model", lambda model: quantize(model, policy)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_those_that_the_quantized_table_reads(policy):
    @nnx.jit
    def rows(layers, tokens):
        format = jmp.get_policy(policy).quantization.for_tables
        by_hand = quantize_array(layers[0].embedding[...], format, Layout((8,), 0))
        return [
            [jmp.with_policy(layer, policy)(tokens), quantize(layer, policy)(tokens)] for layer in layers
        ], by_hand.dequantize(jmp.get_policy(policy).compute_dtype)[tokens]

    waves = lambda key, shape, dtype: jnp.sin(jnp.arange(64, dtype=dtype)).reshape(shape)
    make = lambda kind: kind(8, 8, embedding_init=waves, rngs=nnx.Rngs(0))
    [plain, scaled], expected = rows([make(nnx.Embed), make(ScaledEmbed)], TOKENS)
    np.testing.assert_array_equal(plain[0], expected, strict=True)
    for trained, quantized in (plain, scaled):
        np.testing.assert_array_equal(quantized, trained, strict=True)


BLOCKS = [
    "mxfp8/4(min_size=0)_from_mixed_bfloat16",
    "nvfp4/4(min_size=0)_from_mixed_bfloat16",
    "mxfp4/4(min_size=0)_from_float32",
]
LEFT_BY_BLOCKS = (
    *READS_ROWS, "Embed of one row", "Embed, attended to", "Einsum, channels first", "Einsum, channels between",
    "Einsum of a batch",
)  # fmt: skip
"""Tables, and kernels whose last axis is an input, as theirs is."""


@functools.cache
def random_state(name):
    """Random parameters of a layer; its other variables, such as a cache, have no numbers yet."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) / 4, leaf.dtype), abstract(name)[1])


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("policy", BLOCKS)
def test_training_in_blocks_computes_what_the_quantized_layers_will(policy):
    """One program for all layers: it is another one for stored blocks, which are cut and joined, with the same bits."""
    names = [name for name in LAYERS if name not in LEFT_BY_BLOCKS and "cache" not in name and "LoRA" not in name]

    @jax.jit
    def outputs(states):
        found = {}
        for name in names:
            layer, merge = LAYERS[name], functools.partial(nnx.merge, abstract(name)[0])
            attached = [attach(merge(states[name]), policy) for attach in (jmp.with_policy, quantize)]
            found[name] = [layer.call(model, layer.x) for model in attached]
        return found

    for name, (trained, quantized) in outputs({name: random_state(name) for name in names}).items():
        jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name, strict=True), quantized, trained)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LEFT_BY_BLOCKS)
def test_a_table_under_a_policy_of_blocks_is_as_without(name):
    left, plain = (
        lowered(name, lambda model, policy=policy: jmp.with_policy(model, policy)).as_text()
        for policy in (BLOCKS[0], "mixed_bfloat16")
    )
    assert left == plain


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["Linear", "Einsum", "Conv", "MultiHeadAttention"])
def test_a_weight_that_blocks_do_not_divide_costs_nothing(name):
    left, plain = (
        lowered(name, lambda model, policy=policy: jmp.with_policy(model, policy)).as_text()
        for policy in ("mxfp8/5(min_size=0)_from_mixed_bfloat16", "mixed_bfloat16")
    )
    assert left == plain


LINEN = {
    "Linear": nn.Dense(4),
    "LinearGeneral of two axes": nn.DenseGeneral((2, 4), axis=(-2, -1)),
    "Conv": nn.Conv(4, (3,)),
    "Conv of groups": nn.Conv(4, (2, 2), feature_group_count=2),
    "Embed": nn.Embed(8, 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES, *BLOCKS])
@pytest.mark.parametrize("name", LINEN)
def test_a_layer_computes_what_linens_does(name, policy):
    apply = jmp.with_policy(LINEN[name], policy).apply
    params = nnx.to_pure_dict(abstract(name)[1])
    by_linen = jax.jit(lambda params, x: apply({"params": params}, x)).lower(params, LAYERS[name].x)
    assert dataflow(by_linen) == dataflow(lowered(name, lambda model: jmp.with_policy(model, policy)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Linear", "Einsum", "Conv", "ConvTranspose", "Embed", "MultiHeadAttention"])
def test_a_small_weight_costs_nothing(name):
    left, plain = (
        lowered(name, lambda model, policy=policy: jmp.with_policy(model, policy)).as_text()
        for policy in ("int8_from_mixed_bfloat16", "mixed_bfloat16")
    )
    assert left == plain


def _promote(arrays, *, dtype=None, inexact=True):
    return nnx.nn.dtypes.promote_dtype(arrays, dtype=dtype, inexact=inexact)


def _dot_general(*args, **options):
    return jax.lax.dot_general(*args, **options)


def _convolve(*args, **options):
    return jax.lax.conv_general_dilated(*args, **options)


def _einsum(*args, **options):
    return jnp.einsum(*args, **options)


WRITTEN = {
    "promote_dtype": (lambda rngs: nnx.Linear(8, 4, promote_dtype=_promote, rngs=rngs), X),
    "promote_dtype of an embedding": (lambda rngs: nnx.Embed(8, 8, promote_dtype=_promote, rngs=rngs), TOKENS),
    "dot_general": (lambda rngs: nnx.Linear(8, 4, dot_general=_dot_general, rngs=rngs), X),
    "dot_general_cls": (general(8, 4, dot_general_cls=lambda: _dot_general), X),
    "einsum_op": (lambda rngs: nnx.Einsum("...c,cd->...d", (8, 4), einsum_op=_einsum, rngs=rngs), X),
    "conv_general_dilated": (conv(8, 4, (3,), conv_general_dilated=_convolve), X),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_function_that_the_author_wrote_computes_as_written(name):
    make, x = WRITTEN[name]
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    ours, plain = (
        jax.jit(lambda state, x, policy=policy: jmp.with_policy(nnx.merge(graphdef, state), policy)(x)).lower(state, x)
        for policy in ("int8(min_size=0)_from_mixed_bfloat16", "mixed_bfloat16")
    )
    assert ours.as_text() == plain.as_text()
    with pytest.raises(ValueError, match=r"'(kernel|embedding)': its author wrote the functions that it computes with"):
        quantize(model, "int8(min_size=0)_from_mixed_bfloat16")


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrap", [nnx.WeightNorm, nnx.SpectralNorm])
def test_a_weight_that_a_wrapper_rewrites_stays_as_it_is(wrap):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.normed = wrap(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
            self.head = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(self.normed(x))

    quantized = nnx.jit(lambda: quantize(Model(nnx.Rngs(0)), "int8(min_size=0)_from_float32"))()
    assert type(quantized.normed.layer_instance.kernel) is nnx.Param
    assert isinstance(quantized.head.kernel[...], QuantizedArray)
    quantized.normed.layer_instance = nnx.Linear(8, 8, rngs=nnx.Rngs(1))  # is given the policy at the next call
    graphdef, state = nnx.split(quantized)
    normed = jax.jit(lambda state, x: nnx.merge(graphdef, state).normed(x)).lower(state, X)
    assert "round_nearest_even" not in normed.as_text()


def test_a_mask_is_in_the_integers():
    quantized = nnx.jit(lambda: quantize(LAYERS["Conv, masked"].make(nnx.Rngs(0)), "int8(min_size=0)_from_float32"))()
    assert quantized.mask is None
    values = np.asarray(quantized.kernel[...].values)
    assert values.any()
    assert not values[MASK == 0].any()
