"""Rounding of float32 to half precision: to nearest, stochastically, and with the remainder kept.

XLA for GPUs removes a conversion that is converted back at once (`xla_allow_excess_precision`), and the rounding with
it. It keeps `reduce_precision`, and conversions behind a barrier.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._dtypes import DTypeLike
from ._trees import PyTree

ROUNDING_SCOPE = "jmp_rounding"
"""The scope in which operands are rounded to a quantized format and back; not part of a module path."""

PRODUCT_SCOPE = "jmp_product"
"""The scope of the `cond` that chooses between forms of a half-precision matmul; not part of a module path."""

_SMALLEST_NORMAL_F16 = 2.0**-14
_SMALLEST_F16 = 2.0**-24


def keeps_small_updates(tree: PyTree) -> bool:
    """True if a tree holds the state of an optimizer that loses no small update of half-precision parameters."""
    is_marked = lambda node: hasattr(type(node), "KEEPS_SMALL_UPDATES")
    return any(map(is_marked, jax.tree.leaves(tree, is_leaf=is_marked)))


def round_as_float32(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds float32 to the nearest bfloat16 or float16 value, ties to even; the result is float32."""
    if np.dtype(dtype) == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    # reduce_precision flushes subnormal float16 values, which are multiples of the smallest one.
    subnormal = lax.round(x / _SMALLEST_F16, lax.RoundingMethod.TO_NEAREST_EVEN) * _SMALLEST_F16
    normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL_F16, subnormal, normal)


def round_to_half(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds like `round_as_float32`, and returns the half-precision dtype."""
    return round_as_float32(x, dtype).astype(dtype)


@functools.partial(jax.jit, inline=True)
def keep_rounding(x: jax.Array) -> jax.Array:
    """Returns `x`, whose cast down to its dtype XLA for GPUs then keeps, also if it is cast up again at once."""
    barrier = lax.optimization_barrier
    return lax.platform_dependent(x, cuda=barrier, rocm=barrier, default=lambda x: x)


def round_stochastically(x: jax.Array, dtype: DTypeLike, bits: jax.Array) -> jax.Array:
    """Rounds float32 stochastically to bfloat16 or float16, without bias; `bits` are random uint16.

    Source: Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015.
    """
    if np.dtype(dtype) == jnp.bfloat16:
        # A carry out of the low 16 bits is a step to the next bfloat16 away from zero.
        words = (lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)
        return lax.bitcast_convert_type(words, jnp.float32).astype(dtype)
    # The spacing is a power of two, so only the sum is inexact: it has 24 bits, 11 of them before the point.
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000), jnp.float32)
    spacing = jnp.maximum(power, _SMALLEST_NORMAL_F16) * 2.0**-10
    chance = (bits >> 3).astype(jnp.float32) * 2.0**-13
    neighbor = jnp.copysign(jnp.floor(jnp.abs(x) / spacing + chance) * spacing, x)
    return jnp.where(jnp.isfinite(x), neighbor, x).astype(dtype)


def split_float32(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits float32 into bfloat16 and the remaining 16 bits; `join_float32` restores the exact value."""
    # Rounded to nearest, ties away from zero: the 16 bits then tell on which side of the bfloat16 the value lies.
    words = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), jnp.uint32)
    # Both halves must read one array in memory. If XLA fused each with the producer of `x`, different fused
    # multiply-adds could give the halves of two different values.
    high, low = lax.platform_dependent(words, cpu=_split_in_loop, default=_split_behind_barrier)
    return lax.bitcast_convert_type(high, jnp.bfloat16), low


def _split_behind_barrier(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    words = lax.optimization_barrier(words)
    return ((words + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16), words.astype(jnp.uint16)


def _split_in_loop(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits on CPUs, where XLA drops barriers before it fuses, but fuses nothing into a loop."""
    # The loop writes over its input. One that makes both halves needs twice the memory.
    offsets = jnp.uint32([0x8000, 0])
    rounded = lax.fori_loop(0, 2, lambda i, words: words + offsets[i], words)
    return (rounded >> 16).astype(jnp.uint16), (rounded - jnp.uint32(0x8000)).astype(jnp.uint16)


def join_float32(high: jax.Array, low: jax.Array) -> jax.Array:
    """Joins `high` (bfloat16) and `low` (uint16) of `split_float32`.

    If `high` was changed since, the result is still within its last bit.
    """
    words = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
    # No float32 is rounded up to zero: a zero that replaced another value would become a nan.
    is_nonzero = (words << 1 != 0).astype(jnp.uint32)
    rounded_up = ((low >> 15).astype(jnp.uint32) & is_nonzero) << 16
    return lax.bitcast_convert_type(words + low.astype(jnp.uint32) - rounded_up, jnp.float32)
