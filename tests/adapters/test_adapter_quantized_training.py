"""Training as if quantized in both APIs: the loss falls, the quantized model has the trained numbers, and the cost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from quantized_apis import NET, X, waves

import jmp_policy as jmp
from jmp_policy.quant import quantize

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

Y = jnp.sin(X @ jnp.linspace(-1.0, 1.0, 256).reshape(16, 16))
TX = optax.sgd(0.5, momentum=0.9)


def mean_square(out):
    return jnp.mean((out.astype(jnp.float32) - Y) ** 2)


def train_linen(policy):
    """The losses of training, and what the model computes, as it was trained and quantized."""
    model = jmp.with_policy(NET.linen, policy)
    tx = jmp.optim.loss_scaled(TX, policy.loss_scale())

    def step(carry, _):
        params, state = carry
        differentiate = jmp.value_and_grad(lambda params: mean_square(model.apply(params, X)), loss_scale=state)
        loss, grads = differentiate(params)
        return jmp.optim.step(tx, grads, state, params), loss

    params = jax.jit(model.init)(jax.random.key(0), X)
    (params, _), losses = jax.jit(lambda params: jax.lax.scan(step, (params, tx.init(params)), length=20))(params)
    apply = jax.jit(model.apply)
    return losses, apply(params, X), apply(jax.jit(lambda params: quantize(params, policy))(params), X)


def train_nnx(policy):
    model = jmp.with_policy(NET.nnx(nnx.Rngs(0)), policy)
    optimizer = jmp.nnx.Optimizer(model, jmp.optim.loss_scaled(TX, policy.loss_scale()), wrt=nnx.Param)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def train(carry, _):
        model, optimizer = carry
        loss, grads = jmp.nnx.value_and_grad(lambda model: mean_square(model(X)), loss_scale=optimizer)(model)
        optimizer.update(model, grads)
        return carry, loss

    _, losses = train((model, optimizer), jnp.arange(20))
    call = nnx.jit(lambda model: model(X))
    return losses, call(model), call(nnx.jit(lambda model: quantize(model, policy))(model))


@pytest.mark.parametrize(
    ("train", "policy"),
    [
        (train_linen, "int8(min_size=0)_from_mixed_float16"),
        (train_nnx, "int4/8(min_size=0)_from_mixed_float16"),
        (train_linen, "int4/8(activations=true,min_size=0)_from_mixed_bfloat16"),
        (train_nnx, "e4m3/8(activations=true,min_size=0)_from_mixed_float16"),
        (train_linen, "nf4/8(min_size=0)_from_mixed_bfloat16"),
        (train_linen, "mxfp8/8(min_size=0)_from_mixed_float16"),
        (train_nnx, "mxfp8/8(min_size=0)_from_mixed_bfloat16"),
    ],
)
def test_training_lowers_the_loss_of_the_very_model_that_is_quantized(train, policy):
    losses, trained, quantized = train(jmp.get_policy(policy))
    assert losses[-1] < losses[0] / 2
    np.testing.assert_array_equal(quantized, trained, strict=True)
    assert mean_square(quantized) < losses[0] / 2


@pytest.mark.parametrize("format", ["int8(min_size=0)", "int4/4(min_size=0,table_bits=4)"])
def test_no_compiler_takes_the_rounding_away(format):
    """Neither that to integers, nor that of the numbers they stand for to half precision before they are upcast."""
    table = nnx.Embed(8, 8, embedding_init=waves, rngs=nnx.Rngs(0))
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32").replace(quantization=format)
    rounded = quantize(table, policy).embedding[...].dequantize(jnp.bfloat16).astype(np.float32)
    assert (rounded != table.embedding[...]).any()
    for attach in (jmp.with_policy, quantize):
        rows = nnx.jit(lambda table, attach=attach: attach(table, policy)(jnp.arange(8)))
        np.testing.assert_array_equal(rows(table), rounded, strict=True)
        # Conversions to half and back are dropped where XLA may compute in excess precision; this operation never is.
        text = jax.jit(lambda attach=attach: attach(table, policy)(jnp.arange(8))).lower().as_text()
        assert "stablehlo.reduce_precision" in text
