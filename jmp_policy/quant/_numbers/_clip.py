"""Which range of a weight the integers span: all of it, or the part that serves most of its elements best."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._numbers import Quantized, measure_amax, measure_bounds, quantize_asymmetric, quantize_symmetric

Clip = Any
"""`"absmax"`, `"mse"`, or a percentile: a number in (0, 100]."""

_FRACTIONS = tuple(1 - 0.02 * i for i in range(26))
"""The parts of the whole range that `"mse"` tries, from all of it to half."""


def choose_peak(x: jax.Array, axes: tuple[int, ...], clip: Clip) -> jax.Array:
    """Chooses the magnitude that becomes the largest integer, over some axes.

    Args:
      x: floating.
      axes: what shares one; they stay with length 1.
      clip: `"absmax"`, `"mse"`, or a percentile of the magnitudes.

    Raises:
      ValueError: `clip` is none of these.
    """
    whole = measure_amax(x, axes)
    match check_clip(clip):
        case "absmax":
            return whole
        case "mse":
            return _find_best_fraction(x, axes, lambda fraction: quantize_symmetric(x, whole * fraction)) * whole
        case percentile:
            clipped = jnp.percentile(jnp.abs(x.astype(jnp.float32)), percentile, axis=axes, keepdims=True)
            return jnp.where(jnp.isfinite(whole), clipped, whole)


def choose_bounds(x: jax.Array, axes: tuple[int, ...], clip: Clip) -> tuple[jax.Array, jax.Array]:
    """Chooses the numbers that become the least and the greatest integer; arguments as for `choose_peak`."""
    low, high = measure_bounds(x, axes)
    match check_clip(clip):
        case "absmax":
            return low, high
        case "mse":
            fraction = _find_best_fraction(
                x, axes, lambda fraction: quantize_asymmetric(x, low * fraction, high * fraction)
            )
            return low * fraction, high * fraction
        case percentile:
            limit = choose_peak(x, axes, percentile)
            return jnp.maximum(low, -limit), jnp.minimum(high, limit)


def check_clip(clip: Clip) -> Clip:
    """Checks a way to choose a range, and returns it.

    Raises:
      ValueError: it is not valid.
    """
    is_percentile = isinstance(clip, int | float) and not isinstance(clip, bool) and 0 < clip <= 100
    if clip in ("absmax", "mse") or is_percentile:
        return clip
    raise ValueError(f"clip is 'absmax', 'mse' or a percentile in (0, 100], got {clip!r}. For example: clip=99.9.")


def _find_best_fraction(x: jax.Array, axes: tuple[int, ...], quantized: Callable[[jax.Array], Quantized]) -> jax.Array:
    """Finds the fraction of the range with the least mean square error, for all numbers that share one."""
    wide = x.astype(jnp.float32)

    def error(fraction: jax.Array) -> jax.Array:
        values, scale, zero_point = quantized(fraction)
        numbers = values.astype(jnp.float32) - (0 if zero_point is None else zero_point.astype(jnp.float32))
        return jnp.mean((numbers * scale - wide) ** 2, axis=axes, keepdims=True)

    fractions = jnp.array(_FRACTIONS, jnp.float32)
    errors = jax.lax.map(error, fractions)  # one after the other: a copy of the weight for each would not fit
    return fractions[jnp.argmin(errors, axis=0)]
