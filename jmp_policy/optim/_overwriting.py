"""Updating parameters with float8 state among them: optimizers never see it, and its gradient takes its place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._float8_state import join_state, next_state
from .._scaled_state import has_scaled_state, scaled_state
from .._trees import PyTree

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
    finite = scaled_state(after).grads_finite
    return jax.tree.map(lambda new, old: lax.select(finite, new, old), new, state)


def _is_first(opt_state: PyTree) -> Any:
    """Whether no microbatch of the step was taken before; a step ends where all groups of parameters take theirs."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_multi_steps)
    found = [node.mini_step == 0 for node in nodes if _is_multi_steps(node)]
    return functools.reduce(jnp.logical_and, found) if found else True


def _is_multi_steps(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)
