"""The second pass over a tensor: its squares, and the squared errors of casting it to each format.

All is in units near the largest magnitude, so that no square overflows and none that counts vanishes.
Numbers are rounded by hand: XLA may drop a cast and back, and on CPUs casts to float8 are slow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from ._record import add_up, bits_like, bits_of, exponent_bias, mantissa_bits
from ._what_if import FloatFormat


class Sums(NamedTuple):
    """The high and low parts of sums, `(S,)`."""

    high: jax.Array
    low: jax.Array


def add_squares(blocks: jax.Array, axes: tuple[int, ...], most: jax.Array, formats: Sequence[FloatFormat]) -> Sums:
    """Adds up squares, and the squared errors of casts to each format, without and with the best power of two as scale.

    Args:
      blocks: a float32 or float64 tensor, as `split_blocks` splits it, with a first axis of length 1.
      axes: those of a block.
      most: the bits of the largest finite magnitude, an integer.
      formats: floating formats alone.

    Returns:
      The sums, first that of squares, then two for each format, each in units of its own: `convert_units` knows them.
    """
    exponent = find_exponent(most, blocks.dtype)
    grid = _make_grid(most, exponent, formats, blocks.dtype)
    # A row per sum, next to the numbers of a block, which a core therefore reads once for all of them.
    row = axes[0]
    shape = (*blocks.shape[:row], 1 + 2 * len(formats), *blocks.shape[row:])
    spread = lambda x: lax.broadcast_in_dim(x, shape, (row,))
    x = lax.broadcast_in_dim(blocks, shape, [axis for axis in range(len(shape)) if axis != row])
    # The first operation differs by row: XLA would write down what the rows have in common.
    x = read_units(x, spread(grid.units))
    errors = _round(x, grid.steps, grid.floors, grid.ceilings, row) - x
    squares = errors * errors
    # In two parts from the start: alone, a sum of squares is a product to XLA:CPU, which writes its operands down.
    parts = add_up(squares, lax.full_like(squares, 0), tuple(axis + 1 for axis in axes))
    high, low = add_up(*parts, tuple(axis for axis in range(parts[0].ndim) if axis != row))
    return Sums(high, low)


def convert_units(sums: Sums, most: jax.Array, formats: Sequence[FloatFormat]) -> Sums:
    """The same sums in units of `4**find_exponent(most)`."""
    dtype = sums.high.dtype
    units = _make_grid(most, find_exponent(most, dtype), formats, dtype).squared_units
    return Sums(sums.high * units, sums.low * units)


def find_exponent(most: jax.Array, dtype: np.dtype) -> jax.Array:
    """The binade below that of magnitudes, given their bits, as int32: its power of two and the inverse are normal."""
    fields = lax.convert_element_type(most >> most.dtype.type(mantissa_bits(dtype)), np.int32)
    return fields - np.int32(exponent_bias(dtype) + 1)


def read_units(x: jax.Array, units: jax.Array) -> jax.Array:
    """Magnitudes as multiples of an inverse of `units`, and zero where they are not finite."""
    x = lax.abs(x * units)
    return lax.select(lax.lt(x, lax.full_like(x, np.inf)), x, lax.full_like(x, 0))


class _Grid(NamedTuple):
    """The numbers of a format, a row per sum.

    Attributes:
      units: what magnitudes are multiplied by.
      steps: what is added to the bits of a number's binade, for the number whose last digit is the format's.
      floors: the bits of that number for subnormal numbers.
      ceilings: the largest number.
      squared_units: what makes a sum of squares one in units of all rows.
    """

    units: jax.Array
    steps: np.ndarray
    floors: jax.Array
    ceilings: jax.Array
    squared_units: jax.Array


def _make_grid(most: jax.Array, exponent: jax.Array, formats: Sequence[FloatFormat], dtype: np.dtype) -> _Grid:
    """Places the numbers of formats on the scale of a tensor.

    With the best scale the largest magnitude is in the format's last binade, or in the one below if it is too large for
    it. The first row is for the squares: with no number but zero, each is an error of its own size.
    """
    width, bias = mantissa_bits(dtype), exponent_bias(dtype)
    never = -4 * bias
    largest, digits, smallest, mantissas = [never], [never], [never], [1.0]
    for each in formats:
        # Nothing is lost to a format of as many digits.
        largest += [each.max_exponent] * 2
        digits += [never if each.mantissa_bits >= width else width - each.mantissa_bits] * 2
        smallest += [each.min_exponent] * 2
        mantissas += [each.max / 2.0**each.max_exponent] * 2
    is_scaled = np.array([False, *[False, True] * len(formats)])
    bounds = np.where(is_scaled, mantissas, np.inf).astype(dtype)
    is_larger = lax.gt(lax.broadcast(_read_mantissa(most, dtype), bounds.shape), bounds)
    room = lax.broadcast(np.int32(bias - 1) - exponent, bounds.shape)  # at the end of a dtype the largest may saturate
    lowered = lax.min(lax.convert_element_type(is_larger, np.int32), room)
    # Units, floors, ceilings and squared units at once, as powers of two that the tensor moves, or its scale.
    none = np.zeros_like(is_scaled)
    powers = np.array([none, np.add(digits, smallest), largest, none], np.int32)
    own = np.array([none, *[np.array(largest) - 1] * 2, none], np.int32)
    is_own = np.stack([none, is_scaled, is_scaled, ~none])
    moved = lax.select(is_own, own, lax.broadcast(exponent, own.shape))
    weights = np.repeat(np.array([[1], [0], [0], [-2]], np.int32), is_scaled.size, 1)
    moved += lax.broadcast(lowered, (4,)) * weights
    fields = lax.clamp(np.int32(1), powers - moved + np.int32(bias), np.int32(2 * bias))
    fractions = bits_like(mantissas, dtype) - bits_like((1.0,), dtype)
    below = np.stack([fractions * 0, fractions * 0, fractions, fractions * 0])
    bits = (lax.convert_element_type(fields, most.dtype) << most.dtype.type(width)) | below
    # Otherwise XLA computes each row of it anew, and compiles for longer.
    bits = lax.optimization_barrier(bits)
    units, floors, ceilings, squared_units = (lax.index_in_dim(bits, i, keepdims=False) for i in range(4))
    as_floats = lambda bits: lax.bitcast_convert_type(bits, dtype)
    steps = np.maximum(digits, -2 * bias).astype(most.dtype) << width
    return _Grid(as_floats(units), steps, floors, as_floats(ceilings), as_floats(squared_units))


def _read_mantissa(most: jax.Array, dtype: np.dtype) -> jax.Array:
    """The digits of a number, given its bits, from 1 to 2."""
    one = bits_like((1.0,), dtype)[0]
    return lax.bitcast_convert_type((most & (most.dtype.type(1 << mantissa_bits(dtype)) - 1)) | one, dtype)


def _round(x: jax.Array, steps: np.ndarray, floors: jax.Array, ceilings: jax.Array, row: int) -> jax.Array:
    """Rounds to the nearest number of a grid, ties to even, and to the largest where it is above.

    A sum of `x` and a number so large that its last digit is the format's has no room for more digits.
    """
    spread = lambda y: lax.broadcast_in_dim(y, x.shape, (row,))
    binades = bits_of(x) & bits_like((np.inf,), x.dtype)[0]
    large = lax.bitcast_convert_type(lax.max(binades + spread(steps), spread(floors)), x.dtype)
    return lax.min((x + large) - large, spread(ceilings))
