"""First pass over a tensor: counts its elements by magnitude, and finds the extremes.

Three counters of 10 bits share a word, so that a comparison per threshold and one sum per word count a block. A plain
sum per threshold takes as long to run on a CPU, and twice as long to compile.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from ._record import add_up_words, bits_like, bits_of, exponent_bias, float_dtype, mantissa_bits
from ._what_if import FloatFormat, Format

HISTOGRAM_BINS = 64
"""Bin 0 counts elements below `2.0**FIRST_EXPONENT` except zeros, the last bin all finite ones from `2.0**16` on."""

FIRST_EXPONENT = -46
"""Bin `i` begins at `2.0**(FIRST_EXPONENT + i - 1)`."""

FIRST_COUNTS = 4
"""Times, zeros, nans and infinities come before the counts of formats."""

_WIDTH, _PER_WORD = 10, 3  # bits of a counter, and counters in a word
LONGEST_BLOCK = 2**_WIDTH - 1
"""The largest value of a counter."""

_LARGEST_COUNT = 2**32
_NO_BIN = -(2**20)


class Counters(NamedTuple):
    """Result of the first pass. Its shapes depend on the dtype alone, so that tensors can be stacked.

    Attributes:
      low: the low 32 bits of the sums of each counter over the words: an array `(W,)` per counter of a word.
      high: the high 32 bits.
      sizes: uint32 `(2, 2)`, the words of the number of elements with padding, and of the padding.
      most: unsigned `(W,)`; the first encodes the largest finite magnitude.
      least: unsigned `(W,)`; the first encodes the smallest nonzero magnitude.
      times: uint32, the number of measurements: 1.
    """

    low: tuple[jax.Array | np.ndarray, ...]
    high: tuple[jax.Array | np.ndarray, ...]
    sizes: jax.Array | np.ndarray
    most: jax.Array
    least: jax.Array
    times: jax.Array | np.uint32


def count(blocks: jax.Array, axes: tuple[int, ...], size: int, formats: Sequence[Format], histogram: bool) -> Counters:
    """Counts the elements of a float32 or float64 tensor that `split_blocks` split; `size` is without its padding."""
    dtype = blocks.dtype
    # The axis of words stands before the axes of a block, so that a core reads a block once for all words.
    words, row = _list_words(tuple(formats), histogram, dtype), axes[0]
    shape = (*blocks.shape[:row], len(words.offsets), *blocks.shape[row:])
    x = lax.broadcast_in_dim(bits_of(blocks), shape, [axis for axis in range(len(shape)) if axis != row])
    # Masks differ by word, since XLA would materialize the operands that all words share.
    x &= lax.broadcast_in_dim(np.array(words.masks, x.dtype), shape, (row,))
    packed = _pack(x, words, row)
    # Minus infinity, nan and infinities are the smallest unsigned numbers; minus one, zero is the largest.
    unsigned = _unsigned(dtype)
    bits = lax.bitcast_convert_type(x, unsigned)
    shifted = [bits - unsigned(_infinity(dtype)), bits - unsigned(1)]
    packed, most, least = _reduce([packed, *shifted], tuple(axis + 1 for axis in axes))
    return _add_up_counters(packed, most, least, row, size, blocks.size)


def count_nothing(formats: Sequence[Format], histogram: bool, dtype: np.dtype) -> Counters:
    """Returns the counters of a tensor without elements."""
    rows, unsigned = len(_list_words(tuple(formats), histogram, dtype).offsets), _unsigned(dtype)
    zeros = (lax.full((rows,), 0, np.uint32),) * _PER_WORD
    most, least = (lax.full((rows,), fill, unsigned) for fill in (0, np.iinfo(unsigned).max))
    return Counters(zeros, zeros, lax.full((2, 2), 0, np.uint32), most, least, lax.full((), 1, np.uint32))


def read_most(counters: Counters) -> jax.Array:
    """Returns the bits of the largest finite magnitude."""
    unsigned, bits = counters.most.dtype.type, counters.most.dtype.itemsize * 8
    dtype = np.dtype(f"float{bits}")
    zero = unsigned(2**bits - _infinity(dtype))
    most = lax.max(lax.index_in_dim(counters.most, 0, keepdims=False), zero) + unsigned(_infinity(dtype))
    return lax.bitcast_convert_type(most, np.dtype(f"int{bits}"))


def read_counts(counters: Counters, formats: Sequence[Format], histogram: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the words of all counts, uint32 `(2, C)`, and the bits of both extremes."""
    unsigned, bits = counters.least.dtype.type, counters.least.dtype.itemsize * 8
    infinity = unsigned(_infinity(np.dtype(f"float{bits}")))
    least = lax.min(lax.index_in_dim(counters.least, 0, keepdims=False), infinity - unsigned(1)) + unsigned(1)
    least = lax.bitcast_convert_type(least, np.dtype(f"int{bits}"))
    extremes = _stack(read_most(counters), least)
    nothing = lax.full((1,), 0, np.uint32)
    once = lax.expand_dims(counters.times, (0,))
    low = lax.concatenate([*counters.low, counters.sizes[:, 0], once, nothing], 0)
    high = lax.concatenate([*counters.high, counters.sizes[:, 1], nothing, nothing], 0)
    plus, minus = _list_differences(counters.most.shape[0], tuple(formats), histogram)
    borrow = lax.convert_element_type(lax.lt(_take(low, plus), _take(low, minus)), np.uint32)
    words = _stack(_take(low, plus) - _take(low, minus), _take(high, plus) - _take(high, minus) - borrow)
    return words, extremes


