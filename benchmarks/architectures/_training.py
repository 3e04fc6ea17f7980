"""Training an architecture from several seeds at once, in one compiled program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jmp_policy as jmp
from benchmarks._ours import LinenState
from benchmarks.architectures._architecture import Architecture, Model

LAST = 10
"""The steps at the end whose losses are averaged."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Results of a training, seed by seed.

    Attributes:
      losses: `(seeds, steps)`; no batch comes twice, so that each is the loss of data that was not trained on.
      skipped_steps: `(seeds,)`, how many steps overflowed.
      params: the parameters after the last step, with a leading axis of seeds.
    """

    losses: np.ndarray
    skipped_steps: np.ndarray
    params: Any

    @property
    def final(self) -> np.ndarray:
        """The mean loss of the last steps, seed by seed. Runs see the same batches in the same order."""
        return self.losses[:, -LAST:].mean(1)

    def distance(self, other: "Run") -> float:
        """Returns the difference of the mean final loss to `other`, in standard deviations over its seeds."""
        return float((self.final.mean() - other.final.mean()) / other.final.std(ddof=1))


def initialize(architecture: Architecture, seeds: int) -> tuple[Any, Any]:
    """Parameters and variables with a leading axis of seeds; a policy changes none of them."""
    init = architecture.with_policy(jmp.get_policy("float32")).init
    # A map, not a vmap: each seed must compute the same as alone. rbg compiles in a fifth of threefry's time.
    over_seeds = jax.jit(lambda seeds: lax.map(lambda seed: init(jax.random.key(seed, impl="rbg")), seeds))
    return over_seeds(jnp.arange(seeds))


def train(
    architecture: Architecture, policy: jmp.Policy, initial: tuple[Any, Any], loss_scale: jmp.LossScale | None = None
) -> Run:
    """Trains on all batches, from each of the parameters and variables in `initial`.

    Args:
      architecture: the trained architecture.
      policy: the policy of the model.
      initial: what `initialize` returns.
      loss_scale: the loss scale to begin with; the policy's, if `None`.
    """
    scale = policy.loss_scale() if loss_scale is None else loss_scale
    return train_model(architecture.with_policy(policy), architecture, scale, initial)


def train_model(model: Model, architecture: Architecture, scale: jmp.LossScale, initial: tuple[Any, Any]) -> Run:
    """Trains a model on the batches of an architecture, as `train` does."""

    def one_seed(initial: tuple[Any, Any]) -> Any:
        state = make_state(model, architecture.tx, scale, *initial)
        state, losses = lax.scan(train_step, state, architecture.batches)
        return losses, state.opt_state.skipped_steps, state.params

    losses, skipped_steps, params = jax.jit(lambda initial: lax.map(one_seed, initial))(initial)
    return Run(np.asarray(losses), np.asarray(skipped_steps), params)


def make_state(
    model: Model, tx: optax.GradientTransformation, scale: jmp.LossScale, params: Any, variables: Any
) -> LinenState:
    """The state before the first step."""
    tx = jmp.optim.loss_scaled(tx, scale)
    state = LinenState.create(apply_fn=model.loss, params=params, tx=tx, variables=variables)
    return state.replace(step=jnp.zeros((), jnp.int32))  # Flax begins to count with a Python integer


def train_step(state: LinenState, batch: Any) -> tuple[LinenState, jax.Array]:
    """One step: the new state, and the loss before it."""
    loss_fn = lambda params: state.apply_fn(params, state.variables, batch)
    (loss, variables), grads = jmp.value_and_grad(loss_fn, has_aux=True, loss_scale=state)(state.params)
    return state.apply_gradients(grads=grads, variables=variables), loss
