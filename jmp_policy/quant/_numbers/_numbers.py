"""Integers and floating-point numbers of 8 and 4 bits, their scales, and where to clip."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def measure_amax(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Measures the largest magnitude: infinity where a number is not finite, and zero for an empty array.

    Args:
      x: floating, any shape.
      axes: the axes to reduce, which stay with length 1; by default all axes, to a scalar.

    Returns:
      float32.

    >>> measure_amax(jnp.array([[1.0, -3.0], [jnp.nan, 0.0]]), (1,)).tolist()
    [[3.0], [inf]]
    """
    # A nan becomes an infinity first: on CPUs XLA's float32 `max` of some thousand numbers loses a nan.
    magnitudes = lax.select(jnp.isnan(x), lax.full_like(x, jnp.inf), jnp.abs(x))
    least = None if x.size else 0
    return jnp.max(magnitudes, axis=axes, keepdims=axes is not None, initial=least).astype(jnp.float32)


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


def quantize_symmetric(x: jax.Array, amax: jax.Array) -> Quantized:
    """Rounds to the nearest of 255 multiples of `amax / 127`, ties to even.

    Args:
      x: floating, any shape.
      amax: float32, broadcastable to `x`: what becomes 127; larger numbers are clipped to it. Where it is not finite,
        neither is the scale, nor anything made of these integers: they hold no nan and no infinity of their own.

    Returns:
      int8 values of the shape of `x`, and a float32 scale of the shape of `amax`.

    Source: Jacob et al., CVPR 2018, section 2.1, with the zero point at 0 and the range narrowed to ±127.

    >>> values, scale, _ = quantize_symmetric(jnp.array([1.0, -2.0, 0.5]), jnp.array([2.0]))
    >>> values.tolist(), scale.tolist()
    ([64, -127, 32], [0.015748031437397003])
    """
    # By a product: XLA divides by a constant inside of a jit, and by an argument outside, with other last bits.
    scale = jnp.maximum(amax * np.float32(1 / INT8_MAX), _TINY)
    values = lax.clamp(np.float32(-INT8_MAX), _round_to_nearest(x.astype(jnp.float32) / scale), np.float32(INT8_MAX))
    return Quantized(values.astype(jnp.int8), scale)


