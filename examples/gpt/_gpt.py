"""What the two byte-level GPTs have in common: sizes, attention, optimizer and loss."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_policy as jmp

from ._data import VOCABULARY

WARMUP_STEPS = 100

OBSERVED = "forward", "backward", "results"
"""What `Trainer.observe` measures: the matmuls of both passes, and the gradients, by their paths."""


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of a byte-level GPT.

    Attributes:
      width: the size of the residual stream.
      depth: the number of blocks.
      heads: the number of attention heads; it divides `width`.
      context: the number of bytes that the model sees at once.
      vocabulary: the number of distinct tokens; 256 for bytes.
    """

    width: int = 64
    depth: int = 3
    heads: int = 4
    context: int = 64
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide the width {self.width}, for example: heads=1")


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """What determines a model and its optimizer.

    Attributes:
      policy: the policy of the model, or its policies by path.
      model: its sizes.
      seed: the seed of its parameters.
      learning_rate: the highest learning rate, reached at the end of the warm-up.
      loss_scale: the loss scale to begin with; the policy's own if `None`.
    """

    policy: jmp.Policy | jmp.PolicyMap
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    seed: int = 0
    learning_rate: float = 5e-3
    loss_scale: jmp.LossScale | None = None

    @property
    def reduce_dtype(self) -> np.dtype | None:
        """In which dtype gradients are summed over devices, if the policy says so."""
        policy = self.policy.default if isinstance(self.policy, jmp.PolicyMap) else self.policy
        return None if policy is None else policy.reduce_dtype


def causal_attention(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attends to the position itself and to those before it.

    Written out, because the fused one of JAX asks for float32 sums of float16 products, which XLA:CPU lacks.

    Args:
      queries: `(batch, length, heads, width of a head)`.
      keys: as `queries`.
      values: as `queries`.

    Returns:
      As `queries`, in the dtype of `queries`.

    >>> x = jnp.arange(6.0).reshape(1, 3, 1, 2)
    >>> causal_attention(x, x, x)[0, 0, 0].tolist()
    [0.0, 1.0]
    """
    length = queries.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
    visible = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, values)


def make_optimizer(config: TrainerConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW on clipped gradients, with a loss scale around it.

    The learning rate rises over the warm-up and falls with the square root of the step from there. It does not look
    at the number of steps to come, so that a run can be continued for longer than was planned.
    """
    return _make_optimizer(config.policy, config.loss_scale, config.learning_rate)


# A compiled step belongs to its optimizer: a second run in one process compiles nothing again. Bounded, since a key
# holds the arrays of a loss scale; twice the variants of `compare` fit.
@functools.lru_cache(maxsize=8)
def _make_optimizer(
    policy: jmp.Policy | jmp.PolicyMap, loss_scale: jmp.LossScale | None, learning_rate: float
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
