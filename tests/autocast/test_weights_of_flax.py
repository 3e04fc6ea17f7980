"""`autocast(weights=)` of a Flax model multiplies as `with_policy` does: by operations in each format, and by bits."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.extend.core import jaxprs_in_params
from programs import walk
from quantized_models import GPT, INPUTS, MLP, CastGPT, ConvNet, NnxConvNet, assert_equal, differentiate, square

from jmp_policy import PolicyMap, autocast, with_policy

FORMATS = ("int8", "int4/32", "mxfp8", "mxfp4", "nvfp4", "float8(min_size=0,recipe=current)")


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # for the norms of Flax
        yield


def leave_table(policy, output="float32"):
    """Leaves out the table of a GPT: its rows are looked up, which `autocast` does not quantize."""
    return PolicyMap({"Embed_0|embed": f"params=float32,compute=float32,output={output}"}, policy)


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


@pytest.mark.parametrize(("model", "format"), list(zip(INPUTS, FORMATS, strict=True)))
def test_a_model_multiplies_as_with_policy(format, model):
    theirs, ours, params = make_functions(model, f"{format}_from_mixed_bfloat16")
    found, expected = (count_roundings(differentiate(apply), params, INPUTS[model]) for apply in (ours, theirs))
    assert found == expected
    assert found


def assert_equals_with_policy(model, x, policy, twin=None, policy_of_twin=None):
    """Compares the loss and gradients of `autocast` with those of `with_policy`, or with those of a twin."""
    variables = model.init(jax.random.key(0), x)
    theirs = with_policy(twin or model, policy_of_twin or policy).apply
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
@pytest.mark.parametrize("format", ["int8", "float8(min_size=0,recipe=current)"])
def test_a_convnet_has_the_bits_of_with_policy(format):
    assert_equals_with_policy(ConvNet(), INPUTS[ConvNet], f"{format}_from_mixed_bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8(attention=true)", "mxfp8(attention=true)"])
def test_attention_in_float32_is_that_of_with_policy(format):
    """The loss has the same bits. Gradients may be sums in another order."""
    model, x, policy = nn.MultiHeadDotProductAttention(4), INPUTS[MLP][None], f"{format}_from_float32"
    variables = model.init(jax.random.key(0), x)
    applies = (autocast(model.apply, policy, weights=0), with_policy(model, policy).apply)
    (loss, grads), (expected, others) = (jax.jit(differentiate(apply))(variables, x) for apply in applies)
    assert loss == expected
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, others)


@pytest.mark.slow
def test_a_gpt_in_float32_has_the_bits_of_with_policy():
    assert_equals_with_policy(GPT(), INPUTS[GPT], leave_table("int8_from_float32"))


@pytest.mark.slow
def test_a_gpt_in_bfloat16_has_the_bits_of_the_casts_that_autocast_makes():
    """Flax casts a norm's input for each use, and computes the softmax in bfloat16; `autocast` does neither."""
    policy = "int8_from_mixed_bfloat16"
    assert_equals_with_policy(
        GPT(), INPUTS[GPT], leave_table(policy, "bfloat16"), twin=CastGPT(), policy_of_twin=leave_table(policy)
    )


@pytest.mark.slow
def test_an_nnx_convnet_has_the_bits_of_with_policy():
    policy, model, images = "int8_from_mixed_bfloat16", NnxConvNet(nnx.Rngs(0)), INPUTS[NnxConvNet]
    call = lambda model, x: model(x)
    differentiate_model = lambda apply: nnx.jit(nnx.value_and_grad(lambda model, x: square(apply, model, x)))
    theirs = differentiate_model(call)(with_policy(model, policy), images)
    assert_equal(differentiate_model(autocast(call, policy, weights=0))(model, images), theirs)
