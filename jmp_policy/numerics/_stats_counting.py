"""Finds the extremes of a tensor, counts its elements by magnitude, and rounds it to block-scaled formats."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..policy import NumberFormat
from ..quant import dequantize, quantize_mx, quantize_nv
from ._stats_record import (
    add_together,
    add_up,
    add_up_words,
    bits_like,
    bits_of,
    exponent_bias,
    mantissa_bits,
    power_of_two,
)
from ._what_if import find_exponent, read_units, split_blocks

HISTOGRAM_BINS = 64
"""Bin 0 counts elements below `2.0**FIRST_EXPONENT` except zeros, the last bin all finite ones from `2.0**16` on."""

FIRST_EXPONENT = -46
"""Bin `i` begins at `2.0**(FIRST_EXPONENT + i - 1)`."""

FIRST_COUNTS = 4
"""Times, zeros, nans and infinities come before the counts of formats."""

_LARGEST_COUNT = 2**32
_LARGEST_SUM, _BLOCK = 2**16, 4096  # the most squares in one sum; larger tensors are summed in blocks of 4,096 first


class ExactStats(NamedTuple):
    """Exact measurements of a tensor, scalars: the compiler makes a kernel of each array that is put together."""

    low: list[jax.Array]  # uint32: the numbers of zeros, nans and infinities
    high: jax.Array  # uint32 `(3,)`: the high words of these numbers, constant below 2**32 elements
    most: jax.Array  # the bits of the largest finite magnitude, an integer
    least: jax.Array  # the bits of the smallest nonzero magnitude, or of infinity
    square: jax.Array  # the scaled sum of squares of finite elements: see `convert_square`


def measure_exactly(x: jax.Array) -> ExactStats:
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
    counts = [lax.convert_element_type(each, np.uint32) for each in flags]
    scaled = lax.bitcast_convert_type(most, x.dtype) * x.dtype.type(2.0 ** _scale_exponent(x.dtype))
    starts = [*[np.uint32(0)] * 3, x.dtype.type(0), *bits_like((0, np.inf), x.dtype)]
    found = lax.reduce([*counts, scaled * scaled, most, least], starts, _join_extremes, axes)
    high = jnp.zeros(3, np.uint32)
    if is_large:
        of_blocks, rest = found, tuple(range(found[0].ndim))
        found, padding = lax.reduce(of_blocks, starts, _join_extremes, rest), np.uint32(blocks.size - x.size)
        if x.size >= _LARGEST_COUNT:
            words = [add_up_words(each, lax.full_like(each, 0), rest) for each in of_blocks[:3]]
            found[:3], high = [low for low, _ in words], jnp.stack([high for _, high in words])
            high = high.at[0].add(-lax.convert_element_type(lax.lt(found[0], padding), np.uint32))
        found[0] -= padding
    return ExactStats(found[:3], high, found[-2], found[-1], found[3])


def make_empty_extremes(dtype: np.dtype) -> ExactStats:
    most, least = map(jnp.asarray, bits_like((0, np.inf), dtype))
    return ExactStats([jnp.uint32(0)] * 3, jnp.zeros(3, np.uint32), most, least, jnp.zeros((), dtype))


def convert_square(extremes: ExactStats, otherwise: jax.Array) -> jax.Array:
    """Returns the sum of squares in units of `4**find_exponent(most)`; `otherwise` if it is out of range.

    The range in float32 is about 1e-17 to 1e10. LLVM does not vectorize a loop with a second sum.
    """
    square, bias = extremes.square, exponent_bias(extremes.square.dtype)
    exponent = find_exponent(extremes.most, square.dtype)
    found = square * power_of_two(np.int32(-2) * (exponent + np.int32(_scale_exponent(square.dtype))), square.dtype)
    is_large = lax.gt(exponent, lax.full_like(exponent, 3 - bias // 2))
    return lax.select(is_large & lax.lt(square, lax.full_like(square, np.inf)), found, otherwise)


def _scale_exponent(dtype: np.dtype) -> int:
    """Returns the exponent of the factor of elements before they are squared: small ones are more usual than large."""
    return exponent_bias(dtype) // 6


def count_losses(
    blocks: jax.Array, axes: tuple[int, ...], formats: Sequence[NumberFormat], histogram: bool
) -> jax.Array:
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
    borrow = lax.convert_element_type(lax.lt(_select_planes(low, plus), _select_planes(low, minus)), np.uint32)
    return _stack_words(
        _select_planes(low, plus) - _select_planes(low, minus),
        _select_planes(high, plus) - _select_planes(high, minus) - borrow,
    )


def count_flags(flags: jax.Array) -> jax.Array:
    """Returns the number of true flags, in two words."""
    ones = lax.convert_element_type(flags, np.uint32)
    rows = lax.reduce(ones, np.uint32(0), lax.add, (flags.ndim - 1,))
    return _stack_words(*_add_up_words(rows, tuple(range(rows.ndim))))


def _read_magnitudes(x: jax.Array) -> jax.Array:
    """Returns the bits of magnitudes, subnormal ones too, which have the order of the magnitudes."""
    bits = bits_of(x)
    return bits & bits.dtype.type(np.iinfo(bits.dtype).max)


def _join_extremes(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    sums = [x + y for x, y in zip(a[:-2], b[:-2], strict=True)]
    return [*sums, lax.max(a[-2], b[-2]), lax.min(a[-1], b[-1])]


@functools.cache
def _list_thresholds(formats: tuple[NumberFormat, ...], histogram: bool, dtype: np.dtype) -> np.ndarray:
    """Returns the bits of zero, the largest finite number, the thresholds of formats, and the ends of bins."""
    floats = [each for each in formats if not each.block]
    values = [0.0, np.finfo(dtype).max, *(value for each in floats for value in each.find_thresholds(dtype))]
    if histogram:
        ends = [dtype.type(2.0 ** (FIRST_EXPONENT + i)) for i in range(HISTOGRAM_BINS - 1)]
        values += [np.nextafter(end, dtype.type(0)) for end in ends]
    return bits_like(values, dtype)


@functools.cache
def _list_differences(formats: tuple[NumberFormat, ...], histogram: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns, for each count, the two thresholds whose numbers of elements it is the difference of."""
    is_zero, is_finite, found = 0, 1, 2
    columns = []
    for each in formats:
        if not each.block:
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


