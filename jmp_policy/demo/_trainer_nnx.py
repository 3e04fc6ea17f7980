"""Training the nnx GPT: what a user of `flax.nnx` writes."""

import functools
from typing import Any

import jax
from flax import nnx

import jmp_policy as jmp

from ._gpt_nnx import GPT
from ._trainer import TrainerConfig, cross_entropy, make_optimizer, split_windows


class NnxTrainer:
    """A `Trainer` of the GPT in nnx."""

    def __init__(self, config: TrainerConfig):
        model_class = jmp.with_policy(GPT, config.policy)
        self.model = model_class(config.model, rngs=nnx.Rngs(config.seed))
        self.optimizer = jmp.nnx.Optimizer(self.model, make_optimizer(config), wrt=nnx.Param)

    def step(self, windows: jax.typing.ArrayLike) -> jax.Array:
        """Trains on one batch; returns its loss."""
        return _train_step(self.model, self.optimizer, windows)

    def loss_fn(self, params: Any, windows: jax.typing.ArrayLike) -> jax.Array:
        """The loss of given parameters."""
        graphdef, _, others = nnx.split(self.model, nnx.Param, ...)
        return _pure_loss_fn(graphdef, params, others, windows)

    @property
    def params(self) -> Any:
        """The parameters."""
        return nnx.state(self.model, nnx.Param)

    @property
    def opt_state(self) -> Any:
        """The state of the optimizer."""
        return self.optimizer.opt_state

    @property
    def state(self) -> Any:
        """The variables of the model and the optimizer."""
        return nnx.state(self.model), nnx.state(self.optimizer)

    @state.setter
    def state(self, state: Any) -> None:
        model, optimizer = state
        nnx.update(self.model, model)
        nnx.update(self.optimizer, optimizer)


def _loss_fn(model: GPT, windows: jax.typing.ArrayLike) -> jax.Array:
    inputs, targets = split_windows(windows)
    return cross_entropy(model(inputs), targets)


@functools.partial(jax.jit, static_argnums=0)
def _pure_loss_fn(graphdef: nnx.GraphDef, params: Any, others: Any, windows: jax.typing.ArrayLike) -> jax.Array:
    return _loss_fn(nnx.merge(graphdef, params, others), windows)


@nnx.jit
def _train_step(model: GPT, optimizer: "jmp.nnx.Optimizer", windows: jax.typing.ArrayLike) -> jax.Array:
    loss, grads = jmp.nnx.value_and_grad(_loss_fn, loss_scale=optimizer)(model, windows)
    optimizer.update(model, grads)
    return loss
