"""A loop that skips every step looks as if it trained: say so, on the host."""

import numpy as np

from .._loss_scale import DynamicLossScale
from .._scaled_state import scaled_state
from .._trees import PyTree


def check(state: PyTree, *, patience: int = 10) -> None:
    """Raises when training is stuck: when it does nothing but skip steps, and no smaller loss scale can help.

    Call it on the host, every few hundred steps: it reads three scalars, and so waits for the device.

    Args:
      state: a tree that holds the state of `optim.loss_scaled` or `optim.skip_nonfinite`.
      patience: how many skips in a row are too many for a scale that does not change; where the loop keeps dynamic
        scales itself, beside `skip_nonfinite`, more than their way down takes, 24 from the highest. A dynamic scale is
        stuck once it has reached its floor and the last two steps were skipped, of which at least one was taken at
        the floor.

    Raises:
      FloatingPointError: training is stuck.
      ValueError: `state` holds no such state, or several.

    >>> check(jmp.optim.skip_nonfinite(optax.sgd(1.0)).init({"w": jnp.ones(2)}))
    """
    found = scaled_state(state)
    scale, skips = found.loss_scale, int(found.consecutive_skips)
    if isinstance(scale, DynamicLossScale):
        value = float(scale.loss_scale)
        floor = np.float32(scale.min_loss_scale)  # as the scale holds it
        stuck, where = value <= floor and skips >= 2, f" and is at its floor {scale.min_loss_scale}"
    else:
        value = float(scale.loss_scale)
        stuck, where = skips >= patience, " and does not change"
    if stuck:
        raise FloatingPointError(
            f"Training is stuck: the last {skips} steps were skipped ({int(found.skipped_steps)} in all) because their "
            f"gradients were not finite. The loss scale is {value}{where}, so the model or its data makes the "
            "infinities. jax.config.update('jax_debug_nans', True) finds the operation; a policy that computes in "
            "bfloat16 has the range of float32."
        )
