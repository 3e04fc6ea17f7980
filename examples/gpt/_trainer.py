"""What a training run asks of a model, whichever Flax API it is written in."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import numpy as np

import jmp_policy as jmp
from jmp_policy._base import PyTree
from jmp_policy.loss_scale import LossScale
from jmp_policy.numerics import AuditReport, Provenance, Stats

from ._gpt import TrainerConfig

NATS_PER_BIT = float(np.log(2))

LossFn = Callable[[PyTree, jax.typing.ArrayLike], jax.Array]


class Trainer(Protocol):
    """A model with its optimizer: `NnxTrainer` or `LinenTrainer`.

    Attributes:
      state: all that a checkpoint must hold, a pytree of arrays. Assigning restores it.
      params: the parameters, a pytree of arrays.
      opt_state: the state of the optimizer, which holds the loss scale.
    """

    state: PyTree

    @property
    def params(self) -> PyTree:
        """The parameters."""
        ...

    @property
    def opt_state(self) -> PyTree:
        """The state of the optimizer."""
        ...

    def step(self, windows: jax.typing.ArrayLike) -> jax.Array:
        """Trains on uint8 windows `(batch, context + 1)`; returns the loss, a float32 scalar in nats per byte."""
        ...

    def loss_fn(self, params: PyTree, windows: jax.typing.ArrayLike) -> jax.Array:
        """The loss of given parameters: a pure and compiled function, to differentiate and look into."""
        ...

    def audit(self, windows: jax.typing.ArrayLike) -> AuditReport:
        """Audits the step on such windows, which is traced and not run."""
        ...

    def find_origin(self, windows: jax.typing.ArrayLike, scale: LossScale) -> Provenance:
        """Finds what made the gradients of a step not finite, from its batch and its scale: after it was skipped."""
        ...

    def observe(self, windows: jax.typing.ArrayLike, where: str = "matmuls") -> Stats:
        """Measures operations and gradients of the step on such windows, and leaves the state as it is.

        `where` says which operations, as for `numerics.collect`.
        """
        ...


def make_trainer(api: str, config: TrainerConfig) -> Trainer:
    """Makes the trainer of a Flax API, `"nnx"` or `"linen"`, with freshly drawn parameters."""
    if api == "linen":
        from ._gpt_linen import LinenTrainer

        return LinenTrainer(config)
    from ._gpt_nnx import NnxTrainer

    return NnxTrainer(config)


def read_scaling_figures(trainer: Trainer) -> dict[str, Any]:
    """The `loss_scale` and the `skipped_steps` of a trainer, read back from the device."""
    figures = jax.device_get(jmp.metrics(trainer.opt_state))
    return {name: figures[name] for name in ("loss_scale", "skipped_steps")}


def measure_bits_per_byte(loss_fn: LossFn, params: PyTree, batches: Iterable[jax.typing.ArrayLike]) -> float:
    """The loss in bits per byte, over uint8 batches of windows `(batch, context + 1)`.

    >>> import jax.numpy as jnp, numpy as np
    >>> import examples.gpt as demo
    >>> loss_fn, batches = lambda params, windows: jnp.log(params), np.zeros((2, 1, 5), np.uint8)
    >>> round(demo.measure_bits_per_byte(loss_fn, 256.0, batches), 3)
    8.0
    """
    losses = [loss_fn(params, windows) for windows in batches]
    return float(np.mean(jax.device_get(losses))) / NATS_PER_BIT