def _select_planes(x: jax.Array, indices: tuple[int, ...]) -> jax.Array:
    return x.at[np.array(indices, np.int32)].get(mode="promise_in_bounds")


def _stack_words(first: jax.Array, second: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(each, (0,)) for each in (first, second)], 0)


_MOST = np.finfo(np.float32).max


class BlockErrors(NamedTuple):
    """The losses of one block-scaled format, whose blocks of the last axis are rounded, each with its own scale."""

    # uint32 `(2, 3)`: the words of the number of nonzero elements that become zero, subnormal (never an integer), and
    # clipped (never an integer).
    lost: jax.Array
    # Float `(2,)`: the squared errors with the scales of the format, and with scales rounded up to a power of two, in
    # units of `4**exponent` of the tensor.
    high: jax.Array
    low: jax.Array  # their low parts


def add_block_errors(x: jax.Array, most: jax.Array, spec: NumberFormat) -> BlockErrors:
    """Rounds a float32 or float64 tensor with at least one element; `most` has the bits of its largest magnitude."""
    return (_add_integer_errors if spec.has_integers else _add_scaled_errors)(x, most, spec)


def _add_integer_errors(x: jax.Array, most: jax.Array, spec: NumberFormat) -> BlockErrors:
    """Rounds each block in units of its own largest magnitude."""
    length = min(spec.block, x.shape[-1])
    x = _pad_last_axis(x, length)
    blocks = lax.reshape(x, (*x.shape[:-1], x.shape[-1] // length, length))
    dtype, last = x.dtype, blocks.ndim - 1
    magnitudes = bits_of(lax.abs(blocks))
    is_finite = lax.lt(magnitudes, lax.full_like(magnitudes, bits_like((np.inf,), dtype)[0]))
    magnitudes = lax.select(is_finite, magnitudes, lax.full_like(magnitudes, 0))
    amax = lax.expand_dims(lax.reduce(magnitudes, magnitudes.dtype.type(0), lax.max, (last,)), (last,))
    exponents = find_exponent(amax, dtype)
    units = power_of_two(lax.neg(exponents), dtype)
    spread = lambda x: lax.broadcast_in_dim(x, blocks.shape, tuple(range(blocks.ndim)))
    values = read_units(blocks, spread(units))
    # The scale of a block of zeros must not be zero either.
    largest = read_units(lax.bitcast_convert_type(amax, dtype), units)
    scale = lax.max(largest * dtype.type(1 / spec.max), dtype.type(2.0**-20))
    scales = [spread(each) for each in (scale, _round_up_to_power(scale))]
    codes = [lax.round(values / each, lax.RoundingMethod.TO_NEAREST_EVEN) * each for each in scales]
    becomes_zero = lax.eq(codes[0], lax.full_like(codes[0], 0)) & lax.gt(magnitudes, lax.full_like(magnitudes, 0))
    weights = spread(power_of_two((exponents - find_exponent(most, dtype)) * np.int32(2), dtype))
    errors = [lax.expand_dims(code - values, (0,)) for code in codes]
    errors = lax.concatenate(errors, 0)
    squares = errors * errors * lax.broadcast_in_dim(weights, errors.shape, tuple(range(1, errors.ndim)))
    parts = add_up(squares, lax.full_like(squares, 0), (last + 1,))
    words = lax.expand_dims(count_flags(becomes_zero), (1,))
    lost = lax.pad(words, np.uint32(0), [(0, 0, 0), (0, 2, 0)])
    return BlockErrors(lost, *add_up(*parts, tuple(range(1, last + 1))))


def _add_scaled_errors(x: jax.Array, most: jax.Array, spec: NumberFormat) -> BlockErrors:
    """Rounds floats of blocks. Elements that are not finite count as zero and do not make their block nan.

    Both errors are with the scales of the format: the error with the best power of two is the same.
    """
    x = _pad_last_axis(x, spec.block)
    magnitudes = bits_of(lax.abs(x))
    is_finite = lax.lt(magnitudes, lax.full_like(magnitudes, bits_like((np.inf,), x.dtype)[0]))
    x = lax.select(is_finite, x, lax.full_like(x, 0))
    clamped = lax.clamp(x.dtype.type(-_MOST), x, x.dtype.type(_MOST)).astype(jnp.float32)
    if spec.scale == "float8_e4m3fn":
        blocks = quantize_nv(clamped, -1, spec.block)
    else:
        blocks = quantize_mx(clamped, spec.dtype, -1, spec.block)
    # The result of rounding may exceed the largest float32.
    back = lax.min(lax.abs(dequantize(blocks, -1)), _MOST).astype(x.dtype)
    values = lax.abs(blocks.values.astype(jnp.float32))
    is_number = is_finite & lax.gt(magnitudes, lax.full_like(magnitudes, 0))
    becomes_zero = is_number & (values == 0)
    is_subnormal = (values > 0) & (values < 2.0**spec.min_exponent)
    # Clipped elements would round to more than the largest number of a format with a larger range.
    bound = spec.find_thresholds(np.dtype(np.float32))[2] / spec.max
    is_clipped = (values == spec.max) & (lax.abs(x) > back * x.dtype.type(bound))
    if x.dtype.itemsize == 8:
        is_clipped |= lax.abs(x) > x.dtype.type(_MOST)
    lost = [lax.expand_dims(count_flags(flags), (1,)) for flags in (becomes_zero, is_subnormal, is_clipped)]
    units = lax.broadcast(power_of_two(lax.neg(find_exponent(most, x.dtype)), x.dtype), x.shape)
    errors = read_units(back, units) - read_units(x, units)
    squares = errors * errors
    sums = add_up(*add_up(squares, lax.full_like(squares, 0), (x.ndim - 1,)), tuple(range(x.ndim - 1)))
    return BlockErrors(lax.concatenate(lost, 1), *(lax.broadcast(part, (2,)) for part in sums))


def _pad_last_axis(x: jax.Array, block: int) -> jax.Array:
    """Pads the last axis with zeros to a multiple of the block size."""
    missing = -x.shape[-1] % block
    return lax.pad(x, x.dtype.type(0), [*[(0, 0, 0)] * (x.ndim - 1), (0, missing, 0)]) if missing else x


def _round_up_to_power(scale: jax.Array) -> jax.Array:
    bits, digits = bits_of(scale), (1 << mantissa_bits(scale.dtype)) - 1
    return lax.bitcast_convert_type((bits + bits.dtype.type(digits)) & bits.dtype.type(~digits), scale.dtype)
