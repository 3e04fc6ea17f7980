"""The peers' models in Keras 3 on JAX, with the weights of linen, and the step that Keras takes in `fit`.

Importing it raises ImportError where Keras is not installed, or runs on another backend than JAX.
"""

import functools
import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from benchmarks._fault_contestants import with_faults
from benchmarks._loss import cross_entropy
from examples.gpt.model import GPTConfig

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from keras import layers, ops

if keras.backend.backend() != "jax":
    raise ImportError(f"Keras runs on {keras.backend.backend()!r}, not on 'jax': set KERAS_BACKEND=jax")


class KerasModel(NamedTuple):
    """A built model, and the path of each trainable variable among the parameters of the same module of linen."""

    model: Any
    paths: Sequence[tuple[str, ...]]


class KerasState(NamedTuple):
    """The carry of a loop around Keras's stateless functions: the trainable variables as the parameters of linen, the
    others of the model, and the variables of the optimizer, including the loss scale's.
    """

    params: Any
    variables: list[Any]
    opt_state: list[Any]


class Trainer(NamedTuple):
    """A model with an optimizer, a `LossScaleOptimizer` if the loss is scaled.

    `init` is `params -> KerasState`; `step` is Keras's `JAXTrainer.train_step` without metrics,
    `(state, batch) -> (state, loss)`.
    """

    init: Callable[[Any], KerasState]
    step: Callable[[KerasState, Any], tuple[KerasState, jax.Array]]
    optimizer: Any


def trainer(
    made: KerasModel, scale: float | None, learning_rate: Any = 1e-3, period: int = 2000, weight_decay: float = 1e-4
) -> Trainer:
    """AdamW with the constants of optax's, and Keras's loss scale, if a first `scale` is given."""
    model = made.model
    optimizer = keras.optimizers.AdamW(learning_rate, weight_decay=weight_decay, epsilon=1e-8)
    if scale is not None:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale, dynamic_growth_steps=period)
    optimizer.build(model.trainable_variables)

    def init(params: Any) -> KerasState:
        held = [variable.value for variable in model.non_trainable_variables]
        # An array of its own for each, so that the state can be donated.
        opt_state = [jnp.array(variable.value, copy=True) for variable in optimizer.variables]
        return KerasState(params, [jnp.array(value, copy=True) for value in held], opt_state)

    def step(state: KerasState, batch: Any) -> tuple[KerasState, jax.Array]:
        x, labels = batch
        x, faults = x if isinstance(x, tuple) else (x, None)

        def loss_fn(trainable: list[Any]) -> Any:
            if faults is not None:
                trainable = with_faults(trainable, _list_leaves(faults, made.paths))
            logits, variables = model.stateless_call(trainable, state.variables, x, training=True)
            loss = cross_entropy(logits, labels)
            with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state.opt_state, strict=True))):
                return optimizer.scale_loss(loss), (loss, variables)

        trainable = _list_leaves(state.params, made.paths)
        (_, (loss, variables)), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
        trainable, opt_state = optimizer.stateless_apply(state.opt_state, grads, trainable)
        params = unflatten_dict(dict(zip(made.paths, trainable, strict=True)))
        return KerasState(params, list(variables), list(opt_state)), loss

    return Trainer(init, step, optimizer)


