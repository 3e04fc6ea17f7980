"""The losses of block-scaled formats: the blocks of the last axis are rounded, each with its own scale."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...quant._numbers import dequantize, quantize_mx, quantize_nv
from ._counting import count_flags
from ._record import add_up, bits_like, bits_of, mantissa_bits, power_of_two
from ._what_if import IntegerFormat, ScaledFormat, find_exponent, read_units

_MOST = np.finfo(np.float32).max


class BlockErrors(NamedTuple):
    """The losses of one format.

    Attributes:
      lost: uint32 `(2, 3)`, the words of the number of nonzero elements that become zero, subnormal, and clipped;
        integers have neither of the last two.
      high: float `(2,)`, the squared errors with the scales of the format, and with scales rounded up to a power of
        two, in units of `4**exponent` of the tensor.
      low: their low parts.
    """

    lost: jax.Array
    high: jax.Array
    low: jax.Array


def add_block_errors(x: jax.Array, most: jax.Array, spec: IntegerFormat | ScaledFormat) -> BlockErrors:
    """Rounds a float32 or float64 tensor with at least one element; `most` has the bits of its largest magnitude."""
    if isinstance(spec, IntegerFormat):
        return _add_integer_errors(x, most, spec)
    return _add_scaled_errors(x, most, spec)


def _add_integer_errors(x: jax.Array, most: jax.Array, spec: IntegerFormat) -> BlockErrors:
    """Rounds each block in units of its own largest magnitude."""
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
    # The scale of a block of zeros must not be zero either.
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


def _add_scaled_errors(x: jax.Array, most: jax.Array, spec: ScaledFormat) -> BlockErrors:
    """Rounds floats of blocks. Elements that are not finite count as zero and do not make their block nan.

    Both errors are with the scales of the format: the error with the best power of two is the same.
    """
    x, format = _pad_last_axis(x, spec.block), spec.numbers
    magnitudes = bits_of(lax.abs(x))
    is_finite = lax.lt(magnitudes, lax.full_like(magnitudes, bits_like((np.inf,), x.dtype)[0]))
    x = lax.select(is_finite, x, lax.full_like(x, 0))
    clamped = lax.clamp(x.dtype.type(-_MOST), x, x.dtype.type(_MOST)).astype(jnp.float32)
    if spec.has_tensor_scale:
        blocks = quantize_nv(clamped, -1, spec.block)
    else:
        blocks = quantize_mx(clamped, spec.dtype, -1, spec.block)
    # The result of rounding may exceed the largest float32.
    back = lax.min(lax.abs(dequantize(blocks, -1)), _MOST).astype(x.dtype)
    values = lax.abs(blocks.values.astype(jnp.float32))
    is_number = is_finite & lax.gt(magnitudes, lax.full_like(magnitudes, 0))
    becomes_zero = is_number & (values == 0)
    is_subnormal = (values > 0) & (values < 2.0**format.min_exponent)
    # Clipped elements would round to more than the largest number of a format with a larger range.
    bound = format.find_thresholds(np.dtype(np.float32))[2] / format.max
    is_clipped = (values == format.max) & (lax.abs(x) > back * x.dtype.type(bound))
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


def _split_last_axis(x: jax.Array, block: int) -> jax.Array:
    length = min(block, x.shape[-1])
    x = _pad_last_axis(x, length)
    return lax.reshape(x, (*x.shape[:-1], x.shape[-1] // length, length))


def _round_to_multiples(x: jax.Array, scale: jax.Array) -> jax.Array:
    return lax.round(x / scale, lax.RoundingMethod.TO_NEAREST_EVEN) * scale


def _round_up_to_power(scale: jax.Array) -> jax.Array:
    """Rounds up to a power of two."""
    bits, digits = bits_of(scale), (1 << mantissa_bits(scale.dtype)) - 1
    return lax.bitcast_convert_type((bits + bits.dtype.type(digits)) & bits.dtype.type(~digits), scale.dtype)
