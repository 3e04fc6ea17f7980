"""Gradients of integers: JAX gives them the dtype `float0`, of which no program can hold an array."""

from typing import Any

import jax
import jax.numpy as jnp

from .._trees import PyTree


def has_float0(grads: PyTree) -> bool:
    """Whether some gradients are `float0`."""
    return any(map(_is_float0, jax.tree.leaves(grads)))


def without_float0(grads: PyTree) -> PyTree:
    """The gradients with integer zeros for those that are `float0`."""
    return jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.int32) if _is_float0(g) else g, grads)


def unless_float0(grads: PyTree, tree: PyTree, otherwise: PyTree) -> PyTree:
    """The leaves of `tree`, and those of `otherwise` where the gradient is `float0`."""
    if not has_float0(grads):
        return tree
    return jax.tree.map(lambda g, x, y: y if _is_float0(g) else x, grads, tree, otherwise)


def _is_float0(grad: Any) -> bool:
    return getattr(grad, "dtype", None) == jax.dtypes.float0
