"""Rounding to integers and float8, their scales, and clipping ranges.

XLA fuses some of these steps well in different forms on different platforms:

- H100: the kernel of an int8 matmul cannot fuse scales that the same program computes, and would write float32 sums.
  They are rounded to bfloat16 before the scales, behind a barrier. Magnitudes are compared as integers, because XLA
  may write the `select` of a nan to memory before its maximum.
- TPU: both scales fuse into the matmul, and the integer form writes more.
- CPU: XLA merges a bfloat16 matmul into float32 with a transpose of its operand or result, and then may have no kernel
  ("Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32", jax 0.10.2 and 0.12). Barriers prevent that.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import keep_rounding
from ..policy import find_format


def measure_amax(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Returns the largest magnitude in float32, over `axes` (kept) or all: infinite for a nan, zero for no elements."""
    # XLA's float32 `max` over a few thousand elements loses a nan on CPUs, so nans become infinities first.
    magnitudes = lax.select(jnp.isnan(x), lax.full_like(x, jnp.inf), jnp.abs(x))
    least = None if x.size else 0
    return jnp.max(magnitudes, axis=axes, keepdims=axes is not None, initial=least).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=1, inline=True)  # eager calls then compile the branches once
def measure_row_amax(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the largest magnitude over `axes`, as `measure_amax` does."""
    by_bits, by_select = functools.partial(_measure_by_bits, axes=axes), functools.partial(measure_amax, axes=axes)
    return lax.platform_dependent(x, cuda=by_bits, default=by_select)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def measure_rows(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns an array to quantize, and its largest magnitude over `axes`, as `measure_row_amax` does.

    On CPUs the array has infinities for nans: XLA fuses them into the op that makes `x`, but not into a maximum.
    """

    def hide_nan(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = lax.select(jnp.isnan(x), lax.full_like(x, jnp.inf), x)
        least = None if x.size else 0
        return x, jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=least).astype(jnp.float32)

    return lax.platform_dependent(x, cpu=hide_nan, default=lambda x: (x, measure_row_amax(x, axes)))


def _measure_by_bits(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Compares magnitudes by their bits, where a nan is larger than infinity."""
    if not x.size:
        return measure_amax(x, axes)
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    amax = lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=True), jnp.float32)
    return lax.select(jnp.isnan(amax), lax.full_like(amax, jnp.inf), amax)


@functools.partial(jax.jit, inline=True)
def narrow_sums(sums: jax.Array) -> jax.Array:
    """Rounds float32 sums to bfloat16 and back on CUDA; the output is then rounded twice (at most 2**-7)."""
    return lax.platform_dependent(sums, cuda=_round_behind_barrier, default=lambda sums: sums)


def _round_behind_barrier(sums: jax.Array) -> jax.Array:
    return lax.optimization_barrier(sums.astype(jnp.bfloat16)).astype(jnp.float32)


@functools.partial(jax.jit, inline=True)
def fence_on_cpu(arrays: Any) -> Any:
    """On CPU, inserts a barrier so that XLA does not fuse the producers of `arrays` into their consumer."""
    return lax.platform_dependent(arrays, cpu=lax.optimization_barrier, default=lambda arrays: arrays)


INT8_MAX = find_format(np.dtype(np.int8)).max
UINT4_MAX = 15

# A row of zeros needs a nonzero scale, and a row of subnormals a scale that no backend flushes to zero.
_TINY = float(np.finfo(np.float32).tiny)


class Quantized(NamedTuple):
    """Integers, or values of e4m3 or `NORMAL_FLOAT`, that stand for `(values - zero_point) * scale`."""

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None


def quantize_symmetric(x: jax.Array, amax: jax.Array) -> Quantized:
    """Rounds to the nearest of 255 multiples of `amax / 127`, ties to even, as int8 with a float32 scale.

    `amax` (float32, broadcastable to `x`) becomes 127 and larger magnitudes are clipped. A non-finite `amax` gives a
    non-finite scale, because the integers cannot represent it.

    Source: Jacob et al., CVPR 2018, section 2.1, with the zero point at 0 and the range symmetric.
    """
    # Multiplied: XLA divides by a constant under `jit` and by an argument outside, with different last bits.
    scale = jnp.maximum(amax * np.float32(1 / INT8_MAX), _TINY)
    values = lax.clamp(np.float32(-INT8_MAX), _round_to_integers(x.astype(jnp.float32) / scale), np.float32(INT8_MAX))
    return Quantized(values.astype(jnp.int8), scale)


def to_numbers(made: Quantized) -> jax.Array:
    """Returns the float32 numbers that integers stand for."""
    values = made.values.astype(jnp.float32)
    return (values if made.zero_point is None else values - made.zero_point.astype(jnp.float32)) * made.scale


def measure_bounds(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns minimum and maximum over axes and zero, as float32, infinite where an element is not finite."""
    x = x.astype(jnp.float32)
    is_nan = jnp.isnan(x)  # see measure_amax
    low = jnp.min(lax.select(is_nan, lax.full_like(x, -jnp.inf), x), axis=axes, keepdims=True)
    high = jnp.max(lax.select(is_nan, lax.full_like(x, jnp.inf), x), axis=axes, keepdims=True)
    return jnp.minimum(low, 0), jnp.maximum(high, 0)


def quantize_asymmetric(x: jax.Array, low: jax.Array, high: jax.Array) -> Quantized:
    """Rounds to the nearest of 16 values from `low` (at most 0) to `high` (at least 0), as uint8 from 0 to 15.

    Where a bound is not finite, the scale is not.

    Source: Jacob et al., CVPR 2018, section 2.1.
    """
    # Halved first, because the width may overflow. Halving is exact, so a fused multiply-add changes nothing.
    scale = jnp.maximum((high * 0.5 - low * 0.5) * np.float32(2 / UINT4_MAX), _TINY)
    least, most = np.float32(0), np.float32(UINT4_MAX)  # Python floats would be float64 under jax_enable_x64
    zero_point = lax.clamp(least, _round_to_integers(-low / scale), most)
    values = lax.clamp(least, _round_to_integers(x.astype(jnp.float32) / scale) + zero_point, most)
    return Quantized(values.astype(jnp.uint8), scale, zero_point.astype(jnp.uint8))


def _round_to_integers(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


# Quantiles of a normal distribution, and zero, in units of the largest magnitude: appendix E of the paper.
NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def quantize_normal(x: jax.Array, amax: jax.Array) -> Quantized:
    """Rounds `x / amax` to the nearest of 16 values; returns their places in `NORMAL_FLOAT` as uint8.

    A midpoint is rounded down. `amax` (float32) is broadcastable to `x`; where it is not finite, the scale is not.

    Source: Dettmers et al., QLoRA, NeurIPS 2023, section 3.
    """
    scale = jnp.maximum(amax, _TINY)
    fraction = x.astype(jnp.float32) / scale
    midpoints = [np.float32((low + high) / 2) for low, high in itertools.pairwise(NORMAL_FLOAT)]
    is_above = [(fraction > midpoint).astype(jnp.uint8) for midpoint in midpoints]
    return Quantized(sum(is_above[1:], is_above[0]), scale)


def read_normal(places: jax.Array) -> jax.Array:
    """Returns the values of places in `NORMAL_FLOAT` as float32."""
    # By selections, which fuse, and not by a gather of a constant array.
    values: list[Any] = [np.float32(value) for value in NORMAL_FLOAT]
    for bit in range(4):
        is_odd = (places >> bit) & 1 == 1
        values = [jnp.where(is_odd, odd, even) for even, odd in zip(values[::2], values[1::2], strict=True)]
    return values[0]


FLOAT8_E4M3 = np.dtype(jnp.float8_e4m3fn)  # inputs and weights: up to 448
FLOAT8_E5M2 = np.dtype(jnp.float8_e5m2)  # gradients of outputs: up to 57344


class Scaled(NamedTuple):
    values: jax.Array  # e4m3 or e5m2
    scale: jax.Array  # float32, broadcastable to values; non-finite where the input was, which clipping would hide


def compute_current_scale(amax: jax.Array, dtype: np.dtype, margin: int) -> jax.Array:
    """Returns the scale that maps `amax` to the largest value of `dtype`, divided by `2**margin`."""
    return jnp.maximum(amax / _largest_number(dtype, margin), _TINY)


def compute_scale(amax: jax.Array, otherwise: jax.Array | float, dtype: np.dtype, margin: int) -> jax.Array:
    """Like `compute_current_scale`, for the amax of earlier steps; `otherwise` for a zero or non-finite amax.

    Source: `compute_scale` of NVIDIA's Transformer Engine, whose scales are reciprocals. Flax and Keras order the ops
    in the same way, so the scales agree bit for bit.
    """
    usable = (amax > 0) & jnp.isfinite(amax)
    return jnp.maximum(1 / select(usable, _largest_number(dtype, margin) / amax, 1 / otherwise), _TINY)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def saturate(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Casts `x / scale` to float8, clipped to the largest value of `dtype`: a cast to e4m3 beyond 448 gives nan."""
    limit = _largest_number(dtype)
    return keep_rounding(lax.clamp(-limit, x.astype(jnp.float32) / scale, limit).astype(dtype))


@saturate.defjvp
def _refuse_float8_derivative(dtype: np.dtype, primals: Any, tangents: Any) -> Any:
    """Raises: JAX would cast tangents to float8 without a scale."""
    raise TypeError(
        "Float8 matmuls have no second derivative. For example, give layers that are differentiated twice the policy "
        "'mixed_bfloat16'."
    )


def quantize_e4m3(x: jax.Array, amax: jax.Array) -> Quantized:
    """Rounds `x / scale` to the nearest e4m3 value, ties to even; the float32 scale maps `amax` to 448.

    `amax` (float32) is broadcastable to `x`. A non-finite `amax` gives a non-finite scale.
    """
    scale = jnp.maximum(amax * np.float32(1 / _largest_number(FLOAT8_E4M3)), _TINY)  # multiplied: see above
    return Quantized(saturate(x, scale, FLOAT8_E4M3), scale)


def select(which: jax.Array, x: jax.Array, otherwise: jax.Array | float) -> jax.Array:
    """Like `jnp.where`, but without adding a function to the jaxpr at each call."""
    return lax.select(which, x, lax.full_like(x, otherwise))


def _largest_number(dtype: np.dtype, margin: int = 0) -> np.float32:
    return np.float32(find_format(dtype).max) / np.float32(2.0**margin)


Clip = Any
"""`"absmax"`, `"mse"`, or a percentile: a number in (0, 100]."""

_FRACTIONS = tuple(1 - 0.02 * i for i in range(26))  # of the range, for "mse"


def choose_peak(x: jax.Array, axes: tuple[int, ...], clip: Clip) -> jax.Array:
    """Returns the magnitude, per slice over `axes`, that becomes the largest integer."""
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
    """Returns the values that become the smallest and the largest integer; arguments as for `choose_peak`."""
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
    """Returns `clip`, or raises if it is not valid."""
    is_percentile = isinstance(clip, int | float) and not isinstance(clip, bool) and 0 < clip <= 100
    if clip in ("absmax", "mse") or is_percentile:
        return clip
    raise ValueError(f"clip is 'absmax', 'mse' or a percentile in (0, 100], got {clip!r}. For example: clip=99.9.")


def _find_best_fraction(x: jax.Array, axes: tuple[int, ...], quantized: Callable[[jax.Array], Quantized]) -> jax.Array:
    """Returns the fraction of the range with the least mean square error, per slice over `axes`."""
    wide = x.astype(jnp.float32)

    def error(fraction: jax.Array) -> jax.Array:
        return jnp.mean((to_numbers(quantized(fraction)) - wide) ** 2, axis=axes, keepdims=True)

    return choose_best(jnp.array(_FRACTIONS, jnp.float32), error)


def choose_best(candidates: jax.Array, measure: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns the candidate with the least error, for each element of an error."""
    errors = lax.map(measure, candidates)  # one by one: `vmap` would copy the weight for each candidate
    return candidates[jnp.argmin(errors, axis=0)]
