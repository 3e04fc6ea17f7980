"""Faults planted in models of Flax linen: the module, the line that calls the layer, the turn of a scan over layers."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from faults import fault_in_model

TOKENS = np.asarray([[1, 4, 2, 0, 3], [3, 3, 0, 1, 2]])
X = np.random.default_rng(7).normal(size=(2, 5, 8)).astype(np.float32)
HALF = jnp.float16


def draw(model: nn.Module, *args: Any, **factors: float) -> Any:
    """The variables of a model, of which those whose path ends as a name does, `up_kernel`, are multiplied."""
    rng = np.random.default_rng(3)

    def draw_one(path: Any, leaf: Any) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="_")
        by = next((factor for end, factor in factors.items() if name.endswith(end)), 1.0)
        values = np.ones(leaf.shape) if name.endswith(("scale", "var")) else rng.normal(size=leaf.shape) / 3
        return (by * values).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw_one, jax.eval_shape(model.init, jax.random.key(0), *args))


def differentiate(model: nn.Module, scale: float = 1.0) -> Callable[..., Any]:
    """The mean of what a model returns, times a scale, and its gradient."""

    def loss(variables, *args):
        return scale * jnp.mean(model.apply(variables, *args), dtype=jnp.float32)

    return jax.value_and_grad(loss)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jax.nn.gelu(nn.Dense(16, name="up")(x))
        return nn.Dense(8, name="down")(x)


@fault_in_model(path="", cause_path="blocks_1/down")
def overflow_of_a_dense_in_a_block():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = jax.nn.gelu(nn.Dense(16, name="up")(x))
            return x + nn.Dense(8, name="down")(h)  # cause: inf dot_general

    class Model(nn.Module):
        def setup(self):
            self.embed = nn.Embed(5, 8)
            self.norm = nn.LayerNorm()
            self.blocks = [Block(), Block()]

        def __call__(self, tokens):
            x = self.norm(self.embed(tokens))
            for block in self.blocks:
                x = block(x)
            return nn.log_softmax(x)  # origin: nan sub

    model = Model()
    return lambda *args: model.apply(*args), (draw(model, TOKENS, blocks_1_down_kernel=3e38), TOKENS)


@fault_in_model(argument=("params['params']['blocks_0']['up']['kernel']", "nan"))
def parameter_of_a_linen_model_that_is_nan():
    class Model(nn.Module):
        def setup(self):
            self.blocks = [Mlp(), Mlp()]

        def __call__(self, x):
            return self.blocks[1](self.blocks[0](x))

    model = Model()

    def loss(params, batch):
        return jnp.mean(model.apply(params, batch["x"]) ** 2)

    return jax.value_and_grad(loss), (draw(model, X, blocks_0_up_kernel=np.nan), {"x": X})


@fault_in_model(argument=("batch['x']", "nan"))
def batch_of_a_linen_model_that_is_nan():
    model = Mlp()

    def loss(params, batch):
        return optax.l2_loss(model.apply(params, batch["x"]), batch["y"]).mean()

    return jax.value_and_grad(loss), (draw(model, X), {"x": np.where(X > 2, np.nan, X), "y": X})


@fault_in_model(path="attention", cause_path="attention")
def attention_over_large_logits():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm(dtype=HALF)(x)
            attention = nn.MultiHeadDotProductAttention(num_heads=2, dtype=HALF, name="attention")
            return attention(x)  # origin: nan sub # cause: inf dot_general

    model = Model()
    return lambda *args: model.apply(*args), (draw(model, X, query_kernel=4e3, key_kernel=40), X)


@fault_in_model(path="mlp/up")
def backward_pass_of_a_dense():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Steep(name="mlp")(x)

    class Steep(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="up", use_bias=False)(x)  # origin: inf dot_general backward
            return nn.Dense(8, name="down", use_bias=False)(x)

    model = Model()
    variables = draw(model, X, up_kernel=1e-25, down_kernel=1e10)
    return differentiate(model, 1e30), (variables, X)


@fault_in_model(path="")
def loss_scale_that_is_too_large_for_float16():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="body", dtype=HALF)(x)
            return x.astype(jnp.float32)  # origin: inf convert_element_type backward

    model = Model()
    return differentiate(model, 2.0**30), (draw(model, X), X)


@fault_in_model(path="norm", cause_path="norm")
def norm_without_variance_and_epsilon():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4)(x)
            return nn.LayerNorm(epsilon=0.0, name="norm")(x)  # origin: nan mul # cause: inf rsqrt

    model = Model()
    return differentiate(model), (draw(model, X, Dense_0_kernel=0, Dense_0_bias=0), X)


@fault_in_model(path="norm", cause_path="norm")
def batch_norm_without_variance_and_epsilon():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4)(x)
            norm = nn.BatchNorm(use_running_average=False, epsilon=0.0, name="norm")
            return norm(x)  # origin: nan mul # cause: inf rsqrt

    model = Model()

    def loss(params, batch_stats, x):
        y, changes = model.apply({"params": params, "batch_stats": batch_stats}, x, mutable="batch_stats")
        return jnp.sum(y**2), changes

    variables = draw(model, X, Dense_0_kernel=0, Dense_0_bias=0)
    return jax.value_and_grad(loss, has_aux=True), (variables["params"], variables["batch_stats"], X)


@fault_in_model(path="unit", cause_path="unit")
def gradient_of_the_length_of_zeros():
    class Unit(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))  # origin: nan mul backward # cause: inf div

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Unit(name="unit")(nn.Dense(4, use_bias=False)(x))

    model = Model()
    return differentiate(model), (draw(model, X, Dense_0_kernel=0), X)


def scan_layers(layer: Any) -> Any:
    return nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)


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

    model = Model()
    gains = np.asarray([1, 1, 3e37, 1], np.float32)
    return lambda *args: model.apply(*args), (jax.tree.map(np.abs, draw(model, X, gains, kernel=30)), np.abs(X), gains)


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

    model = Model()
    gains = np.asarray([0, 1e25, 0, 0], np.float32)
    return differentiate(model), (draw(model, X, gains), X, gains)


@fault_in_model(path="block/down", cause_path="block")
def module_under_remat():
    class Hot(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jnp.exp(nn.Dense(8, name="up")(x))  # cause: inf exp
            return nn.Dense(8, name="down")(x)  # origin: nan dot_general

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(Hot)(name="block")(x)

    model = Model()
    return differentiate(model), (draw(model, X, up_kernel=1e3), X)


@fault_in_model(path="cell/h")
def turn_of_an_rnn():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            cell = nn.SimpleCell(4, activation_fn=jnp.abs, name="cell")
            return nn.RNN(cell, name="rnn")(x)  # origin: inf dot_general 3

    model = Model()
    return lambda *args: model.apply(*args), (draw(model, X, h_kernel=1e13), X)


@fault_in_model(argument=("variables['params']['OptimizedLSTMCell_0']['hf']['kernel']", "nan"))
def parameter_of_an_lstm_that_is_nan():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.RNN(nn.OptimizedLSTMCell(4))(x)
            return nn.Dense(1)(x)

    model = Model()
    return lambda variables, x: model.apply(variables, x), (draw(model, X, hf_kernel=np.nan), X)


@fault_in_model(path="embed")
def logits_of_a_tied_embedding():
    class Model(nn.Module):
        def setup(self):
            self.embed = nn.Embed(5, 8)
            self.mlp = Mlp()

        def __call__(self, tokens):
            return self.embed.attend(self.mlp(self.embed(tokens)))  # origin: inf dot_general

    model = Model()
    variables = jax.tree.map(np.abs, draw(model, TOKENS, embedding=1e8, down_kernel=1e25))
    return lambda *args: model.apply(*args), (variables, TOKENS)


@fault_in_model(path="stem")
def convolution_in_float16():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, image):
            x = nn.Conv(4, (3, 3), dtype=HALF, name="stem")(image)  # origin: inf conv_general_dilated
            return nn.max_pool(x, (2, 2), (2, 2))

    model = Model()
    image = np.abs(np.random.default_rng(1).normal(size=(1, 6, 6, 3))).astype(np.float32)
    return lambda *args: model.apply(*args), (jax.tree.map(np.abs, draw(model, image, kernel=5e4)), image)


@fault_in_model(path="VmapDense_0")
def ensemble_under_vmap():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(4, use_bias=False)
            return dense(x)  # origin: inf dot_general

    model = Model()
    x = np.abs(X)
    return lambda *args: model.apply(*args), (jax.tree.map(np.abs, draw(model, x, kernel=3e38)), x)