def measure_bounds(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Measures the least and the greatest number over some axes and zero; float32, infinite where one is not finite."""
    x = x.astype(jnp.float32)
    is_nan = jnp.isnan(x)  # on CPUs a float32 `min` or `max` of some thousand numbers loses a nan, but no infinity
    low = jnp.min(lax.select(is_nan, lax.full_like(x, -jnp.inf), x), axis=axes, keepdims=True)
    high = jnp.max(lax.select(is_nan, lax.full_like(x, jnp.inf), x), axis=axes, keepdims=True)
    return jnp.minimum(low, 0), jnp.maximum(high, 0)


def quantize_asymmetric(x: jax.Array, low: jax.Array, high: jax.Array) -> Quantized:
    """Rounds to the nearest of 16 numbers from `low` to `high`; one of the 16 is zero.

    Args:
      x: floating, any shape.
      low: float32, broadcastable to `x`, at most 0.
      high: as `low`, at least 0. Where either is not finite, the scale is not. A range without zero would put the zero
        point outside of 4 bits, and decode a block of one sign wrong.

    Returns:
      uint8 values from 0 to 15 of the shape of `x`; a float32 scale and a uint8 zero point of the shape of `low`.

    Source: Jacob et al., CVPR 2018, section 2.1.

    >>> values, scale, zero = quantize_asymmetric(jnp.array([1.0, 3.0, 2.0]), jnp.array([0.0]), jnp.array([3.0]))
    >>> values.tolist(), zero.tolist()
    ([5, 15, 10], [0])
    """
    # Halved first: the width may overflow; and halving is exact, so that a fused multiply-add rounds nothing less.
    scale = jnp.maximum((high * 0.5 - low * 0.5) * np.float32(2 / UINT4_MAX), _TINY)
    least, most = np.float32(0), np.float32(UINT4_MAX)  # Python floats would be float64 under jax_enable_x64
    zero_point = lax.clamp(least, _round_to_nearest(-low / scale), most)
    values = lax.clamp(least, _round_to_nearest(x.astype(jnp.float32) / scale) + zero_point, most)
    return Quantized(values.astype(jnp.uint8), scale, zero_point.astype(jnp.uint8))


def pack(values: jax.Array, axis: int) -> jax.Array:
    """Packs numbers of 4 bits two to a byte, the first in the low half; an odd axis ends with an empty half.

    >>> pack(jnp.array([1, 2, 3], jnp.uint8), 0).tolist()
    [33, 3]
    """
    axis %= values.ndim
    if values.shape[axis] % 2:
        values = jnp.pad(values, [(0, int(i == axis)) for i in range(values.ndim)])
    pairs = values.reshape(*values.shape[:axis], -1, 2, *values.shape[axis + 1 :])
    low, high = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return low | (high << 4)


def unpack(packed: jax.Array, axis: int, length: int) -> jax.Array:
    """Unpacks the numbers of 4 bits that `pack` put two to a byte.

    >>> unpack(jnp.array([33, 3], jnp.uint8), 0, 3).tolist()
    [1, 2, 3]
    """
    axis %= packed.ndim
    pairs = jnp.stack([packed & 15, packed >> 4], axis + 1)
    values = pairs.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])
    return values if values.shape[axis] == length else lax.slice_in_dim(values, 0, length, axis=axis)


def _round_to_nearest(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


E4M3 = np.dtype(jnp.float8_e4m3fn)
"""For inputs and weights: 3 bits of mantissa, up to 448."""
E5M2 = np.dtype(jnp.float8_e5m2)
"""For the gradients of outputs: 2 bits of mantissa, up to 57344."""


class Scaled(NamedTuple):
    """Numbers of an 8-bit format, and what they are multiples of.

    Attributes:
      values: e4m3 or e5m2.
      scale: float32, a scalar, or of the axes of `values` with length 1 on those that share one; not finite where
        a number that went in was not, which clipping would hide.
    """

    values: jax.Array
    scale: jax.Array


def compute_current_scale(amax: jax.Array, dtype: np.dtype, margin: int) -> jax.Array:
    """Computes the scale by which `amax` becomes the largest number of a format, or `2**margin` below it.

    For zeros the scale is tiny, so that they stay zeros. Where `amax` is not finite, neither is the scale, and the
    product is nan.

    Args:
      amax: float32 of any shape, of the numbers that are scaled.
      dtype: e4m3 or e5m2.
      margin: the room to leave.
    """
    return jnp.maximum(amax / _largest_number(dtype, margin), _TINY)


def compute_scale(amax: jax.Array, otherwise: jax.Array | float, dtype: np.dtype, margin: int) -> jax.Array:
    """Computes the scale that the largest magnitude of earlier steps makes, as `compute_current_scale` does.

    Args:
      amax: float32 of any shape.
      otherwise: the scale where `amax` is zero or not finite, a scalar.
      dtype: e4m3 or e5m2.
      margin: the room to leave.

    Source: `compute_scale` of NVIDIA's Transformer Engine, whose scales are the reciprocals of these. Flax and Keras
    order the operations in the same way, so that the scales agree in every bit.
    """
    usable = (amax > 0) & jnp.isfinite(amax)
    return jnp.maximum(1 / select(usable, _largest_number(dtype, margin) / amax, 1 / otherwise), _TINY)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def saturate(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Casts `x / scale` to an 8-bit format, clipped to its largest number: beyond 448 a cast to e4m3 gives nan.

    Args:
      x: floating.
      scale: float32, a scalar or broadcastable to `x`.
      dtype: e4m3 or e5m2.

    Raises:
      TypeError: it is differentiated, which happens where the derivative of a product is differentiated once more.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3.1 (saturation).
    """
    limit = _largest_number(dtype)
    return lax.clamp(-limit, x.astype(jnp.float32) / scale, limit).astype(dtype)


@saturate.defjvp
def _refuse_derivative(dtype: np.dtype, primals: Any, tangents: Any) -> Any:
    """Raises an error: JAX would cast the tangents to 8 bits without a scale, and make nan of them or lose a third."""
    raise TypeError(
        "A product in 8-bit floating point has a first derivative, and no second one. For example, give layers that "
        "are differentiated twice the policy 'mixed_bfloat16'."
    )


def select(which: jax.Array, x: jax.Array, otherwise: jax.Array | float) -> jax.Array:
    """`jnp.where` without the function that each of its calls adds to a program."""
    return lax.select(which, x, lax.full_like(x, otherwise))


def _largest_number(dtype: np.dtype, margin: int = 0) -> np.float32:
    return np.float32(jnp.finfo(dtype).max) / np.float32(2.0**margin)


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
