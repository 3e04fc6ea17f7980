"""`raise_if_stuck`: tells the host that training only skips steps, or has accepted spikes."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base import PyTree, warn_user
from ..loss_scale import DynamicLossScale, ScaledState, find_nodes, find_scaled_state, list_skipping
from ._skipped_step import count_nonfinite, describe_bad_params, read_counts
from ._transformation import LossScaledState


def raise_if_stuck(
    state: PyTree, params: PyTree = None, *, patience: int = 10, verdict: Callable[[], object] | None = None
) -> None:
    """Raises an error if training is stuck: it only skips steps, and no smaller loss scale can help.

    Call it on the host, every few hundred steps: it reads a few scalars, and so waits for the device.

    A dynamic scale is stuck if it is at its floor and the last two steps were skipped. With `optim.skip_spikes` it also
    raises while spikes are accepted, after `max_consecutive` of them, and warns later that some were.

    Args:
      state: a tree that holds the state of `optim.loss_scaled`, `optim.skip_nonfinite` or `optim.skip_spikes`. In a
        state of several models, made by `jax.vmap`, each is looked at.
      params: parameters to look at if training is stuck: the error names those that are not finite themselves.
      patience: the number of skips in a row after which a scale that does not change is stuck. If the loop adjusts
        dynamic scales itself, beside `skip_nonfinite`, use more than their number of backoffs, 24 from the default
        ceiling.
      verdict: returns the verdict on the last skipped step, `lambda: find.verdict(params, old_state, batch)`. It is
        called if training is stuck, and the error ends with it.

    Raises:
      FloatingPointError: training is stuck.
      ValueError: `state` holds no such state, or several; or `patience` is not positive.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> jmp.optim.raise_if_stuck(jmp.optim.skip_nonfinite(optax.sgd(1.0)).init({"w": jnp.ones(2)}))
    """
    if patience < 1:
        raise ValueError(f"patience must be at least 1, got {patience!r}. For example: raise_if_stuck(opt_state).")
    found = list_skipping(state)
    if not found or find_nodes(state, ScaledState):
        find_scaled_state(state)  # raises unless there is one
    shape = np.shape(found[0].step_taken)
    take = lambda i: [jax.tree.map(lambda x: x[i], each) for each in found] if shape else found
    texts = {i: text for i in np.ndindex(shape) for text in _explain_stuck(take(i), patience)}
    if not texts:
        return
    text = next(iter(texts.values()))
    if shape:
        listed = ", ".join(str(i[0] if len(i) == 1 else i) for i in texts)
        text = f"{len(texts)} of {math.prod(shape)} models are stuck: {listed}. Of the first: {text}"
    bad = read_counts(count_nonfinite(params))
    ask = "raise_if_stuck(opt_state, params) tells whether an update has destroyed the parameters."
    parts = [text, describe_bad_params(bad) if bad else "", ask if params is None else ""]
    parts.append("" if verdict is None else str(verdict()))
    raise FloatingPointError(" ".join(filter(None, parts)))


def _explain_stuck(nodes: list[Any], patience: int) -> Iterator[str]:
    """Yields the errors about one model."""
    for node in nodes:
        explain = _explain_skips if isinstance(node, LossScaledState) else _explain_spikes
        if text := explain(node, patience):
            yield text


def _explain_skips(found: LossScaledState, patience: int) -> str:
    """Returns the error about a state that skips non-finite steps only, or an empty string."""
    scale, skips = found.loss_scale, int(found.consecutive_skips)
    value = float(scale.loss_scale)
    start = f"Training is stuck: the last {skips} steps were skipped ({int(found.skipped_steps)} in all) because their"
    if found.updates_finite is not None and not found.updates_finite:
        if skips < patience:
            return ""
        return (
            f"{start} updates were not finite, though gradients were. A moment or hyperparameter is not finite, or the "
            "update overflows in the dtype of the parameters: in float16, optax.adamw divides by zero because "
            "eps=1e-8 is zero, and in bfloat16 b2=0.999 is 1. Keep moments and hyperparameters in float32. For "
            "example: loss_scaled(optim.master_weights(optax.adamw(1e-3)), scale, check='updates')."
        )
    if not isinstance(scale, DynamicLossScale):
        stuck, where = skips >= patience, "does not change"
    else:
        at_floor = value <= np.float32(scale.min_loss_scale)  # the scale is float32
        stuck, where = at_floor and skips >= 2, f"is at its floor {scale.min_loss_scale}"
    if not stuck:
        return ""
    return (
        f"{start} gradients were not finite. The loss scale is {value} and {where}, so the model or its data makes the "
        "infinities, or another scale does. jmp_policy.optim.find_origin(loss_fn, tx).verdict(params, opt_state, "
        "batch) says which; a policy that computes in bfloat16 has the range of float32. value_and_grad "
        "must scale by this state: jmp_policy.value_and_grad(loss_fn, loss_scale=opt_state), not by a constant such as "
        "policy.loss_scale()."
    )


def _explain_spikes(found: Any, patience: int) -> str:
    """Returns the error about a `SpikeState` that accepts spikes or sees no finite step, or an empty string."""
    spikes, forced, last = int(found.consecutive_spikes), int(found.forced_steps), float(found.last_spike)
    if not found.accepted and spikes >= patience and last >= jnp.finfo(jnp.float32).max:
        return (
            f"Training is stuck: skip_spikes skipped the last {spikes} steps, whose gradients or loss were not finite."
        )
    if found.accepted and spikes:
        return (
            f"The last {spikes} steps were spikes, the last one of {last:.4g}. skip_spikes accepts them since its "
            "max_consecutive, because the level of training seems to have changed. If it should not have, restore a "
            "checkpoint from before them, and look at their data and at the learning rate."
        )
    if forced:
        warn_user(
            f"skip_spikes accepted {forced} spikes, each after max_consecutive others: the level of training changed. "
            "If it should not have, restore a checkpoint from before them."
        )
    return ""
