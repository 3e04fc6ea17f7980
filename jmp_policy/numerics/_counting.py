"""The first pass over a tensor: how many of its numbers are what, and its extremes, in one reduction.

Counters have 8 bits, four of them to a word, and a block has at most 255 numbers. To compare a tensor with an array of
thresholds instead wrote forty times as many bytes.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from ._blocks import split_blocks
from ._record import add_up_words, exponent_bias, mantissa_bits
from ._what_if import FloatFormat, Format

HISTOGRAM_BINS = 64
"""Bin 0 counts what is below `2.0**FIRST_EXPONENT` and not zero, the last one what is finite and at least `2.0**16`."""

FIRST_EXPONENT = -46
"""Bin `i` begins at `2.0**(FIRST_EXPONENT + i - 1)`."""

FIRST_COUNTS = 4
"""Times, zeros, nans and infinities come before the counts of formats."""

_LONGEST_BLOCK = 255
_LARGEST_COUNT = 2**32


class Counts(NamedTuple):
    """What the first pass found: the words of each count `(2, C)`, and the bits of the extremes, integers."""

    words: jax.Array
    most: jax.Array
    least: jax.Array


def count(magnitudes: jax.Array, formats: Sequence[Format], histogram: bool) -> Counts:
    """Counts the numbers of a tensor, given the bits of their magnitudes, an array of at least one axis and number."""
    dtype = np.dtype(np.float64 if magnitudes.dtype.itemsize == 8 else np.float32)
    blocks, axes = split_blocks(magnitudes, _LONGEST_BLOCK)
    infinity = _bits(np.inf, dtype)
    thresholds = _list_thresholds(formats, histogram, dtype)
    flags = [lax.le(blocks, lax.full_like(blocks, threshold)) for threshold in thresholds]
    words = _pack(flags, blocks) + (_pack_histogram(blocks, dtype) if histogram else [])
    is_zero, is_finite = flags[0], flags[1]
    most = lax.select(is_finite, blocks, lax.full_like(blocks, 0))
    least = lax.select(is_zero, lax.full_like(blocks, infinity), blocks)
    *words, most, least = _reduce_blocks([*words, most, least], axes)
    everything = tuple(range(most.ndim))
    least = lax.min(least, lax.full_like(least, infinity))  # where all are nan: a start does not count for one number
    return Counts(
        _combine(words, magnitudes.size, blocks.size, formats, histogram),
        lax.reduce(most, most.dtype.type(0), lax.max, everything),
        lax.reduce(least, infinity, lax.min, everything),
    )


def _list_thresholds(formats: Sequence[Format], histogram: bool, dtype: np.dtype) -> list[np.integer]:
    """The bits of what is compared: zero, the largest finite number, infinity, those of formats, the last bin's."""
    largest = float(np.finfo(dtype).max)
    floats = [each for each in formats if isinstance(each, FloatFormat)]
    values = [0.0, largest, np.inf, *(value for each in floats for value in each.find_thresholds(dtype))]
    thresholds = [_bits(value, dtype) for value in values]
    last_bin = _bits(2.0 ** (FIRST_EXPONENT + HISTOGRAM_BINS - 2), dtype)
    return [*thresholds, last_bin - last_bin.dtype.type(1)] if histogram else thresholds


def _bits(value: float, dtype: np.dtype) -> np.integer:
    return np.array([value], dtype).view(np.int64 if dtype.itemsize == 8 else np.int32)[0]


def _pack(flags: list[jax.Array], like: jax.Array) -> list[jax.Array]:
    """Words that count four flags each, one to a byte."""
    zero, *units = (lax.full_like(like, unit, np.uint32) for unit in (0, 1, 1 << 8, 1 << 16, 1 << 24))
    bytes_ = [lax.select(flag, units[i % 4], zero) for i, flag in enumerate(flags)]
    return [functools.reduce(lax.bitwise_or, bytes_[i : i + 4]) for i in range(0, len(bytes_), 4)]


