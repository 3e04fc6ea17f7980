"""Faults planted in models of Flax nnx, whose parameters are named as Python spells them: `model.head.kernel`."""

import jax
import jax.numpy as jnp
import numpy as np
from faults import fault_in_model
from flax import nnx

X = np.random.default_rng(7).normal(size=(2, 5, 8)).astype(np.float32)


def multiply(variable: nnx.Variable, factor: float) -> None:
    variable[...] = variable[...] * factor


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x)))


class Chain(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Mlp(rngs), Mlp(rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@fault_in_model(argument=("model.blocks[1].down.kernel", "nan"))
def parameter_of_an_nnx_model_that_is_nan():
    model = Chain(nnx.Rngs(0))
    model.blocks[1].down.kernel[...] = model.blocks[1].down.kernel[...].at[3, 4].set(jnp.nan)
    return nnx.value_and_grad(loss), (model, {"x": X, "y": X})


@fault_in_model(argument=("batch['x']", "inf"))
def batch_of_an_nnx_model_that_is_infinite():
    return loss, (nnx.Linear(8, 8, rngs=nnx.Rngs(0)), {"x": np.where(X > 2, np.inf, 0 * X), "y": X})


@fault_in_model(cause="batch['x']", path="down")
def nan_of_a_batch_that_is_infinite():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(self.up(x))  # origin: nan dot_general

    return nnx.grad(loss), (Model(nnx.Rngs(0)), {"x": np.where(X > 2, np.inf, 0 * X), "y": X})


@fault_in_model(path="mlp/up", cause_path="mlp")
def overflow_before_a_linear():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.mlp = Hot(rngs)

        def __call__(self, x):
            return self.mlp(x)

    class Hot(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            x = x * jnp.exp(x * 90)  # cause: inf exp
            return self.up(x)  # origin: nan dot_general

    return lambda model, x: model(x), (Model(nnx.Rngs(0)), X)


@fault_in_model(path="attention", cause_path="attention")
def attention_of_nnx_over_large_logits():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

        def __call__(self, x):
            return self.attention(x)  # origin: nan sub # cause: inf dot_general

    model = Model(nnx.Rngs(0))
    for projection in (model.attention.query, model.attention.key):
        projection.kernel[...] = jnp.full_like(projection.kernel[...], 1e20)
    return lambda model, x: model(x), (model, np.abs(X))


@fault_in_model(path="norm", cause_path="norm")
def norm_of_nnx_without_variance_and_epsilon():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(8, epsilon=0.0, rngs=rngs)

        def __call__(self, x):
            return self.norm(0 * x)  # origin: nan mul # cause: inf rsqrt

    return lambda model, x: model(x), (Model(nnx.Rngs(0)), X)


@fault_in_model(path="layers/dense")
def layer_of_an_nnx_scan_over_layers():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

        def __call__(self, x, gain):
            h = self.dense(x * gain)  # origin: inf dot_general 2
            return x, h

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.vmap(Layer, in_axes=0)(rngs.split(4))

        def __call__(self, x, gains):
            run = nnx.scan(lambda x, layer, gain: layer(x, gain), in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
            return run(x, self.layers, gains)

    model = Model(nnx.Rngs(0))
    model.layers.dense.kernel[...] = jnp.abs(model.layers.dense.kernel[...]) + 10
    return lambda model, *args: model(*args), (model, np.abs(X), np.asarray([1, 1, 3e37, 1], np.float32))


@fault_in_model(path="block/up")
def backward_pass_of_an_nnx_module_under_remat():
    class Hot(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

        def __call__(self, x):
            h = self.up(1e20 * jnp.cos(x))  # origin: inf dot_general backward
            return jnp.sin(h * 1e-10)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.block = Hot(rngs)

        def __call__(self, x):
            return nnx.remat(lambda block, x: block(x))(self.block, x)

    model = Model(nnx.Rngs(0))
    multiply(model.block.up.kernel, 0)
    return nnx.value_and_grad(lambda model, x: jnp.sum(model(x)) * 1e30), (model, X / 10)


@fault_in_model(argument=("model.rnn.cell.hf.kernel", "nan"))
def parameter_of_an_lstm_of_nnx_that_is_nan():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.LSTMCell(8, 4, rngs=rngs))

        def __call__(self, x):
            return self.rnn(x)

    model = Model(nnx.Rngs(0))
    multiply(model.rnn.cell.hf.kernel, np.nan)
    return lambda model, x: model(x), (model, X)


@fault_in_model(path="rnn/cell/dense_h")
def turn_of_an_rnn_of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.SimpleCell(8, 4, activation_fn=jnp.abs, rngs=rngs))

        def __call__(self, x):
            return self.rnn(x)  # origin: inf dot_general 3

    model = Model(nnx.Rngs(0))
    model.rnn.cell.dense_h.kernel[...] = jnp.full((4, 4), 1e13)
    return lambda model, x: model(x), (model, X)
