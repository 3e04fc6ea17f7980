"""How far the results of a trial are from those of float32: one number, made on the device."""

from typing import Any

import jax
import jax.numpy as jnp

from ..._base import PyTree, at_least_float32
from ...loss_scale import all_finite

FLOOR = 0.1
"""A leaf is small if the root of its mean square is below so much of that of all leaves."""


def list_numbers(tree: PyTree) -> list[jax.Array]:
    """The floating and complex leaves of a tree, in float32 or wider, complex ones as two leaves."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") or is_number(leaf)]
    found = []
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            found += [leaf.real, leaf.imag]
        elif jnp.issubdtype(leaf.dtype, jnp.floating):
            found.append(leaf)
    return [leaf.astype(at_least_float32(leaf.dtype)) for leaf in found]


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python float or complex number."""
    return isinstance(leaf, float | complex)


def measure_error(trees: dict[str, PyTree], reference: dict[str, PyTree]) -> jax.Array:
    """The largest relative error of any leaf, in float32; infinite where something is not finite.

    A leaf's error is the norm of its difference, relative to its own norm. A leaf that is small beside the others of
    its tree is held against a tenth of their size instead: the gradient of a bias that cancels, as that of the keys of
    an attention, is nothing but rounding, and would be far off by its own measure.

    Args:
      trees: what a trial returned, by name, such as the outputs and the gradients.
      reference: what float32 returned.

    >>> reference = {"loss": jnp.float32(2.0), "grads": [jnp.ones(4), jnp.zeros(4)]}
    >>> trial = {"loss": jnp.float16(2.0), "grads": [jnp.ones(4), jnp.full(4, 1e-3)]}
    >>> round(float(measure_error(trial, reference)), 4)
    0.0141
    """
    errors = [jnp.float32(0)]
    for name, tree in reference.items():
        wanted, got = list_numbers(tree), list_numbers(trees[name])
        errors += _compare_leaves(wanted, got)
    is_finite = all_finite([list_numbers(tree) for tree in trees.values()])
    return jnp.where(is_finite, jnp.max(jnp.stack(errors)), jnp.inf)


def _compare_leaves(wanted: list[jax.Array], got: list[jax.Array]) -> list[jax.Array]:
    """The errors of all leaves; in units of the largest number, so that no square overflows."""
    wanted = [leaf for leaf in wanted if leaf.size]
    got = [leaf for leaf in got if leaf.size]
    if not wanted:
        return []
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)).astype(jnp.float32) for leaf in wanted]))
    unit = jnp.where(largest > 0, largest, 1.0)
    squares = [_sum_squares(leaf, unit) for leaf in wanted]
    mean_square = jnp.sum(jnp.stack(squares)) / sum(leaf.size for leaf in wanted)
    errors = []
    for leaf, other, square in zip(wanted, got, squares, strict=True):
        least = FLOOR**2 * mean_square * leaf.size
        difference = _sum_squares(other - leaf, unit)
        # Zeros are zeros: what differs from a tree of nothing but zeros is all error.
        denominator = jnp.maximum(square, least)
        ratio = jnp.sqrt(difference / jnp.where(denominator > 0, denominator, 1.0))
        errors.append(jnp.where(denominator > 0, ratio, jnp.where(difference > 0, jnp.inf, 0.0)))
    return errors


def _sum_squares(leaf: jax.Array, unit: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf / unit.astype(leaf.dtype))).astype(jnp.float32)
