"""The inputs of a step: their names, the ranges of good ones, and elements that are out of range."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base import is_array, is_floating

_MOST_ROWS = 8
_LARGE_ROW = 100.0
"""A row is out of range if it is this many times as large as the median row."""

Range = tuple[Any, Any]
"""The smallest and the largest element."""


def name_leaves(loss_fn: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Pairs each array of a batch with its name, such as `batch['x']`."""
    from .._jaxpr import find_signature, spell_arguments

    arguments = ((None, *args), kwargs)
    names = spell_arguments(find_signature(loss_fn), arguments, arguments, is_lifted=False)
    return list(zip(names, filter(is_array, jax.tree.leaves(arguments)), strict=True))


def join_range(leaf: Any, old: Range | None) -> Range | None:
    """Returns the range of an array and of earlier ones, without nans. Does not wait for the device."""
    if not leaf.size or not (is_floating(leaf) or jnp.issubdtype(leaf.dtype, jnp.integer)):
        return old
    if isinstance(leaf, jax.Array):
        low, high = _find_range(leaf)
    else:
        low, high = np.fmin.reduce(leaf, axis=None), np.fmax.reduce(leaf, axis=None)
    if old is None:
        return low, high
    numpy: Any = jnp if any(isinstance(x, jax.Array) for x in (low, *old)) else np
    return numpy.fmin(old[0], low), numpy.fmax(old[1], high)


@jax.jit
def _find_range(leaf: jax.Array) -> Range:
    if not is_floating(leaf):
        return leaf.min(), leaf.max()
    return jnp.nanmin(leaf), jnp.nanmax(leaf)


class Suspects(NamedTuple):
    """Elements of an input that are not finite or out of range."""

    text: str
    is_finite: bool
    rows: tuple[int, ...]
    repaired: Any  # the input with a good row in the place of each bad one, or clipped to the range

    def describe(self, name: str) -> str:
        rows = f" (row{'s' * (len(self.rows) > 1)} {', '.join(map(str, self.rows))})" if self.rows else ""
        return f"{self.text} in {name}{rows}"


def find_suspects(leaf: Any, seen: Range | None) -> Suspects | None:
    """Finds suspicious elements of an input, by the range of earlier batches or else by the other rows."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return None
    if not leaf.size or not (is_floating(leaf) or (seen and jnp.issubdtype(leaf.dtype, jnp.integer))):
        return None
    array = np.asarray(leaf)
    wide = array.astype(np.float64)
    low, high = map(float, seen) if seen else _find_range_of_most(wide)
    is_bad = ~((wide >= low) & (wide <= high))
    if not is_bad.any() or math.isnan(low):
        return None
    worst = wide[is_bad]
    is_finite = bool(np.isfinite(worst).all())
    if is_finite:
        spell = (lambda x: f"{x:.4g}") if is_floating(leaf) else (lambda x: str(int(x)))
        text = f"{is_bad.sum()} of {array.size} elements are outside of {spell(low)} to {spell(high)}, such as "
        text += f"{spell(worst[np.abs(worst).argmax()])},"
    else:
        text = f"{(~np.isfinite(worst)).sum()} of {array.size} elements are not finite"
    is_bad_row = is_bad.reshape(*array.shape[:1], -1).any(-1)
    repaired = np.clip(np.nan_to_num(wide, nan=low), low, high).astype(array.dtype)
    if not is_bad_row.all():
        repaired[is_bad_row] = array[is_bad_row.argmin()]
    if isinstance(leaf, jax.Array):
        repaired = jax.device_put(repaired, leaf.sharding)
    rows = np.flatnonzero(is_bad_row)[:_MOST_ROWS] if array.ndim else ()
    return Suspects(text, is_finite, tuple(map(int, rows)), repaired)


def _find_range_of_most(wide: np.ndarray) -> tuple[float, float]:
    """Returns the range of the rows that are finite and not far larger than the median row."""
    rows = wide.reshape(wide.shape[0], -1) if wide.ndim else wide.reshape(1, 1)
    size = np.abs(rows).max(1)
    finite = np.isfinite(size)
    if not finite.any():
        elements = wide[np.isfinite(wide)]
        return (float(elements.min()), float(elements.max())) if elements.size else (math.nan, math.nan)
    median = np.median(size[finite])
    kept = rows[finite & (size <= _LARGE_ROW * median)] if median > 0 else rows[finite]
    return float(kept.min()), float(kept.max())
