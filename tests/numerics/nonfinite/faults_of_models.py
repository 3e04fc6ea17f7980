"""Faults of models of Flax: the module, the line that calls the layer, the iteration of a scan over layers.

Parameters of linen are named by the paths of a tree, and those of nnx as Python spells them, `model.head.kernel`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from faults import fault_in_model
from flax import nnx

X = np.random.default_rng(7).normal(size=(2, 5, 8)).astype(np.float32)
GAINS = np.asarray([1, 1, 3e37, 1], np.float32)


def draw(model, *args, **factors):
    """The variables of a model, of which those whose path ends as a name does, `up_kernel`, are multiplied."""
    rng = np.random.default_rng(3)

    def draw_one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="_")
        by = next((factor for end, factor in factors.items() if name.endswith(end)), 1.0)
        values = np.ones(leaf.shape) if name.endswith("scale") else rng.normal(size=leaf.shape) / 3
        return (by * values).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw_one, jax.eval_shape(model.init, jax.random.key(0), *args))


def differentiate(model, scale=1.0):
    """The mean of what a model returns, times a scale, and its gradient."""
    return jax.value_and_grad(lambda variables, *args: scale * jnp.mean(model.apply(variables, *args)))


def scan_layers(layer):
    return nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8, name="down")(jax.nn.gelu(nn.Dense(16, name="up")(x)))


@fault_in_model(path="", cause_path="blocks_1/down")
def overflow_of_a_dense_in_a_block():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = jax.nn.gelu(nn.Dense(16, name="up")(x))
            return x + nn.Dense(8, name="down")(h)  # cause: inf dot_general

    class Model(nn.Module):
        def setup(self):
            self.blocks = [Block(), Block()]

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return nn.log_softmax(x)  # origin: nan sub

    return Model().apply, (draw(Model(), X, blocks_1_down_kernel=3e38), X)


@fault_in_model(argument=("params['params']['up']['kernel']", "nan"))
def parameter_of_a_linen_model_that_is_nan():
    loss = lambda params, batch: jnp.mean(Mlp().apply(params, batch["x"]) ** 2)
    return jax.value_and_grad(loss), (draw(Mlp(), X, up_kernel=np.nan), {"x": X})


@fault_in_model(path="mlp/up")
def backward_pass_of_a_dense():
    class Steep(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="up", use_bias=False)(x)  # origin: inf dot_general backward
            return nn.Dense(8, name="down", use_bias=False)(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Steep(name="mlp")(x)

    return differentiate(Model(), 1e30), (draw(Model(), X, up_kernel=1e-25, down_kernel=1e10), X)


@fault_in_model(path="layers/dense")
def layer_of_a_scan_over_layers():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, gain):
            h = nn.Dense(8, name="dense", use_bias=False)(x * gain)  # origin: inf dot_general 2
            return x + jnp.tanh(h), h

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, gains):
            return scan_layers(Layer)(name="layers")(x, gains)

    variables = jax.tree.map(np.abs, draw(Model(), X, GAINS, kernel=30))
    return Model().apply, (variables, np.abs(X), GAINS)


@fault_in_model(path="layers")
def backward_pass_of_a_scan_over_layers_under_remat():
    class Hot(nn.Module):
        @nn.compact
        def __call__(self, x, gain):
            h = nn.Dense(8, name="dense")(jax.lax.stop_gradient(x))
            return x + h + (h - jax.lax.stop_gradient(h)) * gain * 1e20, None  # origin: inf mul backward 1

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, gains):
            return scan_layers(nn.remat(Hot))(name="layers")(x, gains)[0]

    gains = np.asarray([0, 1e25, 0, 0], np.float32)
    return differentiate(Model()), (draw(Model(), X, gains), X, gains)


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.up(x))


@fault_in_model(argument=("model.layers[1].down.kernel", "nan"))
def parameter_of_an_nnx_model_that_is_nan():
    model = nnx.Sequential(Pair(nnx.Rngs(0)), Pair(nnx.Rngs(0)))
    model.layers[1].down.kernel[...] = model.layers[1].down.kernel[...].at[3, 4].set(jnp.nan)
    return nnx.value_and_grad(loss), (model, {"x": X, "y": X})


@fault_in_model(cause="batch['x']", path="down")
def nan_of_a_batch_that_is_infinite():
    class Model(Pair):
        def __call__(self, x):
            return self.down(self.up(x))  # origin: nan dot_general

    return nnx.grad(loss), (Model(nnx.Rngs(0)), {"x": np.where(X > 2, np.inf, 0 * X), "y": X})


@fault_in_model(path="up")
def backward_pass_of_an_nnx_module_under_remat():
    class Model(Pair):
        def run(self, x):
            h = self.up(1e20 * jnp.cos(x))  # origin: inf dot_general backward
            return jnp.sin(h * 1e-10)

        def __call__(self, x):
            return nnx.remat(lambda model, x: model.run(x))(self, x)

    model = Model(nnx.Rngs(0))
    model.up.kernel[...] = 0 * model.up.kernel[...]
    return nnx.value_and_grad(lambda model, x: jnp.sum(model(x)) * 1e30), (model, X / 10)
