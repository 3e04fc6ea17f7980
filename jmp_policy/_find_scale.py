"""Finding the loss scale in whatever holds it, and its figures for a logger."""

from typing import Any, TypeVar

import jax
import numpy as np

from ._loss_scale import DynamicLossScale, LossScale, register_with_flax
from ._scaled_state import NEVER_OUTSIDE, LossScaledState, check_not_inside, find_nodes, has_scaled_state
from ._trees import PyTree

T = TypeVar("T")


def get_loss_scale(state: PyTree) -> LossScale:
    """Finds the loss scale in a state.

    Args:
      state: a `LossScale`, or any tree that holds exactly one: an optax state, a `TrainState`, an `nnx.Optimizer`.

    Raises:
      ValueError: it holds none, or several; or it is inside the state of a transformation that goes on where
        `optim.loss_scaled` skips a step, such as `optax.MultiSteps`.

    >>> get_loss_scale({"step": 0, "scale": jmp.StaticLossScale(8.0)})
    StaticLossScale(loss_scale=8.0)
    """
    register_with_flax()
    if isinstance(state, LossScale):
        return strip_variables(state)
    check_not_inside(NEVER_OUTSIDE, state)
    found = find_nodes(state, LossScale)
    if len(found) != 1:
        raise ValueError(
            f"Expected a state that holds exactly one loss scale, got {type(state).__name__} with {len(found)}. "
            "Pass the loss scale itself, or the state of jmp_policy.optim.loss_scaled(tx, policy.loss_scale())."
        )
    return strip_variables(found[0])


def find_scaled_state(state: PyTree) -> LossScaledState:
    """Finds the state of `optim.loss_scaled` in a tree that holds exactly one.

    Raises:
      ValueError: it holds none, or several.
    """
    found = find_nodes(state, LossScaledState)
    if len(found) != 1:
        raise ValueError(
            f"Expected a state that holds exactly one LossScaledState, got {type(state).__name__} with {len(found)}. "
            "For example: jmp_policy.optim.loss_scaled(optax.adamw(1e-3), policy.loss_scale()).init(params)."
        )
    found = found[0]._replace(inner_state=None)  # which may be large, and nobody asks for
    return strip_variables(found)


def metrics(state: PyTree) -> dict[str, Any]:
    """The figures of loss scaling as a flat dictionary of scalars, for any logger.

    Args:
      state: a tree that holds the state of `optim.loss_scaled`, or a loss scale alone.

    Returns:
      `loss_scale` (float32) and `steps_since_growth` (int32); of an optimizer's state also `grads_finite` (bool),
      `skipped_steps` and `consecutive_skips` (int32). Nothing is read back from the device.

    Raises:
      ValueError: the tree holds no loss scale, or several.

    >>> metrics(jmp.NoOpLossScale())
    {'loss_scale': np.float32(1.0), 'steps_since_growth': np.int32(0)}
    """
    scale = get_loss_scale(state)
    dynamic = isinstance(scale, DynamicLossScale)
    figures = {
        "loss_scale": scale.loss_scale if dynamic else np.float32(scale.loss_scale),
        "steps_since_growth": scale.counter if dynamic else np.int32(0),
    }
    if has_scaled_state(state):
        of_optimizer = find_scaled_state(state)
        for name in ("grads_finite", "skipped_steps", "consecutive_skips"):
            figures[name] = getattr(of_optimizer, name)
    return figures


def strip_variables(tree: T) -> T:
    """Takes arrays out of the Variables in which an nnx optimizer keeps each; those are known by their `get_value`."""
    is_variable = lambda node: hasattr(node, "get_value")
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_variable)
    if not any(map(is_variable, leaves)):
        return tree
    return structure.unflatten([leaf.get_value() if is_variable(leaf) else leaf for leaf in leaves])
