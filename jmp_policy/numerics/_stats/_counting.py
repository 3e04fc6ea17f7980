"""Finds the extremes of a tensor, and counts its elements by magnitude."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from ._record import add_together, add_up_words, bits_like, bits_of, exponent_bias, power_of_two
from ._what_if import FloatFormat, Format, split_blocks

HISTOGRAM_BINS = 64
"""Bin 0 counts elements below `2.0**FIRST_EXPONENT` except zeros, the last bin all finite ones from `2.0**16` on."""

FIRST_EXPONENT = -46
"""Bin `i` begins at `2.0**(FIRST_EXPONENT + i - 1)`."""

FIRST_COUNTS = 4
"""Times, zeros, nans and infinities come before the counts of formats."""

_LARGEST_COUNT = 2**32
_LARGEST_SUM, _BLOCK = 2**16, 4096  # squares that are added up in a row, and those of a block of a larger tensor


class Extremes(NamedTuple):
    """Exact measurements of a tensor, all scalars: the compiler makes a kernel of each array that is put together.

    Attributes:
      low: uint32, the numbers of zeros, nans and infinities.
      high: the high words of these numbers.
      most: the bits of the largest finite magnitude, an integer.
      least: the bits of the smallest nonzero magnitude, or of infinity.
      squares: the sums of squares of small, medium and large magnitudes: see `join_squares`.
    """

    low: list[jax.Array]
    high: list[jax.Array]
    most: jax.Array
    least: jax.Array
    squares: list[jax.Array]


def find_extremes(x: jax.Array) -> Extremes:
    """Measures a float32 or float64 tensor of any shape in one pass."""
    # Blocks, because a float that adds up millions of squares in a row loses digits.
    is_large = x.size > _LARGEST_SUM
    blocks, axes = split_blocks(x, _BLOCK) if is_large else (x, tuple(range(x.ndim)))
    magnitudes = _read_magnitudes(blocks)
    infinity, zero = (lax.full_like(magnitudes, each) for each in bits_like((np.inf, 0), x.dtype))
    flags = lax.eq(magnitudes, zero), lax.gt(magnitudes, infinity), lax.eq(magnitudes, infinity)
    most = lax.select(lax.lt(magnitudes, infinity), magnitudes, zero)
    # A nan is above infinity, and XLA leaves out the start of a reduction of one element.
    least = lax.select(flags[0], infinity, lax.min(magnitudes, infinity))
    counts, squares = [lax.convert_element_type(each, np.uint32) for each in flags], _list_squares(blocks, magnitudes)
    starts = [*[np.uint32(0)] * 3, *[x.dtype.type(0)] * 3, *bits_like((0, np.inf), x.dtype)]
    found = lax.reduce([*counts, *squares, most, least], starts, _join_extremes, axes)
    high = [lax.full_like(each, 0, shape=()) for each in found[:3]]
    if is_large:
        of_blocks, rest = found, tuple(range(found[0].ndim))
        found = lax.reduce(of_blocks, starts, _join_extremes, rest)
        if x.size >= _LARGEST_COUNT:
            words = [add_up_words(each, lax.full_like(each, 0), rest) for each in of_blocks[:3]]
            found[:3], high = map(list, zip(*words, strict=True))
        padding = np.array(blocks.size - x.size, np.uint32)
        high[0] -= lax.convert_element_type(lax.lt(found[0], padding), np.uint32)
        found[0] -= padding
    return Extremes(found[:3], high, found[-2], found[-1], found[3:-2])


def make_empty_extremes(dtype: np.dtype) -> Extremes:
    """Returns the measurements of no elements."""
    most, least = map(jax.numpy.asarray, bits_like((0, np.inf), dtype))
    zeros, sums = ([jax.numpy.zeros((), each)] * 3 for each in (np.uint32, dtype))
    return Extremes(zeros, zeros, most, least, sums)


def join_squares(squares: Sequence[jax.Array], exponent: jax.Array) -> jax.Array:
    """Returns the sum of all squares in units of `4**exponent`, where `find_exponent` made the exponent."""
    dtype = squares[0].dtype
    factors = [power_of_two(np.int32(-2) * (exponent + np.int32(shift)), dtype) for _, _, shift in _list_ranges(dtype)]
    return functools.reduce(lax.add, map(lax.mul, squares, factors))


def _list_squares(x: jax.Array, magnitudes: jax.Array) -> list[jax.Array]:
    """Returns the squares of small, medium and large elements, in units in which no sum overflows or vanishes.

    Source: Blue, A portable Fortran program to find the Euclidean norm of a vector, 1978.
    """
    squares, zeros = [], lax.full_like(x, 0)
    for first, end, shift in _list_ranges(x.dtype):
        bounds = (lax.full_like(magnitudes, each) for each in bits_like((first, end), x.dtype))
        is_inside = lax.ge(magnitudes, next(bounds)) & lax.lt(magnitudes, next(bounds))
        scaled = lax.select(is_inside, x * x.dtype.type(2.0**shift), zeros)
        squares.append(scaled * scaled)
    return squares


def _list_ranges(dtype: np.dtype) -> list[tuple[float, float, int]]:
    """Returns ranges of magnitudes, each with the exponent of its scale. 2**32 squares of a range do not overflow."""
    bias = exponent_bias(dtype)
    most, least = (bias + 1 - 32) // 2, -20
    return [
        (0.0, 2.0**least, most - least),
        (2.0**least, 2.0**most, 0),
        (2.0**most, np.inf, most - bias - 1),
    ]


def count_losses(blocks: jax.Array, axes: tuple[int, ...], formats: Sequence[Format], histogram: bool) -> jax.Array:
    """Counts the losses in each format and the elements of each bin, uint32 words `(2, C)`.

    `split_blocks` made the blocks. Neither its padding nor a nan is counted. The counts of block-scaled formats are 0.
    """
    thresholds = _list_thresholds(tuple(formats), histogram, blocks.dtype)
    plus, minus = _list_differences(tuple(formats), histogram)
    # The axis of thresholds stands before the axes of a block, so that a core reads a block once for all thresholds.
    # XLA:CPU fuses a reduction of two operands, and materializes the operand of a reduction of one.
    row, width = axes[0], -(-len(thresholds) // 2)
    shape = (*blocks.shape[:row], width, *blocks.shape[row:])
    x = _read_magnitudes(blocks)
    x = lax.broadcast_in_dim(x, shape, [axis for axis in range(len(shape)) if axis != row])
    halves = np.resize(thresholds, (2, width))
    flags = [
        lax.convert_element_type(lax.le(x, lax.broadcast_in_dim(half, shape, (row,))), np.uint32) for half in halves
    ]
    below = lax.concatenate(add_together(flags, tuple(axis + 1 for axis in axes)), row)
    low, high = _add_up_words(below, tuple(axis for axis in range(below.ndim) if axis != row))
    borrow = lax.convert_element_type(lax.lt(_take(low, plus), _take(low, minus)), np.uint32)
    return _stack(_take(low, plus) - _take(low, minus), _take(high, plus) - _take(high, minus) - borrow)


def count_flags(flags: jax.Array) -> jax.Array:
    """Returns the number of true flags, in two words."""
    ones = lax.convert_element_type(flags, np.uint32)
    rows = lax.reduce(ones, np.uint32(0), lax.add, (flags.ndim - 1,))
    return _stack(*_add_up_words(rows, tuple(range(rows.ndim))))


def _read_magnitudes(x: jax.Array) -> jax.Array:
    """Returns the bits of magnitudes, subnormal ones too, which have the order of the magnitudes."""
    bits = bits_of(x)
    return bits & bits.dtype.type(np.iinfo(bits.dtype).max)


def _join_extremes(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    sums = [x + y for x, y in zip(a[:-2], b[:-2], strict=True)]
    return [*sums, lax.max(a[-2], b[-2]), lax.min(a[-1], b[-1])]


@functools.cache
def _list_thresholds(formats: tuple[Format, ...], histogram: bool, dtype: np.dtype) -> np.ndarray:
    """Returns the bits of zero, the largest finite number, the thresholds of formats, and the ends of bins."""
    floats = [each for each in formats if isinstance(each, FloatFormat)]
    values = [0.0, np.finfo(dtype).max, *(value for each in floats for value in each.find_thresholds(dtype))]
    if histogram:
        ends = [dtype.type(2.0 ** (FIRST_EXPONENT + i)) for i in range(HISTOGRAM_BINS - 1)]
        values += [np.nextafter(end, dtype.type(0)) for end in ends]
    return bits_like(values, dtype)


@functools.cache
def _list_differences(formats: tuple[Format, ...], histogram: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns, for each count, the two thresholds whose numbers of elements it is the difference of."""
    is_zero, is_finite, found = 0, 1, 2
    columns = []
    for each in formats:
        if isinstance(each, FloatFormat):
            to_zero, to_subnormal, to_finite = range(found, found + 3)
            columns += [(to_zero, is_zero), (to_subnormal, to_zero), (is_finite, to_finite)]
            found += 3
        else:
            columns += [(is_zero, is_zero)] * 3
    if histogram:
        bins = [is_zero, *range(found, found + HISTOGRAM_BINS - 1), is_finite]
        columns += zip(bins[1:], bins[:-1], strict=True)
    plus, minus = zip(*columns, strict=True) if columns else ((), ())
    return plus, minus


def _add_up_words(counts: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Sums counts of 32 bits over axes, into two words."""
    zeros = lax.full_like(counts, 0)
    return add_up_words(counts, zeros, axes) if axes else (counts, zeros)


def _take(x: jax.Array, indices: tuple[int, ...]) -> jax.Array:
    return x.at[np.array(indices, np.int32)].get(mode="promise_in_bounds")


def _stack(first: jax.Array, second: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(each, (0,)) for each in (first, second)], 0)
