"""The second pass over a tensor: its squares, and the squared errors of casting it to each format.

All is in units of the binade of the largest magnitude, so that no square overflows and none that counts vanishes.
Numbers are rounded by hand: XLA may drop a cast and back, and on CPUs casts to float8 are slow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from ._blocks import split_blocks
from ._record import add_up, exponent_bias, mantissa_bits, power_of_two
from ._what_if import FloatFormat

_LONGEST_BLOCK = 1024

_NEVER = -(2**20)  # an exponent below all others


class Sums(NamedTuple):
    """Sums in units of `4**exponent`, an int32 scalar: the high and low parts, `(S,)`."""

    exponent: jax.Array
    high: jax.Array
    low: jax.Array


def add_squares(magnitudes: jax.Array, most: jax.Array, formats: Sequence[FloatFormat]) -> Sums:
    """Adds up squares, and the squared errors of casts to each format, without and with the best power of two as scale.

    Args:
      magnitudes: the bits of magnitudes; at least one axis and number.
      most: the bits of the largest finite one.
      formats: floating formats alone.
    """
    dtype = float_dtype(magnitudes)
    exponent = find_exponent(most, dtype)
    blocks, axes = split_blocks(read_units(magnitudes, exponent, dtype), _LONGEST_BLOCK)
    grid = _make_grid(most, exponent, formats, dtype)
    # A row per sum, next to the numbers of a block, which a core therefore reads once for all of them.
    rows, row = grid.ceilings.size, axes[0]
    shape = (*blocks.shape[:row], rows, *blocks.shape[row:])
    x = lax.broadcast_in_dim(blocks, shape, [axis for axis in range(len(shape)) if axis != row])
    steps, floors, ceilings = (lax.broadcast_in_dim(each, shape, (row,)) for each in grid)
    errors = _round(x, steps, floors, ceilings) - x
    squares = errors * errors
    high, low = add_up(squares, lax.full_like(squares, 0), tuple(axis + 1 for axis in axes))
    return Sums(exponent, *add_up(high, low, tuple(range(row))))


def float_dtype(bits: jax.Array) -> np.dtype:
    """The floats that bits stand for."""
    return np.dtype(np.float64 if bits.dtype.itemsize == 8 else np.float32)


def find_exponent(most: jax.Array, dtype: np.dtype) -> jax.Array:
    """The binade of magnitudes, given their bits, as int32; below the last one, whose inverse is not normal."""
    fields = lax.convert_element_type(most >> most.dtype.type(mantissa_bits(dtype)), np.int32)
    return lax.min(fields - np.int32(exponent_bias(dtype)), np.int32(exponent_bias(dtype) - 1))


def read_units(magnitudes: jax.Array, exponent: jax.Array, dtype: np.dtype) -> jax.Array:
    """Magnitudes in units of `2**exponent`, zero where they are not finite or subnormal."""
    unsigned = np.uint64 if dtype.itemsize == 8 else np.uint32
    least, infinity = (np.array(bound, dtype).view(magnitudes.dtype)[()] for bound in (np.finfo(dtype).tiny, np.inf))
    above = lax.bitcast_convert_type(magnitudes - least, unsigned)
    is_normal = lax.lt(above, unsigned(infinity - least))
    bits = lax.select(is_normal, magnitudes, lax.full_like(magnitudes, 0))
    unit = power_of_two(lax.neg(exponent), dtype)
    return lax.bitcast_convert_type(bits, dtype) * unit


class _Grid(NamedTuple):
    """The numbers of a format, a row per sum.

    Attributes:
      steps: what is added to the bits of a number's binade, for the number whose last digit is the format's.
      floors: the bits of that number for subnormal numbers.
      ceilings: the largest number.
    """

    steps: jax.Array
    floors: jax.Array
    ceilings: jax.Array


def _make_grid(most: jax.Array, exponent: jax.Array, formats: Sequence[FloatFormat], dtype: np.dtype) -> _Grid:
    """The first row is for the squares: with no number but zero, each is an error of its own size."""
    width, bias = mantissa_bits(dtype), exponent_bias(dtype)
    integer = most.dtype.type
    largest, steps, floors, mantissas = [0], [_NEVER], [_NEVER], [0.0]
    for each in formats:
        is_exact = each.mantissa_bits >= width
        largest.append(each.max_exponent)
        steps.append(_NEVER if is_exact else width - each.mantissa_bits)
        floors.append(_NEVER if is_exact else width - each.mantissa_bits + each.min_exponent)
        mantissas.append(each.max / 2.0**each.max_exponent)
    twice = lambda values, kind: np.array([values[0], *(v for value in values[1:] for v in (value, value))], kind)
    mantissas_, largest_ = twice(mantissas, dtype), twice(largest, np.int32)
    is_scaled = np.array([False, *(flag for _ in formats for flag in (False, True))])
    # With the best scale the largest magnitude is in the format's last binade, or in the one below if it is too large.
    mantissa = lax.bitcast_convert_type(
        (most & integer((1 << width) - 1)) | np.array(1, dtype).view(most.dtype)[()], dtype
    )
    rows = (mantissas_.size,)
    is_too_large = lax.gt(lax.broadcast(mantissa, rows), mantissas_)
    scaled = largest_ - lax.convert_element_type(is_too_large, np.int32)
    exponents = lax.select(is_scaled, scaled, lax.broadcast(exponent, rows))
    fields = lax.clamp(np.int32(0), twice(floors, np.int32) + np.int32(bias) - exponents, np.int32(2 * bias))
    return _Grid(
        jax.numpy.asarray(np.maximum(twice(steps, np.int64), -bias - 2).astype(most.dtype) << width),
        lax.convert_element_type(fields, most.dtype) << integer(width),
        lax.mul(mantissas_, power_of_two(lax.sub(largest_, exponents), dtype)),
    )


def _round(x: jax.Array, steps: jax.Array, floors: jax.Array, ceilings: jax.Array) -> jax.Array:
    """Rounds to the nearest number of a grid, ties to even, and to the largest where it is above.

    A sum of `x` and a number so large that its last digit is the format's has no room for more digits.
    """
    binade = lax.bitcast_convert_type(x, steps.dtype) & steps.dtype.type(
        np.array(np.inf, x.dtype).view(steps.dtype)[()]
    )
    large = lax.bitcast_convert_type(lax.max(binade + steps, floors), x.dtype)
    return lax.min((x + large) - large, ceilings)
