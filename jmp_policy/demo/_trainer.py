"""What a training run asks of a model, whichever Flax API it is written in."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_policy as jmp

from ._gpt import GPTConfig

WARMUP_STEPS = 100
NATS_PER_BIT = float(np.log(2))

LossFn = Callable[[Any, np.ndarray], jax.Array]


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """What determines a model and its optimizer.

    Attributes:
      policy: the policy of the model.
      model: its sizes.
      seed: the seed of its parameters.
      learning_rate: the highest learning rate, reached at the end of the warm-up.
      loss_scale: the loss scale to begin with; the policy's own if `None`.
    """

    policy: jmp.Policy
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    seed: int = 0
    learning_rate: float = 5e-3
    loss_scale: jmp.LossScale | None = None


class Trainer(Protocol):
    """A model with its optimizer: `NnxTrainer` or `LinenTrainer`.

    Attributes:
      state: all that a checkpoint must hold, a pytree of arrays. Assigning restores it.
      params: the parameters, a pytree of arrays.
      opt_state: the state of the optimizer, which holds the loss scale.
    """

    state: Any

    @property
    def params(self) -> Any:
        """The parameters."""
        ...

    @property
    def opt_state(self) -> Any:
        """The state of the optimizer."""
        ...

    def step(self, windows: jax.typing.ArrayLike) -> jax.Array:
        """Trains on uint8 windows `(batch, context + 1)`; returns the loss, a float32 scalar in nats per byte."""
        ...

    def loss_fn(self, params: Any, windows: jax.typing.ArrayLike) -> jax.Array:
        """The loss of given parameters: a pure and compiled function, to differentiate and look into."""
        ...


def make_trainer(api: str, config: TrainerConfig) -> Trainer:
    """Makes the trainer of a Flax API, `"nnx"` or `"linen"`, with freshly drawn parameters."""
    if api == "linen":
        from ._trainer_linen import LinenTrainer

        return LinenTrainer(config)
    from ._trainer_nnx import NnxTrainer

    return NnxTrainer(config)


def make_optimizer(config: TrainerConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW on clipped gradients, with a loss scale around it.

    The learning rate rises over the warm-up and falls with the square root of the step from there. It does not look
    at the number of steps to come, so that a run can be continued for longer than was planned.
    """
    return _make_optimizer(config.policy, config.loss_scale, config.learning_rate)


@functools.cache  # a compiled step belongs to its optimizer: a second run in one process compiles nothing again
def _make_optimizer(
    policy: jmp.Policy, loss_scale: jmp.LossScale | None, learning_rate: float
) -> optax.GradientTransformationExtraArgs:
    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        progress = (jnp.asarray(step, jnp.float32) + 1) / WARMUP_STEPS
        return learning_rate * jnp.minimum(progress, progress**-0.5)

    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.01))
    return jmp.optim.loss_scaled(adamw, policy.loss_scale() if loss_scale is None else loss_scale)


def split_windows(windows: jax.typing.ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Cuts uint8 windows `(batch, context + 1)` into int32 inputs and the targets one byte further."""
    tokens = jnp.asarray(windows).astype(jnp.int32)
    return tokens[:, :-1], tokens[:, 1:]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean cross-entropy in nats, in float32 whatever the dtype of the logits."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return losses.mean()


def scaling_figures(trainer: Trainer) -> dict[str, Any]:
    """The `loss_scale` and the `skipped_steps` of a trainer, read back from the device."""
    figures = jax.device_get(jmp.metrics(trainer.opt_state))
    return {"loss_scale": float(figures["loss_scale"]), "skipped_steps": int(figures["skipped_steps"])}


def mean_bits_per_byte(loss_fn: LossFn, params: Any, batches: np.ndarray) -> float:
    """The loss in bits per byte, over uint8 batches of windows `(batches, batch, context + 1)`.

    >>> round(mean_bits_per_byte(lambda params, windows: jnp.log(params), 256.0, np.zeros((2, 1, 5), np.uint8)), 3)
    8.0
    """
    losses = [loss_fn(params, windows) for windows in batches]
    return float(np.mean(jax.device_get(losses))) / NATS_PER_BIT
