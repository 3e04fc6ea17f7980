"""`autocast(weights=)` multiplies in Flax models as `with_policy` does, and quantizes those of Equinox and Haiku."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.extend.core import jaxprs_in_params
from programs import walk

from jmp_policy import PolicyMap, autocast, explain, with_policy

IMAGES = jax.random.normal(jax.random.key(1), (16, 4, 4, 32))
TOKENS = jax.random.randint(jax.random.key(1), (2, 16), 0, 64)
ROWS = jax.random.normal(jax.random.key(1), (32, 64))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(64)(nn.relu(nn.Dense(128)(x)))


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(64)(nn.relu(nn.Conv(64, (3, 3))(x)).mean((1, 2)))


class GPT(nn.Module):
    """Its table is left by a rule, because `autocast` quantizes no lookups."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 64)(tokens)
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(64, use_bias=False)(nn.LayerNorm()(x))


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class NnxConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.head = nnx.Conv(32, 64, (3, 3), rngs=rngs), nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.conv(x)).mean((1, 2)))


class NnxGPT(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.mlp = nnx.Embed(64, 64, rngs=rngs), NnxMLP(rngs)
        self.attend = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(64, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attend(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x))


INPUTS = {MLP: ROWS, ConvNet: IMAGES, GPT: TOKENS, NnxMLP: ROWS, NnxConvNet: IMAGES, NnxGPT: TOKENS}


def square(apply, params, x):
    return (apply(params, x).astype(jnp.float32) ** 2).mean()


def assert_equal(ours, theirs):
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.float32(a), np.float32(b), jax.tree_util.keystr(path))


def differentiate(apply):
    return jax.value_and_grad(functools.partial(square, apply))


FORMATS = ("int8", "int4/32", "mxfp8", "mxfp4", "nvfp4", "float8(min_size=0,recipe=current)")


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # for the norms of Flax
        yield


def leave_table(policy):
    """Leaves out the table of a GPT: its rows are looked up, which `autocast` does not quantize."""
    return PolicyMap({"Embed_0|embed": "float32"}, policy)


def make_functions(model, policy):
    """Returns `(apply with with_policy, apply with autocast, params)`."""
    x = INPUTS[model]
    policy = leave_table(policy) if x.dtype == jnp.int32 else policy
    if issubclass(model, nn.Module):
        ours = autocast(model().apply, policy, weights=0)
        return with_policy(model(), policy).apply, ours, jax.eval_shape(model().init, jax.random.key(0), x)
    graph, state = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(0))))
    ours = autocast(lambda model, x: model(x), policy, weights=0)
    merge = lambda state: nnx.merge(graph, state)
    return (
        lambda state, x: with_policy(merge(state), policy)(x),
        lambda state, x: ours(merge(state), x),
        state,
    )


def count_roundings(fun, *args):
    """Counts roundings and operations on 8 or 4 bits by their types. Attention's own matmuls have neither."""
    eqns = [step.eqn for step in walk(jax.make_jaxpr(fun)(*args).jaxpr) if step.name not in ("link", "constant")]
    types = lambda eqn: [str(atom.aval.str_short()) for atom in (*eqn.invars, *eqn.outvars)]
    names = [(eqn.primitive.name, *types(eqn)) for eqn in eqns if not list(jaxprs_in_params(eqn.params))]
    is_small = lambda kinds: any(kind.startswith(("int8", "float8", "float4", "uint8", "uint4")) for kind in kinds)
    return collections.Counter(row for row in names if row[0] in ("round", "clamp") or is_small(row[1:]))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "format"), list(zip(INPUTS, FORMATS, strict=True)))
def test_a_model_multiplies_as_with_policy(format, model):
    theirs, ours, params = make_functions(model, f"{format}_from_mixed_bfloat16")
    found, expected = (count_roundings(differentiate(apply), params, INPUTS[model]) for apply in (ours, theirs))
    assert found == expected
    assert found


def assert_equals_with_policy(model, x, policy):
    variables = model.init(jax.random.key(0), x)
    theirs = with_policy(model, policy).apply
    steps = [jax.jit(differentiate(apply)) for apply in (autocast(model.apply, policy, weights=0), theirs)]
    assert_equal(*(step(variables, x) for step in steps))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_an_mlp_has_the_bits_of_with_policy(format):
    assert_equals_with_policy(MLP(), INPUTS[MLP], f"{format}_from_mixed_bfloat16")


@pytest.mark.slow
def test_a_weight_is_rounded_before_the_cast_of_its_author():
    assert_equals_with_policy(nn.Dense(64, dtype=jnp.bfloat16), INPUTS[MLP], "int8_from_mixed_bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8(attention=true)", "mxfp8(attention=true)"])
def test_attention_in_float32_is_that_of_with_policy(format):
    """Losses and gradients may be sums in another order."""
    model, x, policy = nn.MultiHeadDotProductAttention(4), INPUTS[MLP][None], f"{format}_from_float32"
    variables = model.init(jax.random.key(0), x)
    applies = (autocast(model.apply, policy, weights=0), with_policy(model, policy).apply)
    (loss, grads), (expected, others) = (jax.jit(differentiate(apply))(variables, x) for apply in applies)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, others)


@pytest.mark.slow
def test_a_gpt_in_float32_has_the_bits_of_with_policy():
    assert_equals_with_policy(GPT(), INPUTS[GPT], leave_table("int8_from_float32"))


@pytest.mark.slow
def test_an_nnx_convnet_has_the_bits_of_with_policy():
    policy, model, images = "int8_from_mixed_bfloat16", NnxConvNet(nnx.Rngs(0)), INPUTS[NnxConvNet]
    call = lambda model, x: model(x)
    differentiate_model = lambda apply: nnx.jit(nnx.value_and_grad(lambda model, x: square(apply, model, x)))
    theirs = differentiate_model(call)(with_policy(model, policy), images)
    assert_equal(differentiate_model(autocast(call, policy, weights=0))(model, images), theirs)


def list_quantization(fun, *args):
    return {row.path: row.quantization for row in explain(fun, *args).rows}


@pytest.mark.slow
def test_an_equinox_model_is_quantized():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Sequential([eqx.nn.Conv2d(64, 64, 3, key=jax.random.key(0)), eqx.nn.Lambda(jnp.ravel)])
    params, static = eqx.partition((model, eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(1))), eqx.is_array)

    def apply(params, images, x):
        convolve, mlp = eqx.combine(params, static)
        return jax.vmap(convolve)(images), jax.vmap(mlp)(x)

    fun = autocast(apply, "int8_from_mixed_bfloat16", weights=0)
    found = list_quantization(fun, params, jnp.ones((2, 64, 4, 4)), ROWS)
    assert {name: text for name, text in found.items() if name.endswith("weight")} == {
        "0/0/layers/0/weight": "int8",
        "0/1/layers/0/weight": "int8",
        "0/1/layers/1/weight": "int8",
    }


def test_a_haiku_net_is_quantized():
    hk = pytest.importorskip("haiku")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(64)(jax.nn.relu(hk.Conv2D(64, 3)(x)).mean((1, 2)))))
    images = jnp.ones((2, 4, 4, 32))
    params = jax.eval_shape(net.init, jax.random.key(0), images)
    found = list_quantization(autocast(net.apply, "int8_from_mixed_bfloat16", weights=0), params, images)
    assert found == {"0/conv2_d/w": "int8", "0/linear/w": "int8"}
