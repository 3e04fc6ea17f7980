"""Blocks of a tensor, and the squared errors of a cast to other number formats."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from .._base import at_least_float32
from ..policy import NumberFormat
from ._stats_record import add_together, add_up, bits_like, bits_of, exponent_bias, mantissa_bits


def upcast_exactly(x: jax.Array) -> jax.Array:
    """Converts a tensor to float32, or leaves it in float64, with its subnormal numbers."""
    if x.dtype != jax.numpy.bfloat16:
        return lax.convert_element_type(x, at_least_float32(x.dtype))
    # A conversion may flush subnormal numbers.
    bits = lax.convert_element_type(lax.bitcast_convert_type(x, np.uint16), np.uint32)
    return lax.bitcast_convert_type(bits << np.uint32(16), np.float32)


def split_blocks(x: jax.Array, length: int, *, keeps_last: bool = False) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits the last axes into blocks of at most `length` elements, padded with zeros where needed.

    Axes are never joined, and those before the split stay, so that a sharded tensor is not moved. With `keeps_last`,
    the last axis stays too: a TPU then adds up whole vectors, and compiles in one second instead of forty.
    Returns the tensor with a leading axis of length 1, and the axes of a block.

    >>> blocks, axes = split_blocks(jax.numpy.ones((8, 512, 4, 16)), 255)
    >>> blocks.shape, axes
    ((1, 8, 256, 2, 4, 16), (3, 4, 5))
    >>> blocks, axes = split_blocks(jax.numpy.ones((8, 512, 4, 16)), 255, keeps_last=True)
    >>> blocks.shape, axes
    ((1, 8, 16, 32, 4, 16), (3, 4))
    """
    if keeps_last and x.ndim == 1:
        x = lax.expand_dims(x, (0,))
    shape = x.shape
    first = end = x.ndim - keeps_last
    while first and shape[first - 1] <= length:
        first -= 1
        length //= shape[first]
    if first and length > 1:
        shape, end = (*shape[: first - 1], *_split_axis(shape[first - 1], length), *shape[first:]), end + 1
        missing = math.prod(shape) // (x.size // x.shape[first - 1]) - x.shape[first - 1]
        if missing:
            widths = [(0, missing if axis == first - 1 else 0, 0) for axis in range(x.ndim)]
            x = lax.pad(x, x.dtype.type(0), widths)
    return lax.reshape(x, (1, *shape)), tuple(range(first + 1, end + 1))


