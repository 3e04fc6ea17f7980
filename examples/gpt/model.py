"""The common parts of the two byte-level GPTs: sizes, attention, loss and optimizer."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_policy as jmp

if TYPE_CHECKING:
    from . import gpt_linen, gpt_nnx

    Trainer = gpt_linen.Trainer | gpt_nnx.Trainer

WARMUP_STEPS = 100
NATS_PER_BIT = math.log(2)
OBSERVED = "forward", "backward", "results"
"""The parts of a step that `Trainer.observe` measures: the matmuls of both passes, and the gradients."""


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of a byte-level GPT."""

    width: int = 64  # of the residual stream
    depth: int = 3  # the number of blocks
    heads: int = 4  # of attention; they divide the width
    context: int = 64  # the number of bytes that the model sees at once
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide the width {self.width}, for example: heads=1")


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """The settings that determine a model and its optimizer."""

    policy: jmp.Policy | jmp.PolicyMap
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    seed: int = 0
    learning_rate: float = 5e-3  # the highest, reached at the end of the warm-up
    loss_scale: jmp.LossScale | None = None  # the policy's own if None

    @property
    def reduce_dtype(self) -> np.dtype | None:
        """The dtype in which gradients are summed over devices, if the policy has one."""
        policy = self.policy.default if isinstance(self.policy, jmp.PolicyMap) else self.policy
        return None if policy is None else policy.reduce_dtype


def make_trainer(api: str, config: TrainerConfig) -> "Trainer":
    """Makes the trainer of a Flax API, `"nnx"` or `"linen"`, with freshly drawn parameters."""
    if api == "linen":
        from . import gpt_linen

        return gpt_linen.Trainer(config)
    from . import gpt_nnx

    return gpt_nnx.Trainer(config)


def make_optimizer(config: TrainerConfig) -> optax.GradientTransformationExtraArgs:
    """Returns AdamW on clipped gradients, around which spikes and non-finite steps are skipped.

    The learning rate rises over the warm-up and then falls with the square root of the step. It does not depend on the
    last step, so a run can be continued for longer than planned.
    """

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        progress = (jnp.asarray(step, jnp.float32) + 1) / WARMUP_STEPS
        return config.learning_rate * jnp.minimum(progress, progress**-0.5)

    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.01))
    loss_scale = config.policy.loss_scale() if config.loss_scale is None else config.loss_scale
    return jmp.optim.loss_scaled(jmp.optim.skip_spikes(adamw), loss_scale)


def causal_attention(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attends to the position itself and to those before it; all arrays are `(batch, length, heads, head width)`.

    Written out, because `jax.nn.dot_product_attention` asks for float32 sums of float16 products, which XLA:CPU lacks.

    >>> x = jnp.arange(6.0).reshape(1, 3, 1, 2)
    >>> causal_attention(x, x, x)[0, 0, 0].tolist()
    [0.0, 1.0]
    """
    length = queries.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
    visible = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, values)


def split_windows(windows: jax.typing.ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Cuts uint8 windows `(batch, context + 1)` into int32 inputs and the targets one byte further."""
    tokens = jnp.asarray(windows).astype(jnp.int32)
    return tokens[:, :-1], tokens[:, 1:]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats, in float32 whatever the dtype of the logits."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return losses.mean()


def read_scaling(opt_state: Any) -> dict[str, Any]:
    """Reads `loss_scale` and `skipped_steps` of an optimizer's state back from the device. Spikes count too."""
    found = jax.device_get(jmp.metrics(opt_state))
    skipped = int(found["skipped_steps"]) + int(found.get("spike_steps", 0))
    return {"loss_scale": float(found["loss_scale"]), "skipped_steps": skipped}


def measure_bits_per_byte(
    loss_fn: Callable[[Any, Any], jax.Array], params: Any, batches: Iterable[jax.typing.ArrayLike]
) -> float:
    """Returns the mean loss in bits per byte over batches of uint8 windows `(batch, context + 1)`.

    >>> loss_fn, batches = lambda params, windows: jnp.log(params), np.zeros((2, 1, 5), np.uint8)
    >>> round(measure_bits_per_byte(loss_fn, 256.0, batches), 3)
    8.0
    """
    losses = [float(loss_fn(params, windows)) for windows in batches]
    return float(np.mean(losses)) / NATS_PER_BIT