def count_flags(flags: jax.Array) -> jax.Array:
    """Returns the number of true flags, in two words."""
    ones = lax.convert_element_type(flags, np.uint32)
    rows = lax.reduce(ones, np.uint32(0), lax.add, (flags.ndim - 1,))
    return _stack(*add_up_words(rows, lax.full_like(rows, 0), tuple(range(rows.ndim))))


class _Words(NamedTuple):
    """The counters of each word.

    Attributes:
      masks: the bits that a word compares: of magnitudes, of exponents, or none.
      thresholds: the largest bits that each of its counters counts.
      offsets: the first bin that its counters count.
    """

    masks: tuple[int, ...]
    thresholds: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]


@functools.cache
def _list_words(formats: tuple[Format, ...], histogram: bool, dtype: np.dtype) -> _Words:
    """Returns words for zero, the largest finite number, infinity and thresholds of formats, then words for bins."""
    floats = [each for each in formats if isinstance(each, FloatFormat)]
    values = [0.0, np.finfo(dtype).max, np.inf, *(value for each in floats for value in each.find_thresholds(dtype))]
    if histogram:  # the last bin counts the finite elements above this threshold
        values.append(np.nextafter(dtype.type(2.0 ** (FIRST_EXPONENT + HISTOGRAM_BINS - 2)), dtype.type(0)))
    thresholds = bits_like(values, dtype).tolist()
    thresholds += [-1] * (-len(thresholds) % _PER_WORD)
    words = [tuple(thresholds[i : i + _PER_WORD]) for i in range(0, len(thresholds), _PER_WORD)]
    largest, exponent = np.iinfo(f"int{8 * dtype.itemsize}").max, int(bits_like((np.inf,), dtype)[0])
    # Masks must differ between words (see `count`), so without a histogram a word without bins is added.
    bins, mask = (range(0, HISTOGRAM_BINS, _PER_WORD), exponent) if histogram else ([_NO_BIN], 0)
    return _Words(
        (*[largest for _ in words], *[mask for _ in bins]),
        (*words, *[(-1,) * _PER_WORD for _ in bins]),
        (*[_NO_BIN for _ in words], *bins),
    )


