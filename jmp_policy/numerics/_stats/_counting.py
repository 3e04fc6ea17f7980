"""Counts the elements of a tensor by magnitude in one reduction, for floating formats and integers."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from ._record import add_up, add_up_words, bits_like, bits_of, exponent_bias, float_dtype, mantissa_bits, power_of_two
from ._what_if import FloatFormat, Format, IntegerFormat, find_exponent, read_units


class BlockErrors(NamedTuple):
    """Of one format.

    Attributes:
      lost: uint32 `(2, 3)`, the words of how many numbers that are not zero would be zero, subnormal, and clipped;
        integers have none of the last two.
      high: float `(2,)`, the squared errors with scales as they are and rounded up to a power of two, in units of
        `4**exponent` of the whole tensor.
      low: their low parts.
    """

    lost: jax.Array
    high: jax.Array
    low: jax.Array


def add_integer_errors(x: jax.Array, most: jax.Array, spec: IntegerFormat) -> BlockErrors:
    """Rounds a tensor to integers, block by block along its last axis, each in units of its own largest magnitude.

    Args:
      x: float32 or float64; at least one axis and number.
      most: the bits of the largest finite magnitude of all, an integer.
      spec: the format.
    """
    blocks = _split_last_axis(x, spec.block)
    dtype, last = x.dtype, blocks.ndim - 1
    magnitudes = bits_of(lax.abs(blocks))
    is_finite = lax.lt(magnitudes, lax.full_like(magnitudes, bits_like((np.inf,), dtype)[0]))
    magnitudes = lax.select(is_finite, magnitudes, lax.full_like(magnitudes, 0))
    amax = lax.expand_dims(lax.reduce(magnitudes, magnitudes.dtype.type(0), lax.max, (last,)), (last,))
    exponents = find_exponent(amax, dtype)
    units = power_of_two(lax.neg(exponents), dtype)
    spread = lambda x: lax.broadcast_in_dim(x, blocks.shape, tuple(range(blocks.ndim)))
    values = read_units(blocks, spread(units))
    # A block of zeros needs a scale that can divide.
    largest = read_units(lax.bitcast_convert_type(amax, dtype), units)
    scale = lax.max(largest * dtype.type(1 / spec.max), dtype.type(2.0**-20))
    codes = [_round_to_multiples(values, spread(each)) for each in (scale, _round_up_to_power(scale))]
    becomes_zero = lax.eq(codes[0], lax.full_like(codes[0], 0)) & lax.gt(magnitudes, lax.full_like(magnitudes, 0))
    weights = spread(power_of_two((exponents - find_exponent(most, dtype)) * np.int32(2), dtype))
    errors = [lax.expand_dims(code - values, (0,)) for code in codes]
    errors = lax.concatenate(errors, 0)
    squares = errors * errors * lax.broadcast_in_dim(weights, errors.shape, tuple(range(1, errors.ndim)))
    parts = add_up(squares, lax.full_like(squares, 0), (last + 1,))
    words = lax.expand_dims(count_flags(becomes_zero), (1,))
    lost = lax.pad(words, np.uint32(0), [(0, 0, 0), (0, 2, 0)])
    return BlockErrors(lost, *add_up(*parts, tuple(range(1, last + 1))))


def pad_last_axis(x: jax.Array, block: int) -> jax.Array:
    """Adds zeros behind the last axis, so that blocks divide it."""
    missing = -x.shape[-1] % block
    return lax.pad(x, x.dtype.type(0), [*[(0, 0, 0)] * (x.ndim - 1), (0, missing, 0)]) if missing else x


def _split_last_axis(x: jax.Array, block: int) -> jax.Array:
    length = min(block, x.shape[-1])
    x = pad_last_axis(x, length)
    return lax.reshape(x, (*x.shape[:-1], x.shape[-1] // length, length))


def _round_to_multiples(x: jax.Array, scale: jax.Array) -> jax.Array:
    return lax.round(x / scale, lax.RoundingMethod.TO_NEAREST_EVEN) * scale


def _round_up_to_power(scale: jax.Array) -> jax.Array:
    """The smallest power of two that is not below."""
    bits, digits = bits_of(scale), (1 << mantissa_bits(scale.dtype)) - 1
    return lax.bitcast_convert_type((bits + bits.dtype.type(digits)) & bits.dtype.type(~digits), scale.dtype)


def count_flags(flags: jax.Array) -> jax.Array:
    """How many flags are true, in two words."""
    ones = lax.convert_element_type(flags, np.uint32)
    last = (flags.ndim - 1,)
    rows = lax.reduce(ones, np.uint32(0), lax.add, last)
    words = add_up_words(rows, lax.full_like(rows, 0), tuple(range(rows.ndim)))
    return lax.concatenate([lax.expand_dims(word, (0,)) for word in words], 0)


HISTOGRAM_BINS = 64
"""Bin 0 counts what is below `2.0**FIRST_EXPONENT` and not zero, the last one what is finite and at least `2.0**16`."""

FIRST_EXPONENT = -46
"""Bin `i` begins at `2.0**(FIRST_EXPONENT + i - 1)`."""

FIRST_COUNTS = 4
"""Times, zeros, nans and infinities come before the counts of formats."""

_WIDTH, _PER_WORD = 10, 3  # of counters, and how many a word has
LONGEST_BLOCK = 2**_WIDTH - 1
"""What a counter holds."""

_LARGEST_COUNT = 2**32
_NO_BIN = -(2**20)


class Tally(NamedTuple):
    """What the first pass leaves: numbers that are few, and the same ones for every tensor.

    Attributes:
      low: the low 32 bits of what the counters of all words came to: as many arrays `(W,)` as a word has counters.
      high: the high 32 bits.
      sizes: uint32 `(2, 2)`, the words of how many numbers the blocks have, and of how many only fill them.
      most: unsigned `(W,)`, of which the first stands for the largest magnitude that is finite.
      least: the same for the smallest that is not zero.
      times: uint32, how often the tensor was measured: 1.
    """

    low: tuple[jax.Array | np.ndarray, ...]
    high: tuple[jax.Array | np.ndarray, ...]
    sizes: jax.Array | np.ndarray
    most: jax.Array
    least: jax.Array
    times: jax.Array | np.uint32


class Counts(NamedTuple):
    """What the first pass found.

    Attributes:
      words: uint32 `(2, C)`, the low and high words of each count.
      extremes: integers `(2,)`, the bits of the largest finite magnitude and of the smallest that is not zero.
    """

    words: jax.Array
    extremes: jax.Array


def count(blocks: jax.Array, axes: tuple[int, ...], size: int, formats: Sequence[Format], histogram: bool) -> Tally:
    """Counts the numbers of a tensor.

    Args:
      blocks: float32 or float64, as `split_blocks` splits a tensor, with a first axis of length 1.
      axes: those of a block, of at most `LONGEST_BLOCK` numbers.
      size: how many numbers the tensor has; zeros fill the blocks.
      formats: which casts to count the losses of; those of integers are left zero.
      histogram: whether to count exponents.
    """
    dtype = blocks.dtype
    # A row per word, next to the numbers of a block, which a core therefore reads once for all of them.
    words, row = _list_words(tuple(formats), histogram, dtype), axes[0]
    shape = (*blocks.shape[:row], len(words.offsets), *blocks.shape[row:])
    x = lax.broadcast_in_dim(bits_of(blocks), shape, [axis for axis in range(len(shape)) if axis != row])
    # The first operation differs by row: XLA would write down what the rows have in common.
    x &= lax.broadcast_in_dim(np.array(words.masks, x.dtype), shape, (row,))
    packed = _pack(x, words, row)
    # As unsigned numbers infinities and nan are the smallest when infinity is taken away, and zero is the largest when
    # one is.
    unsigned = _unsigned(dtype)
    bits = lax.bitcast_convert_type(x, unsigned)
    shifted = [bits - unsigned(_infinity(dtype)), bits - unsigned(1)]
    packed, most, least = _reduce([packed, *shifted], tuple(axis + 1 for axis in axes))
    return _add_up_counters(packed, most, least, row, size, blocks.size)


def fill_tally(formats: Sequence[Format], histogram: bool, dtype: np.dtype) -> Tally:
    """The tally of a tensor that has no numbers."""
    rows, unsigned = len(_list_words(tuple(formats), histogram, dtype).offsets), _unsigned(dtype)
    zeros = (lax.full((rows,), 0, np.uint32),) * _PER_WORD
    most, least = (lax.full((rows,), fill, unsigned) for fill in (0, np.iinfo(unsigned).max))
    return Tally(zeros, zeros, lax.full((2, 2), 0, np.uint32), most, least, lax.full((), 1, np.uint32))


def read_most(tally: Tally) -> jax.Array:
    """The bits of the largest finite magnitude, an integer."""
    unsigned, bits = tally.most.dtype.type, tally.most.dtype.itemsize * 8
    dtype = np.dtype(f"float{bits}")
    zero = unsigned(2**bits - _infinity(dtype))
    most = lax.max(lax.index_in_dim(tally.most, 0, keepdims=False), zero) + unsigned(_infinity(dtype))
    return lax.bitcast_convert_type(most, np.dtype(f"int{bits}"))


def read_counts(tally: Tally, formats: Sequence[Format], histogram: bool) -> Counts:
    """Reads the counts and extremes off a tally."""
    unsigned, bits = tally.least.dtype.type, tally.least.dtype.itemsize * 8
    infinity = unsigned(_infinity(np.dtype(f"float{bits}")))
    least = lax.min(lax.index_in_dim(tally.least, 0, keepdims=False), infinity - unsigned(1)) + unsigned(1)
    least = lax.bitcast_convert_type(least, np.dtype(f"int{bits}"))
    extremes = lax.concatenate([lax.expand_dims(each, (0,)) for each in (read_most(tally), least)], 0)
    # The raw counts are those of all counters, and four more that columns are differences of.
    nothing = lax.full((1,), 0, np.uint32)
    once = lax.expand_dims(tally.times, (0,))
    low = lax.concatenate([*tally.low, tally.sizes[:, 0], once, nothing], 0)
    high = lax.concatenate([*tally.high, tally.sizes[:, 1], nothing, nothing], 0)
    plus, minus = _list_differences(tally.most.shape[0], tuple(formats), histogram)
    borrow = lax.convert_element_type(lax.lt(_take(low, plus), _take(low, minus)), np.uint32)
    words = _stack(_take(low, plus) - _take(low, minus), _take(high, plus) - _take(high, minus) - borrow)
    return Counts(words, extremes)


class _Words(NamedTuple):
    """How each word counts, a row per word.

    Attributes:
      masks: which bits it looks at: those of magnitudes, of exponents, or none.
      thresholds: the bits up to which each of its counters counts numbers.
      offsets: the first bin that its counters count, or none.
    """

    masks: tuple[int, ...]
    thresholds: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]


@functools.cache
def _list_words(formats: tuple[Format, ...], histogram: bool, dtype: np.dtype) -> _Words:
    """Words for zero, the largest finite number, infinity and the thresholds of formats, then those of the bins."""
    floats = [each for each in formats if isinstance(each, FloatFormat)]
    values = [0.0, np.finfo(dtype).max, np.inf, *(value for each in floats for value in each.find_thresholds(dtype))]
    if histogram:  # up to the last bin: it has what is above and finite
        values.append(np.nextafter(dtype.type(2.0 ** (FIRST_EXPONENT + HISTOGRAM_BINS - 2)), dtype.type(0)))
    thresholds = bits_like(values, dtype).tolist()
    thresholds += [-1] * (-len(thresholds) % _PER_WORD)
    words = [tuple(thresholds[i : i + _PER_WORD]) for i in range(0, len(thresholds), _PER_WORD)]
    largest, exponent = np.iinfo(f"int{8 * dtype.itemsize}").max, int(bits_like((np.inf,), dtype)[0])
    # There is always a row that looks at other bits than the first one, if only to count nothing.
    bins, mask = (range(0, HISTOGRAM_BINS, _PER_WORD), exponent) if histogram else ([_NO_BIN], 0)
    return _Words(
        (*[largest for _ in words], *[mask for _ in bins]),
        (*words, *[(-1,) * _PER_WORD for _ in bins]),
        (*[_NO_BIN for _ in words], *bins),
    )


def _pack(x: jax.Array, words: _Words, row: int) -> jax.Array:
    """Words in which a number counts itself, in the counters of the thresholds that it is below and of its bin."""
    spread = lambda values, dtype: lax.broadcast_in_dim(np.array(values, dtype), x.shape, (row,))
    zero = lax.full_like(x, 0, np.uint32)
    dtype = float_dtype(x)
    exponents = lax.convert_element_type(x >> x.dtype.type(mantissa_bits(dtype)), np.int32)
    bins = lax.max(exponents - np.int32(exponent_bias(dtype) + FIRST_EXPONENT - 1), np.int32(0))
    # A shift by 32 or more leaves zero, and so does one by less than zero, which is a large number here; one by 30
    # leaves what no counter has.
    shifts = lax.bitcast_convert_type((bins - spread(words.offsets, np.int32)) * np.int32(_WIDTH), np.uint32)
    packed = lax.full_like(zero, 1) << shifts
    for i in range(_PER_WORD):
        is_below = lax.le(x, spread([thresholds[i] for thresholds in words.thresholds], x.dtype))
        packed |= lax.select(is_below, lax.full_like(zero, 1 << _WIDTH * i), zero)
    return packed


def _reduce(operands: list[jax.Array], axes: tuple[int, ...]) -> list[jax.Array]:
    """Adds up words, and takes the maximum of the last operand but one, and the minimum of the last one."""
    starts = [operand.dtype.type(0) for operand in operands]
    starts[-1] = operands[-1].dtype.type(np.iinfo(operands[-1].dtype).max)

    def add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        sums = [x + y for x, y in zip(a[:-2], b[:-2], strict=True)]
        return [*sums, lax.max(a[-2], b[-2]), lax.min(a[-1], b[-1])]

    return lax.reduce(operands, starts, add, axes)


def _add_up_counters(packed: jax.Array, most: jax.Array, least: jax.Array, row: int, size: int, padded: int) -> Tally:
    """The tally of a tensor, from the words of its blocks, whose axis `row` is that of words."""
    counters = [(packed >> np.uint32(_WIDTH * i)) & np.uint32(LONGEST_BLOCK) for i in range(_PER_WORD)]
    others = tuple(axis for axis in range(packed.ndim) if axis != row)
    sizes = np.array([[number % 2**32, number >> 32] for number in (padded, padded - size)], np.uint32)
    times = np.uint32(1)
    if padded < _LARGEST_COUNT or row == 1:  # with one block there are few
        *low, most, least = _reduce([*counters, most, least], others)
        high = (np.zeros(low[0].shape, np.uint32),) * _PER_WORD
        return Tally(tuple(low), high, sizes, most, least, times)
    # Each slice of the first axis of the tensor alone has few enough numbers.
    *slices, most, least = _reduce([*counters, most, least], tuple(axis for axis in others if axis != 1))
    pairs = [add_up_words(each, lax.full_like(each, 0), (0,)) for each in slices]
    most, least = _reduce([most, least], (0,))
    low, high = zip(*pairs, strict=True)
    return Tally(low, high, sizes, most, least, times)


def _unsigned(dtype: np.dtype) -> type:
    return np.dtype(f"uint{8 * dtype.itemsize}").type


def _infinity(dtype: np.dtype) -> int:
    return int(bits_like((np.inf,), dtype)[0])


def _take(x: jax.Array, indices: tuple[int, ...]) -> jax.Array:
    return x.at[np.array(indices)].get(mode="promise_in_bounds")


def _stack(low: jax.Array, high: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(low, (0,)), lax.expand_dims(high, (0,))], 0)


@functools.cache
def _list_differences(words: int, formats: tuple[Format, ...], histogram: bool) -> tuple[tuple[int, ...], ...]:
    """Of which two raw counts each column is the difference.

    A flag is true up to its threshold. The raw counts are all first counters of the words, all second ones, and so on,
    and then the number of numbers, that of those which fill the blocks, one and zero.
    """
    find = lambda i, first=0: i % _PER_WORD * words + first + i // _PER_WORD
    everything, filling, one, nothing = (_PER_WORD * words + i for i in range(4))
    is_zero, is_finite, is_number = map(find, range(3))
    columns = [(one, nothing), (is_zero, filling), (everything, is_number), (is_number, is_finite)]
    flags = 3
    for each in formats:
        if isinstance(each, FloatFormat):
            to_zero, to_subnormal, to_finite = map(find, range(flags, flags + 3))
            columns += [(to_zero, is_zero), (to_subnormal, to_zero), (is_finite, to_finite)]
            flags += 3
        else:
            columns += [(nothing, nothing)] * 3
    if histogram:
        below_last, first_word = find(flags), flags // _PER_WORD + 1
        bins = [find(i, first_word) for i in range(HISTOGRAM_BINS - 1)]
        columns += [(bins[0], is_zero), *((each, nothing) for each in bins[1:]), (is_finite, below_last)]
    plus, minus = zip(*columns, strict=True)
    return plus, minus
