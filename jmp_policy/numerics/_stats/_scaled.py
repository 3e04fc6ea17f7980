"""What floats in blocks that share a scale would lose, rounded by the functions that training rounds with."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...quant._numbers import Blocks, dequantize, quantize_mx, quantize_nv
from ._errors import find_exponent, read_units
from ._integers import BlockErrors, count_flags, pad_last_axis
from ._record import add_up, bits_like, bits_of, power_of_two
from ._what_if import ScaledFormat

_MOST = np.finfo(np.float32).max


def add_scaled_errors(x: jax.Array, most: jax.Array, spec: ScaledFormat) -> BlockErrors:
    """Rounds a tensor block by block along its last axis.

    What is not finite counts as zero here, and not as what makes a block nan; a format with a scale for the tensor has
    one for all of it. Scales are what they are: the error with the best power of two is the same.

    Args:
      x: float32 or float64; at least one axis and number.
      most: the bits of the largest finite magnitude of all, an integer.
      spec: the format.
    """
    x, format = pad_last_axis(x, spec.block), spec.numbers
    magnitudes = bits_of(lax.abs(x))
    is_finite = lax.lt(magnitudes, lax.full_like(magnitudes, bits_like((np.inf,), x.dtype)[0]))
    x = lax.select(is_finite, x, lax.full_like(x, 0))
    blocks = _round(lax.clamp(x.dtype.type(-_MOST), x, x.dtype.type(_MOST)).astype(jnp.float32), spec)
    # Near the end of float32 the nearest number may be beyond it.
    back = lax.min(lax.abs(dequantize(blocks, -1)), _MOST).astype(x.dtype)
    values = lax.abs(blocks.values.astype(jnp.float32))
    is_number = is_finite & lax.gt(magnitudes, lax.full_like(magnitudes, 0))
    becomes_zero = is_number & (values == 0)
    is_subnormal = (values > 0) & (values < 2.0**format.min_exponent)
    # What would be rounded to more than the largest number, if there was more.
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


def _round(x: jax.Array, spec: ScaledFormat) -> Blocks:
    if spec.has_tensor_scale:
        return quantize_nv(x, -1, spec.block)
    return quantize_mx(x, spec.dtype, -1, spec.block)
