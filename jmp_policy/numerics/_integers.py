"""What integers with a scale per block would lose: the same sums as for floating formats, and what becomes zero."""

from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from ._errors import find_exponent, float_dtype, read_units
from ._record import add_up, add_up_words, power_of_two
from ._what_if import IntegerFormat


class IntegerErrors(NamedTuple):
    """Of one format.

    Attributes:
      underflow: uint32 `(2,)`, the words of how many numbers that are not zero have zero as their integer.
      high: float `(2,)`, the squared errors with scales as they are and rounded up to a power of two, in units of
        `4**exponent` of the whole tensor.
      low: their low parts.
    """

    underflow: jax.Array
    high: jax.Array
    low: jax.Array


def add_integer_errors(magnitudes: jax.Array, most: jax.Array, spec: IntegerFormat) -> IntegerErrors:
    """Rounds a tensor to integers, block by block along its last axis, each in units of its own largest binade.

    Args:
      magnitudes: the bits of magnitudes; at least one axis and number.
      most: the bits of the largest finite one of all.
      spec: the format.
    """
    dtype = float_dtype(magnitudes)
    infinity = np.array(np.inf, dtype).view(magnitudes.dtype)[()]
    finite = lax.select(lax.lt(magnitudes, lax.full_like(magnitudes, infinity)), magnitudes, magnitudes * 0)
    blocks = _split_last_axis(finite, spec.block)
    last = blocks.ndim - 1
    amax = lax.expand_dims(lax.reduce(blocks, blocks.dtype.type(0), lax.max, (last,)), (last,))
    exponents = find_exponent(amax, dtype)
    spread = lambda x: lax.broadcast_in_dim(x, blocks.shape, tuple(range(blocks.ndim)))
    x = read_units(blocks, spread(exponents), dtype)
    # A block of zeros needs a scale that can divide.
    scale = lax.max(read_units(amax, exponents, dtype) * dtype.type(1 / spec.max), dtype.type(2.0**-20))
    codes = lax.round(x / spread(scale), lax.RoundingMethod.TO_NEAREST_EVEN)
    becomes_zero = lax.bitwise_and(lax.eq(codes, lax.full_like(codes, 0)), lax.gt(blocks, lax.full_like(blocks, 0)))
    errors = [codes * spread(scale) - x, _round_to(x, spread(_round_up_to_power(scale)))]
    weights = spread(power_of_two((exponents - find_exponent(most, dtype)) * np.int32(2), dtype))
    squares = lax.concatenate([lax.expand_dims(error * error * weights, (0,)) for error in errors], 0)
    everything = tuple(range(1, squares.ndim))
    parts = add_up(squares, lax.full_like(squares, 0), (last + 1,))
    high, low = add_up(*parts, everything[:-1])
    return IntegerErrors(_count(becomes_zero), high, low)


def _split_last_axis(x: jax.Array, block: int) -> jax.Array:
    length = min(block, x.shape[-1])
    blocks = -(-x.shape[-1] // length)
    if missing := blocks * length - x.shape[-1]:
        x = lax.pad(x, x.dtype.type(0), [*[(0, 0, 0)] * (x.ndim - 1), (0, missing, 0)])
    return lax.reshape(x, (*x.shape[:-1], blocks, length))


def _round_to(x: jax.Array, scale: jax.Array) -> jax.Array:
    """The error of the nearest multiple of a power of two."""
    return lax.round(x / scale, lax.RoundingMethod.TO_NEAREST_EVEN) * scale - x


def _round_up_to_power(scale: jax.Array) -> jax.Array:
    """The smallest power of two that is not below."""
    bits = lax.bitcast_convert_type(scale, np.int64 if scale.dtype.itemsize == 8 else np.int32)
    digits = (1 << (52 if scale.dtype.itemsize == 8 else 23)) - 1
    return lax.bitcast_convert_type((bits + bits.dtype.type(digits)) & bits.dtype.type(~digits), scale.dtype)


def _count(flags: jax.Array) -> jax.Array:
    """How many flags are true, in two words."""
    ones = lax.convert_element_type(flags, np.uint32)
    last = (flags.ndim - 1,)
    rows = lax.reduce(ones, np.uint32(0), lax.add, last)
    words = add_up_words(rows, lax.full_like(rows, 0), tuple(range(rows.ndim)))
    return lax.concatenate([lax.expand_dims(word, (0,)) for word in words], 0)