def _pack_histogram(magnitudes: jax.Array, dtype: np.dtype) -> list[jax.Array]:
    """Words that count the bins, four to a word. Zeros are in bin 0, and the last bin is not counted here."""
    exponents = lax.convert_element_type(magnitudes >> magnitudes.dtype.type(mantissa_bits(dtype)), np.int32)
    bins = lax.max(exponents - np.int32(exponent_bias(dtype) + FIRST_EXPONENT - 1), np.int32(0))
    # A shift by 32 or more leaves zero, and so does one by less than zero, which is a large number here.
    shifts = lax.convert_element_type(bins << np.int32(3), np.uint32)
    one, width = lax.full_like(shifts, 1), lax.full_like(shifts, 32)
    words = [one << shifts]
    while len(words) < HISTOGRAM_BINS // 4:
        shifts = shifts - width
        words.append(one << shifts)
    return words


def _reduce_blocks(operands: list[jax.Array], axes: tuple[int, ...]) -> list[jax.Array]:
    """Adds up words, and takes the extremes, which are the last two operands."""
    *words, most, least = operands
    starts = [np.uint32(0)] * len(words) + [most.dtype.type(0), least.dtype.type(np.iinfo(least.dtype).max)]

    def add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        sums = [x + y for x, y in zip(a[:-2], b[:-2], strict=True)]
        return (*sums, lax.max(a[-2], b[-2]), lax.min(a[-1], b[-1]))

    return list(lax.reduce([*words, most, least], starts, add, axes))


def _combine(words: list[jax.Array], size: int, padded: int, formats: Sequence[Format], histogram: bool) -> jax.Array:
    """The words of each count `(2, C)`, from the packed words of blocks."""
    packed = lax.concatenate(words, 0)
    bytes_ = [(packed >> np.uint32(8 * i)) & np.uint32(255) for i in range(4)]
    zeros, add = [np.uint32(0)] * 4, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
    constants = np.array([padded, padded - size, 1, 0], np.uint64)
    plus, minus = _list_differences(len(words), tuple(formats), histogram)
    if padded < _LARGEST_COUNT:
        raw = [*lax.reduce(bytes_, zeros, add, tuple(range(1, packed.ndim))), constants.astype(np.uint32)]
        raw = lax.concatenate(raw, 0)
        low = _take(raw, plus) - _take(raw, minus)
        return _stack(low, lax.full_like(low, 0))
    # Each slice of the first axis alone has few enough numbers.
    slices = lax.concatenate(lax.reduce(bytes_, zeros, add, tuple(range(2, packed.ndim))), 0)
    sums = add_up_words(slices, lax.full_like(slices, 0), (1,))
    halves = (constants.astype(np.uint32), (constants >> np.uint64(32)).astype(np.uint32))
    low, high = (lax.concatenate([part, half], 0) for part, half in zip(sums, halves, strict=True))
    borrow = lax.convert_element_type(lax.lt(_take(low, plus), _take(low, minus)), np.uint32)
    return _stack(_take(low, plus) - _take(low, minus), _take(high, plus) - _take(high, minus) - borrow)


def _take(x: jax.Array, indices: tuple[int, ...]) -> jax.Array:
    return x.at[np.array(indices)].get(mode="promise_in_bounds")


def _stack(low: jax.Array, high: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(low, (0,)), lax.expand_dims(high, (0,))], 0)


@functools.cache
def _list_differences(words: int, formats: tuple[Format, ...], histogram: bool) -> tuple[tuple[int, ...], ...]:
    """Of which two raw counts each column is the difference.

    A flag is true up to its threshold. The raw counts are all first bytes of the words, all second ones, and so on, and
    then the number of numbers, that of those which fill the blocks, one and zero.
    """
    flag = lambda i: i % 4 * words + i // 4
    everything, filling, one, nothing = (4 * words + i for i in range(4))
    is_zero, is_finite, is_number = map(flag, range(3))
    columns = [(one, nothing), (is_zero, filling), (everything, is_number), (is_number, is_finite)]
    flags = 3
    for each in formats:
        if isinstance(each, FloatFormat):
            to_zero, to_subnormal, to_finite = map(flag, range(flags, flags + 3))
            columns += [(to_zero, is_zero), (to_subnormal, to_zero), (is_finite, to_finite)]
            flags += 3
        else:
            columns += [(nothing, nothing)] * 3
    if histogram:
        below_last, first_word = flag(flags), words - HISTOGRAM_BINS // 4
        bins = [i % 4 * words + first_word + i // 4 for i in range(HISTOGRAM_BINS - 1)]
        columns += [(bins[0], is_zero), *((each, nothing) for each in bins[1:]), (is_finite, below_last)]
    plus, minus = zip(*columns, strict=True)
    return plus, minus
