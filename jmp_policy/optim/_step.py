"""One step of an optimizer, skipped in the cheapest way when it overflowed."""

from typing import Any

import optax

from .._tree import PyTree
from ._loss_scaled import LossScaledUpdate, with_extra_args


def step(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree, **extra: Any
) -> tuple[PyTree, PyTree]:
    """Updates the parameters.

    Where `tx` is `loss_scaled` or `skip_nonfinite`, update and application are one branch: an overflowed step
    keeps every bit, and a good one writes no array of updates. For any other transformation this is `tx.update`
    followed by `optax.apply_updates`.

    Args:
      tx: an optax transformation.
      grads: true gradients, a tree like `params`.
      opt_state: the state of `tx`.
      params: the parameters; their dtypes are kept.
      **extra: extra arguments for `tx.update`, such as the `value` that `optax.contrib.reduce_on_plateau` takes.

    Returns:
      `(params, opt_state)`.

    >>> tx = jmp.optim.skip_nonfinite(optax.sgd(1.0))
    >>> params = {"w": jnp.ones(2)}
    >>> params, opt_state = step(tx, {"w": jnp.array([1.0, jnp.nan])}, tx.init(params), params)
    >>> params["w"].tolist(), bool(opt_state.grads_finite)
    ([1.0, 1.0], False)
    """
    if isinstance(tx.update, LossScaledUpdate):
        return tx.update.step(grads, opt_state, params, extra)
    updates, opt_state = with_extra_args(tx).update(grads, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state