def _split_axis(axis: int, length: int) -> tuple[int, int]:
    """Returns the number and length of the blocks of an axis; their product may exceed its length."""
    divisor = max(size for size in range(1, length + 1) if axis % size == 0)
    if 2 * divisor >= length:
        return axis // divisor, divisor
    blocks = -(-axis // length)
    return blocks, -(-axis // blocks)


Sums = tuple[jax.Array, jax.Array]
"""High and low parts of sums, `(S,)` each."""


def add_squares(blocks: jax.Array, axes: tuple[int, ...], most: jax.Array, formats: Sequence[NumberFormat]) -> Sums:
    """Adds up squares, and the squared errors of casts to each format, without and with the best power of two as scale.

    Returns twice the sum of squares and a sum for each format: first without scales, then with them. Their units
    differ: see `convert_units`. Blocks are short, since a block is summed in the dtype of its elements.
    """
    grid = _make_grid(most, formats, blocks.dtype)
    # The axis of sums stands before the axes of a block, so that a core reads a block once for all sums.
    row, count = axes[0], 1 + len(formats)
    shape = (*blocks.shape[:row], count, *blocks.shape[row:])
    # XLA:CPU fuses a reduction of two operands, and materializes the operand of a reduction of one.
    squares = []
    for half in (slice(count), slice(count, None)):
        spread = lambda x, half=half: lax.broadcast_in_dim(x[half], shape, (row,))
        x = lax.broadcast_in_dim(blocks, shape, [axis for axis in range(len(shape)) if axis != row])
        # Units differ by row, since XLA would materialize the operands that all rows share.
        x = read_units(x, spread(grid.units))
        errors = _round_to_grid(x, spread(grid.steps), spread(grid.floors), spread(grid.ceilings)) - x
        squares.append(errors * errors)
    sums = lax.concatenate(add_together(squares, tuple(axis + 1 for axis in axes)), row)
    return add_up(sums, lax.full_like(sums, 0), tuple(axis for axis in range(sums.ndim) if axis != row))


def convert_units(sums: Sums, most: jax.Array, formats: Sequence[NumberFormat]) -> Sums:
    """Converts the sums to units of `4**find_exponent(most)`."""
    high, low = sums
    units = _make_grid(most, formats, high.dtype).squared_units
    return high * units, low * units


def find_exponent(most: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the exponent of magnitudes, given their bits, less one: its power of two and the inverse are normal."""
    fields = lax.convert_element_type(most >> most.dtype.type(mantissa_bits(dtype)), np.int32)
    return fields - np.int32(exponent_bias(dtype) + 1)


def read_units(x: jax.Array, units: jax.Array) -> jax.Array:
    """Returns magnitudes times `units`, and zero where they are not finite."""
    x = lax.abs(x * units)
    return lax.select(lax.lt(x, lax.full_like(x, np.inf)), x, lax.full_like(x, 0))


class _Grid(NamedTuple):
    """The numbers of a format, a row per sum."""

    units: jax.Array  # factors of magnitudes
    # Added to the bits of an element's power of two. The last bit of the result is the last bit of the format.
    steps: np.ndarray
    floors: jax.Array  # the bits of that result for subnormal elements
    ceilings: jax.Array  # the largest number
    squared_units: jax.Array  # factors of the sums of squares, for units that all rows share


def _make_grid(most: jax.Array, formats: Sequence[NumberFormat], dtype: np.dtype) -> _Grid:
    """Scales the numbers of formats to a tensor.

    The best scale moves the largest magnitude into the last binade of the format, or one below if it exceeds the
    largest number there. The rows are those of `add_squares`: where squares are added up, zero is the only value of the
    format.
    """
    width, bias, exponent = mantissa_bits(dtype), exponent_bias(dtype), find_exponent(most, dtype)
    one, never = bits_like((1.0,), dtype)[0], -4 * bias
    # A format with as many bits loses nothing.
    kept = [never if each.mantissa_bits >= width else width - each.mantissa_bits for each in formats]
    largest = [never, *(each.max_exponent for each in formats)] * 2
    digits = [never, *kept] * 2
    smallest = [never, *(each.min_exponent for each in formats)] * 2
    mantissas = [1.0, *(each.max / 2.0**each.max_exponent for each in formats)] * 2
    is_scaled = np.array([*[False] * (2 + len(formats)), *[True] * len(formats)])
    bounds = np.where(is_scaled, mantissas, np.inf).astype(dtype)
    mantissa = lax.bitcast_convert_type((most & (most.dtype.type(1 << width) - 1)) | one, dtype)  # between 1 and 2
    is_larger = lax.gt(lax.broadcast(mantissa, bounds.shape), bounds)
    room = lax.broadcast(np.int32(bias - 1) - exponent, bounds.shape)  # at the end of a dtype the largest may saturate
    lowered = lax.min(lax.convert_element_type(is_larger, np.int32), room)
    # Exponents of units, floors, ceilings and squared units, shifted by the exponent of the tensor or by its scale.
    none = np.zeros_like(is_scaled)
    powers = np.array([none, np.add(digits, smallest), largest, none], np.int32)
    own = np.array([none, *[np.array(largest) - 1] * 2, none], np.int32)
    is_own = np.stack([none, is_scaled, is_scaled, ~none])
    moved = lax.select(is_own, own, lax.broadcast(exponent, own.shape))
    weights = np.repeat(np.array([[1], [0], [0], [-2]], np.int32), is_scaled.size, 1)
    moved += lax.broadcast(lowered, (4,)) * weights
    fields = lax.clamp(np.int32(1), powers - moved + np.int32(bias), np.int32(2 * bias))
    fractions = bits_like(mantissas, dtype) - one
    below = np.stack([fractions * 0, fractions * 0, fractions, fractions * 0])
    bits = (lax.convert_element_type(fields, most.dtype) << most.dtype.type(width)) | below
    # Without the barrier XLA recomputes `bits` for each row, and compiles for longer.
    bits = lax.optimization_barrier(bits)
    units, floors, ceilings, squared_units = (lax.index_in_dim(bits, i, keepdims=False) for i in range(4))
    as_floats = lambda bits: lax.bitcast_convert_type(bits, dtype)
    steps = np.maximum(digits, -2 * bias).astype(most.dtype) << width
    return _Grid(as_floats(units), steps, floors, as_floats(ceilings), as_floats(squared_units))


def _round_to_grid(x: jax.Array, steps: jax.Array, floors: jax.Array, ceilings: jax.Array) -> jax.Array:
    """Rounds to the nearest number of a grid, ties to even, and clips to the largest.

    Adding a number whose last bit is the last bit of the format rounds away all smaller bits.
    """
    binades = bits_of(x) & bits_like((np.inf,), x.dtype)[0]
    large = lax.bitcast_convert_type(lax.max(binades + steps, floors), x.dtype)
    return lax.min((x + large) - large, ceilings)
