"""Measurements as arrays that add up over iterations of a loop, devices, a batch and steps.

Counts have 64 bits in two words, and sums the precision of two floats. Extremes are compared by their bits: a float
`max` loses nan on some platforms, and subnormal numbers on others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax


class Record(NamedTuple):
    """Measurements of `R` tensors, a row each; leading axes, as of a batch, may come first."""

    counts: jax.Array  # uint32 `(..., R, 2, C)`, the low and the high words of each count
    # Float `(..., R, 2)`: the largest finite magnitude, or 0, and the smallest nonzero one, or infinity.
    extremes: jax.Array
    exponents: jax.Array  # int32 `(..., R)`: the sums are in units of `4**exponent`
    sums: jax.Array  # float `(..., R, S, 2)`, the high and the low part of each sum


def join_records(records: Sequence[Record]) -> Record:
    """Concatenates the rows of records of one `StatsSpec`, with the same leading axes."""
    if len(records) == 1:
        return records[0]
    columns = zip(zip(*records, strict=True), _AXES_FROM_ROWS, strict=True)
    return Record(*(lax.concatenate(parts, parts[0].ndim - axes) for parts, axes in columns))


def merge(a: Record, b: Record) -> Record:
    """Adds up two records of the same rows.

    It is associative and commutative, up to a rounding error of about 2**-48 in the sums.
    """
    low, high = add_words(*_split(a.counts, -2), *_split(b.counts, -2))
    most, least = zip(_split(bits_of(a.extremes), -1), _split(bits_of(b.extremes), -1), strict=True)
    exponents = lax.max(a.exponents, b.exponents)
    a_sums, b_sums = (_split(_align(record, exponents), -1) for record in (a, b))
    return Record(
        _stack_pair(low, high, -2),
        lax.bitcast_convert_type(_stack_pair(lax.max(*most), lax.min(*least), -1), a.extremes.dtype),
        exponents,
        _stack_pair(*add_parts(*a_sums, *b_sums), -1),
    )


def fold(record: Record, axis: int = 0) -> Record:
    """Merges a record over one of its leading axes: iterations of a loop, devices, or a batch."""
    words = add_up_words(*_split(record.counts, -2), (axis,))
    bits = bits_of(record.extremes)
    most, least = _split(bits, -1)
    infinity = bits_like((np.inf,), record.extremes.dtype)[0]
    most = lax.reduce(most, bits.dtype.type(0), lax.max, (axis,))
    least = lax.reduce(least, infinity, lax.min, (axis,))
    exponents = lax.reduce(record.exponents, np.int32(-exponent_bias(record.sums.dtype)), lax.max, (axis,))
    sums = _align(record, lax.expand_dims(exponents, (axis,)))
    return Record(
        _stack_pair(*words, -2),
        lax.bitcast_convert_type(_stack_pair(most, least, -1), record.extremes.dtype),
        exponents,
        _stack_pair(*add_up(*_split(sums, -1), (axis,)), -1),
    )


def add_words(
    low: jax.Array, high: jax.Array, other_low: jax.Array, other_high: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds integers of 64 bits, each in two words of 32."""
    total = low + other_low
    carry = lax.convert_element_type(lax.lt(total, low), np.uint32)
    return total, high + other_high + carry


def add_together(operands: Sequence[jax.Array], axes: tuple[int, ...]) -> list[jax.Array]:
    """Sums several arrays over axes in one reduction."""
    starts = [each.dtype.type(0) for each in operands]
    return lax.reduce(list(operands), starts, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], axes)


def add_up_words(low: jax.Array, high: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Sums integers in two words over axes."""
    zero = np.uint32(0)
    low, high = lax.reduce((low, high), (zero, zero), lambda a, b: add_words(*a, *b), axes)
    return low, high


def add_parts(
    high: jax.Array, low: jax.Array, other_high: jax.Array, other_low: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds numbers that are the sum of two floats, a high and a low part.

    Source: Dekker, A floating-point technique for extending the available precision, 1971; Knuth's two-sum.
    """
    total = high + other_high
    added = total - high
    error = (high - (total - added)) + (other_high - added)
    rest = error + (low + other_low)
    result = total + rest
    return result, rest - (result - total)


def add_up(high: jax.Array, low: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Sums numbers in two parts over axes."""
    zero = high.dtype.type(0)
    high, low = lax.reduce((high, low), (zero, zero), lambda a, b: add_parts(*a, *b), axes)
    return high, low


def bits_of(x: jax.Array) -> jax.Array:
    """Returns the bits of floats as integers, which have the same order for nonnegative floats."""
    return lax.bitcast_convert_type(x, np.int64 if x.dtype.itemsize == 8 else np.int32)


def bits_like(values: Sequence[float], dtype: np.dtype) -> np.ndarray:
    """Returns the bits of numbers in float32 or float64, as integers."""
    return np.array(values, dtype).view(np.int64 if dtype.itemsize == 8 else np.int32)


def exponent_bias(dtype: np.dtype) -> int:
    return 1023 if dtype.itemsize == 8 else 127


def mantissa_bits(dtype: np.dtype) -> int:
    return 52 if dtype.itemsize == 8 else 23


def power_of_two(exponents: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns `2**exponents`: zero below the normal numbers, and the largest power of two instead of infinity."""
    bias = exponent_bias(dtype)
    fields = lax.clamp(np.int32(0), exponents + np.int32(bias), np.int32(2 * bias))
    whole = lax.convert_element_type(fields, np.int64 if dtype.itemsize == 8 else np.int32)
    return lax.bitcast_convert_type(whole << whole.dtype.type(mantissa_bits(dtype)), dtype)


_AXES_FROM_ROWS = (3, 2, 1, 3)  # for each array of a record, the number of its last axes that are not a batch


def _align(record: Record, exponents: jax.Array) -> jax.Array:
    """Converts the sums of a record to the units of these larger exponents."""
    factors = power_of_two((record.exponents - exponents) * np.int32(2), record.sums.dtype)
    return record.sums * lax.broadcast_in_dim(factors, record.sums.shape, tuple(range(factors.ndim)))


def _split(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    first, second = (lax.index_in_dim(x, i, axis, keepdims=False) for i in (0, 1))
    return first, second


def _stack_pair(first: jax.Array, second: jax.Array, axis: int) -> jax.Array:
    """Stacks two arrays along a new axis, counted from the end."""
    axis += first.ndim + 1
    return lax.concatenate([lax.expand_dims(part, (axis,)) for part in (first, second)], axis)