def gpt(config: GPTConfig, policy: str) -> KerasModel:
    """The GPT of `examples.gpt`."""

    class GPT(keras.Model):
        def __init__(self) -> None:
            super().__init__(dtype=policy)
            width = config.width
            self.embed = layers.Embedding(config.vocabulary, width, dtype=policy)
            self.positions = layers.Embedding(config.context, width, dtype=policy)
            self.blocks = [
                {
                    "attention_norm": _norm(policy),
                    "qkv": layers.Dense(3 * width, use_bias=False, dtype=policy),
                    "project": layers.Dense(width, use_bias=False, dtype=policy),
                    "mlp_norm": _norm(policy),
                    "expand": layers.Dense(4 * width, dtype=policy),
                    "contract": layers.Dense(width, dtype=policy),
                }
                for _ in range(config.depth)
            ]
            self.norm = _norm(policy)

        def call(self, tokens: Any, training: Any = None) -> Any:
            x = self.embed(tokens) + self.positions(ops.arange(tokens.shape[1]))
            for block in self.blocks:
                x = x + block["project"](self.attend(block["qkv"](block["attention_norm"](x))))
                expanded = block["expand"](block["mlp_norm"](x))
                x = x + block["contract"](keras.activations.gelu(expanded, approximate=True))
            # `stateless_call` opens no autocast scope around `call`: the table itself would come in float32.
            return ops.matmul(self.norm(x), ops.transpose(ops.cast(self.embed.embeddings, self.compute_dtype)))

        def attend(self, qkv: Any) -> Any:
            batch, length, _ = qkv.shape
            qkv = ops.reshape(qkv, (batch, length, config.heads, -1))
            queries, keys, values = ops.split(qkv, 3, axis=-1)
            scores = ops.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
            visible = ops.tril(ops.ones((length, length), "bool"))
            weights = ops.softmax(ops.where(visible, scores, jnp.finfo(scores.dtype).min.astype(scores.dtype)))
            return ops.reshape(ops.einsum("bhqk,bkhd->bqhd", weights, values), (batch, length, config.width))

    model = GPT()
    model(jnp.zeros((1, config.context), jnp.int32))
    named = {("embed", "embedding"): model.embed.embeddings, ("positions", "embedding"): model.positions.embeddings}
    named |= _named(("norm",), model.norm)
    for index, block in enumerate(model.blocks):
        for name, layer in block.items():
            parents = ("attention", name) if name in ("qkv", "project") else (name,)
            named |= _named((f"blocks_{index}", *parents), layer)
    return _in_order(model, named)


def mlp(sizes: tuple[int, int], policy: str) -> KerasModel:
    """Square layers, whose weights begin at zero."""
    width, depth = sizes
    made = [layers.Dense(width, "relu", kernel_initializer="zeros", dtype=policy) for _ in range(depth - 1)]
    made.append(layers.Dense(width, kernel_initializer="zeros", dtype=policy))
    model = keras.Sequential([keras.Input((width,)), *made])
    return _in_order(model, _name_all({(f"Dense_{index}",): layer for index, layer in enumerate(made)}))


def net(features: int, hidden: int, classes: int, policy: str) -> KerasModel:
    """The model of the benchmark of faults."""
    made = [layers.Dense(hidden, dtype=policy), layers.BatchNormalization(epsilon=1e-5, dtype=policy)]
    last = layers.Dense(classes, dtype=policy)
    model = keras.Sequential([keras.Input((features,)), *made, layers.Activation("relu", dtype=policy), last])
    names = {("Dense_0",): made[0], ("BatchNorm_0",): made[1], ("Dense_1",): last}
    return _in_order(model, _name_all(names))


GPT_OR_MLP: dict[str, Callable[[Any, str], KerasModel]] = {"GPT": gpt, "MLP": mlp}

_NAMES = {"gamma": "scale", "beta": "bias"}


def _norm(policy: str) -> Any:
    return layers.LayerNormalization(epsilon=1e-6, dtype=policy)


def _named(path: tuple[str, ...], layer: Any) -> dict[tuple[str, ...], Any]:
    return {(*path, _NAMES.get(variable.name, variable.name)): variable for variable in layer.trainable_variables}


def _name_all(layers_of: dict[tuple[str, ...], Any]) -> dict[tuple[str, ...], Any]:
    return functools.reduce(operator.or_, (_named(path, layer) for path, layer in layers_of.items()))


def _in_order(model: Any, named: dict[tuple[str, ...], Any]) -> KerasModel:
    path_of = {id(variable): path for path, variable in named.items()}
    return KerasModel(model, [path_of[id(variable)] for variable in model.trainable_variables])


def _list_leaves(tree: Any, paths: Sequence[tuple[str, ...]]) -> list[Any]:
    flat = flatten_dict(tree)
    return [flat[path] for path in paths]
