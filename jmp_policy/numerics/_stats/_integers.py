"""What integers with a scale per block would lose: the same sums as for floating formats, and what becomes zero."""

from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from ._errors import find_exponent, read_units
from ._record import add_up, add_up_words, bits_like, bits_of, mantissa_bits, power_of_two
from ._what_if import IntegerFormat


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
