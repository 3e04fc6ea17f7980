"""Training as if quantized, in both APIs of Flax: the loss falls, and the quantized model has the trained numbers."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import assert_costs_no_more, cost

import jmp_policy as jmp
from benchmarks._targets import cpu
from jmp_policy.quant import quantize, quantize_array
from jmp_policy.quant._layout import table_layout

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
Y = jnp.sin(X @ jnp.linspace(-1.0, 1.0, 64).reshape(8, 8))
TX = optax.sgd(0.5, momentum=0.9)


def waves(key, shape, dtype):
    """Numbers of both signs: to draw them would take a compilation."""
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape) / 3, dtype)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Conv(16, (1,), kernel_init=waves, name="conv")(x))
        return nn.Dense(8, kernel_init=waves, name="head")(x)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(8, 16, (1,), kernel_init=waves, rngs=rngs)
        self.head = nnx.Linear(16, 8, kernel_init=waves, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.tanh(self.conv(x)))


def mean_square(out):
    return jnp.mean((out.astype(jnp.float32) - Y) ** 2)


def train_linen(policy):
    """The losses of training, and what the model computes, as it was trained and quantized."""
    model = jmp.with_policy(LinenNet(), policy)
    tx = jmp.optim.loss_scaled(TX, policy.loss_scale())

    def step(carry, _):
        params, state = carry
        loss_fn = lambda params: mean_square(model.apply(params, X))
        loss, grads = jmp.value_and_grad(loss_fn, loss_scale=state)(params)
        return jmp.optim.step(tx, grads, state, params), loss

    @jax.jit
    def train(params):
        (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), length=20)
        return params, losses

    params, losses = train(jax.jit(model.init)(jax.random.key(0), X))
    quantized = jax.jit(lambda params: quantize(params, policy))(params)
    apply = jax.jit(model.apply)
    return losses, apply(params, X), apply(quantized, X)


def train_nnx(policy):
    model = jmp.with_policy(Net(), policy)
    optimizer = jmp.nnx.Optimizer(model, jmp.optim.loss_scaled(TX, policy.loss_scale()), wrt=nnx.Param)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def train(carry, _):
        model, optimizer = carry
        loss_fn = lambda model: mean_square(model(X))
        loss, grads = jmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer)(model)
        optimizer.update(model, grads)
        return carry, loss

    _, losses = train((model, optimizer), jnp.arange(20))
    quantized = nnx.jit(lambda model: quantize(model, policy))(model)
    call = nnx.jit(lambda model: model(X))
    return losses, call(model), call(quantized)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "policy"),
    [
        (train_linen, "int8(min_size=0)_from_mixed_float16"),
        (train_nnx, "int8(min_size=0)_from_float32"),
        (train_nnx, "int4/8(min_size=0)_from_mixed_float16"),
        (train_linen, "mxfp8/8(min_size=0)_from_mixed_float16"),
        (train_nnx, "mxfp8/8(min_size=0)_from_mixed_bfloat16"),
        (train_nnx, "mxfp4/8(min_size=0)_from_mixed_float16"),
    ],
)
def test_training_lowers_the_loss_of_the_very_model_that_is_quantized(train, policy):
    losses, trained, quantized = train(jmp.get_policy(policy))
    assert losses[-1] < losses[0] / 2
    np.testing.assert_array_equal(quantized, trained, strict=True)
    assert mean_square(quantized) < losses[0] / 2


@pytest.mark.parametrize("format", ["int8(min_size=0)", "int4/4(min_size=0,table_bits=4)"])
def test_no_compiler_takes_the_rounding_away(format):
    """Neither that to integers, nor that of the numbers they stand for to half precision before they are widened."""
    table = nnx.Embed(8, 8, embedding_init=waves, rngs=nnx.Rngs(0))
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32").replace(quantization=format)
    trained, quantized = (
        np.asarray(nnx.jit(lambda table, attach=attach: attach(table, policy)(jnp.arange(8)))(table))
        for attach in (jmp.with_policy, quantize)
    )
    weight = waves(None, (8, 8), jnp.float32)
    rounded = jax.jit(lambda weight: quantize_array(weight, format, table_layout((8, 8))).dequantize(jnp.bfloat16))
    np.testing.assert_array_equal(trained, np.asarray(rounded(weight)).astype(np.float32), strict=True)
    np.testing.assert_array_equal(quantized, trained, strict=True)
    assert (trained != np.asarray(weight)).any()
    # Conversions to half and back are dropped where XLA may compute in excess precision; this operation never is.
    for attach in (jmp.with_policy, quantize):
        rows = jax.jit(lambda attach=attach: attach(table, policy)(jnp.arange(8)))
        assert "stablehlo.reduce_precision" in rows.lower().as_text()


def test_integers_are_multiplied_as_they_are_stored():
    N = 256

    def program(policy):
        layer = nnx.eval_shape(lambda: nnx.Linear(N, N, param_dtype=policy.param_dtype, rngs=nnx.Rngs(0)))
        attach = quantize if policy.quantization else jmp.with_policy
        graphdef, state = nnx.split(attach(layer, policy))
        return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(*cpu().put((state, jnp.ones((4, N)))))

    integers = program(jmp.get_policy("int8_from_mixed_bfloat16"))
    assert f"tensor<{N}x{N}xi8>" in integers.as_text()
    assert not re.search(rf"tensor<{N}x{N}x[^i]", integers.as_text())  # no copy of the weight in any other dtype
    read, wide = (
        lowered.compile().cost_analysis()["bytes accessed"]
        for lowered in (integers, program(jmp.get_policy("bfloat16")))
    )
    assert read < 1.6 * N * N  # a byte for each weight, and what the few rows of the input need
    assert read < 0.7 * wide


def test_training_costs_no_more_than_fake_quantization_by_hand():
    policy = "int8(activations=false)_from_float32"
    graphdef, state = nnx.split(nnx.eval_shape(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))))
    x = jnp.ones((16, 64))

    def ours(state):
        return jnp.sum(jmp.with_policy(nnx.merge(graphdef, state), policy)(x) ** 2)

    def by_hand(params):
        rounded = quantize_array(params["kernel"], "int8").dequantize()
        kernel = params["kernel"] + jax.lax.stop_gradient(rounded - params["kernel"])
        return jnp.sum((x @ kernel + params["bias"]) ** 2)

    assert_costs_no_more(
        cost(jax.value_and_grad(ours), state), cost(jax.value_and_grad(by_hand), nnx.to_pure_dict(state))
    )
