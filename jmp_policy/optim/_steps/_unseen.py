"""Gradients that no optimizer sees: of float8 state, where they are its next value, and `float0`, of integers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..._base import PyTree, join_state, next_state
from ...loss_scale import find_scaled_state, has_scaled_state

HOLE = optax.MaskedNode()
"""What stands for state that no optimizer sees: transformations of optax pass over it."""


def fill_zeros(rest: PyTree, state: PyTree) -> PyTree:
    """Puts zeros where state was split from a tree: they make no update, and add nothing to the norm of a tree."""
    return join_state(rest, jax.tree.map(jnp.zeros_like, state))


def overwrite_state(state: PyTree, gradient: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Makes the state after a step of an optimizer: the next one, unless the step was skipped.

    Args:
      state: the state among parameters, as `split_state` gives it, or among the two of `optax.lookahead`, which share
        theirs; `None` if there is none.
      gradient: its gradient.
      before: the state of the optimizer. In the middle of `optax.MultiSteps`, the largest magnitudes of microbatches
        stand for one step.
      after: the next state of the optimizer.
    """
    if state is None:
        return None
    if isinstance(state, optax.LookaheadParams):
        return optax.LookaheadParams(*[overwrite_state(state.fast, gradient, before, after)] * 2)
    new = next_state(state, gradient, _is_first(before))
    if not has_scaled_state(after):
        return new
    finite = find_scaled_state(after).grads_finite
    return jax.tree.map(lambda new, old: lax.select(finite, new, old), new, state)


def _is_first(opt_state: PyTree) -> Any:
    """Whether no microbatch of the step was taken before; a step ends where all groups of parameters take theirs."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_multi_steps)
    found = [node.mini_step == 0 for node in nodes if _is_multi_steps(node)]
    return functools.reduce(jnp.logical_and, found) if found else True


def _is_multi_steps(node: object) -> bool:
    return isinstance(node, optax.MultiStepsState)


def has_float0(grads: PyTree) -> bool:
    """Whether some gradients are `float0`."""
    return any(map(_is_float0, jax.tree.leaves(grads)))


def zero_float0(grads: PyTree) -> PyTree:
    """The gradients with integer zeros for those that are `float0`."""
    return jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.int32) if _is_float0(g) else g, grads)


def restore_float0(grads: PyTree, tree: PyTree, otherwise: PyTree) -> PyTree:
    """The leaves of `tree`, and those of `otherwise` where the gradient is `float0`."""
    if not has_float0(grads):
        return tree
    return jax.tree.map(lambda g, x, y: y if _is_float0(g) else x, grads, tree, otherwise)


def _is_float0(grad: object) -> bool:
    return getattr(grad, "dtype", None) == jax.dtypes.float0
