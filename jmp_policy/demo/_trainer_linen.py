"""Training the linen GPT: what a user of `flax.linen` writes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jmp_policy as jmp

from ._gpt_linen import GPT
from ._trainer import TrainerConfig, cross_entropy, make_optimizer, split_windows


class LinenTrainer:
    """A `Trainer` of the GPT in linen."""

    def __init__(self, config: TrainerConfig):
        model = jmp.with_policy(GPT(config.model), config.policy)
        tokens = jnp.zeros((1, config.model.context), jnp.int32)
        variables = jax.jit(model.init)(jax.random.key(config.seed), tokens)  # with the state of float8 layers, if any
        state = jmp.linen.TrainState.create(apply_fn=model.apply, params=variables, tx=make_optimizer(config))
        # Flax begins to count with a Python integer; the array of the next step would have the step compiled again.
        self.state = state.replace(step=jnp.zeros((), jnp.int32))

    def step(self, windows: jax.typing.ArrayLike) -> jax.Array:
        """Trains on one batch; returns its loss."""
        self.state, loss = _train_step(self.state, windows)
        return loss

    def loss_fn(self, params: Any, windows: jax.typing.ArrayLike) -> jax.Array:
        """The loss of given parameters."""
        return _loss_fn({**self.state.params, "params": params}, self.state.apply_fn, windows)

    @property
    def params(self) -> Any:
        """The parameters."""
        return self.state.params["params"]

    @property
    def opt_state(self) -> Any:
        """The state of the optimizer."""
        return self.state.opt_state


@functools.partial(jax.jit, static_argnums=1)
def _loss_fn(variables: Any, apply_fn: Any, windows: jax.typing.ArrayLike) -> jax.Array:
    inputs, targets = split_windows(windows)
    return cross_entropy(apply_fn(variables, inputs), targets)


@functools.partial(jax.jit, donate_argnums=0)
def _train_step(state: Any, windows: jax.typing.ArrayLike) -> tuple[Any, jax.Array]:
    loss, grads = jmp.value_and_grad(_loss_fn, loss_scale=state)(state.params, state.apply_fn, windows)
    return state.apply_gradients(grads=grads), loss
