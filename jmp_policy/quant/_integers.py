"""Rounding to integers: symmetric 8 bits, and asymmetric 4 bits, two to a byte."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INT8_MAX = 127
UINT4_MAX = 15

# The smallest normal number. A row of zeros needs a scale that can divide, and one of subnormals a scale that
# backends which flush them do not lose.
_TINY = float(np.finfo(np.float32).tiny)


class Quantized(NamedTuple):
    """Integers and what they are multiples of: `(values - zero_point) * scale`, without a zero point if `None`."""

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None


def symmetric(x: jax.Array, amax: jax.Array) -> Quantized:
    """The nearest of 255 multiples of `amax / 127`, ties to even.

    Args:
      x: floating, any shape.
      amax: float32, broadcastable to `x`: what becomes 127; larger numbers are clipped to it. Where it is not finite,
        neither is the scale, nor anything made of these integers: they hold no nan and no infinity of their own.

    Returns:
      int8 values of the shape of `x`, and a float32 scale of the shape of `amax`.

    Source: Jacob et al., CVPR 2018, section 2.1, with the zero point at 0 and the range narrowed to ±127.

    >>> values, scale, _ = symmetric(jnp.array([1.0, -2.0, 0.5]), jnp.array([2.0]))
    >>> values.tolist(), scale.tolist()
    ([64, -127, 32], [0.015748031437397003])
    """
    # By a product: XLA divides by a constant inside of a jit, and by an argument outside, with other last bits.
    scale = jnp.maximum(amax * np.float32(1 / INT8_MAX), _TINY)
    values = lax.clamp(-float(INT8_MAX), _nearest(x.astype(jnp.float32) / scale), float(INT8_MAX))
    return Quantized(values.astype(jnp.int8), scale)


def bounds(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest number over some axes, and zero; float32, infinite where a number is not finite."""
    x = x.astype(jnp.float32)
    is_nan = jnp.isnan(x)  # on CPUs a float32 `min` or `max` of some thousand numbers loses a nan, but no infinity
    low = jnp.min(lax.select(is_nan, lax.full_like(x, -jnp.inf), x), axis=axes, keepdims=True)
    high = jnp.max(lax.select(is_nan, lax.full_like(x, jnp.inf), x), axis=axes, keepdims=True)
    return jnp.minimum(low, 0), jnp.maximum(high, 0)


def asymmetric(x: jax.Array, low: jax.Array, high: jax.Array) -> Quantized:
    """The nearest of 16 numbers from `low` to `high`, one of which is zero.

    Args:
      x: floating, any shape.
      low: float32, broadcastable to `x`, at most 0.
      high: as `low`, at least 0. Where either is not finite, the scale is not. A range without zero would put the zero
        point outside of 4 bits, and decode a block of one sign wrong.

    Returns:
      uint8 values from 0 to 15 of the shape of `x`; a float32 scale and a uint8 zero point of the shape of `low`.

    Source: Jacob et al., CVPR 2018, section 2.1.

    >>> values, scale, zero = asymmetric(jnp.array([1.0, 3.0, 2.0]), jnp.array([0.0]), jnp.array([3.0]))
    >>> values.tolist(), zero.tolist()
    ([5, 15, 10], [0])
    """
    # Halved first: the width may overflow; and halving is exact, so that a fused multiply-add rounds nothing less.
    scale = jnp.maximum((high * 0.5 - low * 0.5) * np.float32(2 / UINT4_MAX), _TINY)
    zero_point = lax.clamp(0.0, _nearest(-low / scale), float(UINT4_MAX))
    values = lax.clamp(0.0, _nearest(x.astype(jnp.float32) / scale) + zero_point, float(UINT4_MAX))
    return Quantized(values.astype(jnp.uint8), scale, zero_point.astype(jnp.uint8))


def packed(values: jax.Array, axis: int) -> jax.Array:
    """Numbers of 4 bits two to a byte, the first in the low half; an odd axis ends with a half that is empty.

    >>> packed(jnp.array([1, 2, 3], jnp.uint8), 0).tolist()
    [33, 3]
    """
    axis %= values.ndim
    if values.shape[axis] % 2:
        values = jnp.pad(values, [(0, int(i == axis)) for i in range(values.ndim)])
    pairs = values.reshape(*values.shape[:axis], -1, 2, *values.shape[axis + 1 :])
    low, high = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return low | (high << 4)


def unpacked(packed: jax.Array, axis: int, length: int) -> jax.Array:
    """The numbers of 4 bits that `packed` put two to a byte.

    >>> unpacked(jnp.array([33, 3], jnp.uint8), 0, 3).tolist()
    [1, 2, 3]
    """
    axis %= packed.ndim
    pairs = jnp.stack([packed & 15, packed >> 4], axis + 1)
    values = pairs.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])
    return values if values.shape[axis] == length else lax.slice_in_dim(values, 0, length, axis=axis)


def _nearest(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
