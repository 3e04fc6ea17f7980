"""Updating parameters with float8 state among them: optimizers never see it, and its gradient takes its place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._float8_state import map_state, next_state
from .._scaled_state import has_scaled_state, scaled_state
from .._trees import PyTree


def hide_state(tree: PyTree) -> PyTree:
    """A tree without its state, which transformations of optax pass over."""
    return map_state(lambda _: optax.MaskedNode(), tree, otherwise=_itself)


def restore_state(tree: PyTree, state: PyTree) -> PyTree:
    """A masked tree with the state of another."""
    others = iter(jax.tree.leaves(tree))
    return map_state(_itself, state, otherwise=lambda _: next(others))


def zero_state(tree: PyTree) -> PyTree:
    """A tree with zeros for its state, of which no update comes, and nothing in the sums over all parameters."""
    return map_state(jnp.zeros_like, tree, otherwise=_itself)


def overwrite_state(params: PyTree, grads: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Parameters whose state is the next one, unless the step was skipped.

    Args:
      params: a tree with state, or the two of `optax.lookahead`, which share theirs.
      grads: its gradients.
      before: the state of the optimizer. In the middle of `optax.MultiSteps`, the largest magnitudes of microbatches
        stand for one step.
      after: the next state of the optimizer.
    """
    if isinstance(params, optax.LookaheadParams):
        fast = overwrite_state(params.fast, grads, before, after)
        return optax.LookaheadParams(fast, restore_state(hide_state(params.slow), fast))
    new = next_state(params, grads, _is_first(before))
    if not has_scaled_state(after):
        return new
    finite = scaled_state(after).grads_finite
    return map_state(lambda new, old: lax.select(finite, new, old), new, params, otherwise=lambda new, _: new)


def _is_first(opt_state: PyTree) -> Any:
    """Whether no microbatch of the step was taken before; a step ends where all groups of parameters take theirs."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_multi_steps)
    found = [node.mini_step == 0 for node in nodes if _is_multi_steps(node)]
    return functools.reduce(jnp.logical_and, found) if found else True


def _is_multi_steps(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)


def _itself(leaf: Any) -> Any:
    return leaf