def _pack(x: jax.Array, words: _Words, row: int) -> jax.Array:
    """Returns words whose counters are 1 for the bin of an element, and for the thresholds that it does not exceed."""
    spread = lambda values, dtype: lax.broadcast_in_dim(np.array(values, dtype), x.shape, (row,))
    zero = lax.full_like(x, 0, np.uint32)
    dtype = float_dtype(x)
    exponents = lax.convert_element_type(x >> x.dtype.type(mantissa_bits(dtype)), np.int32)
    bins = lax.max(exponents - np.int32(exponent_bias(dtype) + FIRST_EXPONENT - 1), np.int32(0))
    # A shift by 32 or more leaves zero, and so does a negative one, which is large here. A shift by 30 sets a bit that
    # no counter has.
    shifts = lax.bitcast_convert_type((bins - spread(words.offsets, np.int32)) * np.int32(_WIDTH), np.uint32)
    packed = lax.full_like(zero, 1) << shifts
    for i in range(_PER_WORD):
        is_below = lax.le(x, spread([thresholds[i] for thresholds in words.thresholds], x.dtype))
        packed |= lax.select(is_below, lax.full_like(zero, 1 << _WIDTH * i), zero)
    return packed


def _reduce(operands: list[jax.Array], axes: tuple[int, ...]) -> list[jax.Array]:
    """Sums all operands but the last two, and takes the maximum and the minimum of those."""
    starts = [operand.dtype.type(0) for operand in operands]
    starts[-1] = operands[-1].dtype.type(np.iinfo(operands[-1].dtype).max)

    def add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        sums = [x + y for x, y in zip(a[:-2], b[:-2], strict=True)]
        return [*sums, lax.max(a[-2], b[-2]), lax.min(a[-1], b[-1])]

    return lax.reduce(operands, starts, add, axes)


def _add_up_counters(
    packed: jax.Array, most: jax.Array, least: jax.Array, row: int, size: int, padded: int
) -> Counters:
    """Sums the words of all blocks; `row` is the axis of words."""
    counters = [(packed >> np.uint32(_WIDTH * i)) & np.uint32(LONGEST_BLOCK) for i in range(_PER_WORD)]
    others = tuple(axis for axis in range(packed.ndim) if axis != row)
    sizes = np.array([[number % 2**32, number >> 32] for number in (padded, padded - size)], np.uint32)
    times = np.uint32(1)
    if padded < _LARGEST_COUNT or row == 1:  # row 1: the tensor is one block
        *low, most, least = _reduce([*counters, most, least], others)
        high = (np.zeros(low[0].shape, np.uint32),) * _PER_WORD
        return Counters(tuple(low), high, sizes, most, least, times)
    # The sum over one slice of the first axis fits 32 bits.
    *slices, most, least = _reduce([*counters, most, least], tuple(axis for axis in others if axis != 1))
    pairs = [add_up_words(each, lax.full_like(each, 0), (0,)) for each in slices]
    most, least = _reduce([most, least], (0,))
    low, high = zip(*pairs, strict=True)
    return Counters(low, high, sizes, most, least, times)


def _unsigned(dtype: np.dtype) -> type:
    return np.dtype(f"uint{8 * dtype.itemsize}").type


def _infinity(dtype: np.dtype) -> int:
    return int(bits_like((np.inf,), dtype)[0])


def _take(x: jax.Array, indices: tuple[int, ...]) -> jax.Array:
    return x.at[np.array(indices)].get(mode="promise_in_bounds")


def _stack(first: jax.Array, second: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(each, (0,)) for each in (first, second)], 0)


@functools.cache
def _list_differences(words: int, formats: tuple[Format, ...], histogram: bool) -> tuple[tuple[int, ...], ...]:
    """Returns, for each column, the two raw counts that it is the difference of.

    The raw counts are the first counters of all words, then the second and third ones, and then the number of elements
    with padding, the number of padding elements, one and zero.
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
