"""Numbers of 8 and 4 bits in blocks that share a scale: MXFP8, MXFP4 and NVFP4.

Every rule is written so that CPUs, GPUs and TPUs, eager or compiled, return the same bits: magnitudes are compared as
integers, since some backends read subnormal float32 as zero and XLA's float32 `max` on CPUs may lose a nan; scales are
powers of two made from bits, or quotients that no compiler may write in another way.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

E2M1 = np.dtype(jnp.float4_e2m1fn)
"""Zero, .5, 1, 1.5, 2, 3, 4 and 6, of both signs; neither nan nor infinity."""
E8M0 = np.dtype(jnp.float8_e8m0fnu)
"""Powers of two from 2**-127 to 2**127, and nan."""

_LARGEST_E4M3 = 448.0
_LARGEST_E2M1 = 6.0
_LARGEST_NV = _LARGEST_E4M3 * _LARGEST_E2M1
# By more than this the largest numbers of float32 would come back as infinities.
_LARGEST_TENSOR_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(_LARGEST_NV), np.float32(0))

_INFINITY = 0x7F800000  # the bits of float32
_MAGNITUDE = 0x7FFFFFFF
_NAN_E8M0 = 255


class Blocks(NamedTuple):
    """Numbers in blocks, and what they are multiples of: `values * scale * tensor_scale`.

    Attributes:
      values: e4m3fn, e5m2 or e2m1fn.
      scale: e8m0fnu, or e4m3fn beside a `tensor_scale`: one for each block of the axis that is in blocks. It is nan
        where a number of the block is not finite.
      tensor_scale: float32, of length 1 on the axes that share it; `None` where the scales are powers of two.
    """

    values: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None = None


def quantize_mx(
    x: jax.Array, dtype: Any, axis: int, block_size: int = 32, *, rounding: Literal["up", "floor"] = "up"
) -> Blocks:
    """Rounds to the nearest numbers of a narrow format, ties to even, with one power of two for each block.

    A block of zeros has the least scale, 2**-127. Subnormal numbers are rounded as all others are. A block with a nan
    or an infinity has the scale nan: e2m1 could show neither, and a scale that is large instead would make zeros of the
    numbers beside it. Its values are nan, in e2m1 zero.

    Args:
      x: floating, any shape; float64 is rounded to float32 first.
      dtype: e4m3fn, e5m2 or e2m1fn.
      axis: the axis that is in blocks, whose length is a multiple of `block_size`.
      block_size: how many numbers share a scale.
      rounding: "up" takes the least power of two by which no number is larger than the format's largest; "floor" the
        one by which the largest number has the exponent of the format's largest, where up to an eighth of it, in e2m1 a
        quarter, is clipped.

    Returns:
      Values of the shape of `x`, and scales in e8m0fnu.

    Source: OCP Microscaling Formats (MX) v1.0, section 6.3, for "floor"; NVIDIA's Transformer Engine for "up".

    >>> values, scale, _ = quantize_mx(jnp.array([1.0, -460.0, 0.3, 0.0]), jnp.float8_e4m3fn, 0, 2)
    >>> values.tolist(), scale.tolist()
    ([0.5, -224.0, 320.0, 0.0], [2.0, 0.0009765625])
    """
    x, axis, dtype = x.astype(jnp.float32), axis % x.ndim, np.dtype(dtype)
    largest = np.float32(jnp.finfo(dtype).max)
    amax = _max_of_blocks(_magnitude(x), axis, block_size)
    # The exponent of float32 that makes `amax` fit, biased by 127 as in e8m0. Of a subnormal one it would be less than
    # zero whatever its bits are.
    exponent = (amax >> 23).astype(jnp.int32) - int(np.frexp(largest)[1] - 1)
    if rounding == "up":
        fraction = int(largest.view(np.uint32)) & 0x007FFFFF
        exponent += ((amax & 0x007FFFFF) > fraction).astype(jnp.int32)
    exponent = jnp.maximum(exponent, 0)
    is_finite = amax < _INFINITY
    scale = jnp.where(is_finite, exponent, _NAN_E8M0).astype(jnp.uint8)
    # Where a block is not finite the exponent could be beyond what `_divide` takes.
    scaled = _divide(x, _spread(jnp.where(is_finite, exponent, 0), axis, block_size))
    values = _round_to_nearest(scaled, _spread(is_finite, axis, block_size), dtype)
    return Blocks(values, lax.bitcast_convert_type(scale, E8M0))


def quantize_nv(
    x: jax.Array,
    axis: int,
    block_size: int = 16,
    *,
    square_axis: int | None = None,
    tensor_axes: tuple[int, ...] | None = None,
    amax: jax.Array | float | None = None,
    key: jax.Array | None = None,
) -> Blocks:
    """Rounds to e2m1, with an e4m3 scale for each block and a float32 scale for the tensor.

    With S = 2688 / amax of the tensor, a block's scale is e4m3(amax of the block * S / 6) and its values are
    e2m1(x * (S / scale)); the tensor's scale is 1 / S. Larger scales and values, by an `amax` that is too small, are
    clipped. Where `amax` is zero, S is 1; below 2**-114, 2688 * 2**114. A block whose scale is rounded to zero has
    zeros. A block with a nan or an infinity has the scale nan and zeros, and takes no part in the tensor's amax.

    Args:
      x: floating, any shape; float64 is rounded to float32 first.
      axis: the axis that is in blocks, whose length is a multiple of `block_size`.
      block_size: how many numbers share a scale.
      square_axis: another axis, along which `block_size` blocks share a scale too; the last of them may be fewer.
      tensor_axes: the axes that share the tensor's scale, `axis` and `square_axis` among them; by default all.
      amax: float32 that stands for the measured one, broadcastable to `x` with length 1 on `tensor_axes`. Where it is
        not finite, the tensor's scale is nan.
      key: rounds values at random, if given, to one of both neighbours, the nearer the likelier, with 8 bits for each:
        on average a value is right within 2**-9 of their distance. The scales are rounded to nearest.

    Returns:
      e2m1fn values of the shape of `x`, scales in e4m3fn, and the tensor's scale.

    Source: Pretraining Large Language Models with NVFP4, NVIDIA, 2025, appendix B; NVIDIA's Transformer Engine.

    >>> values, scale, tensor_scale = quantize_nv(jnp.array([1.0, -12.0, 0.3, 0.0]), 0, 2)
    >>> values.tolist(), scale.tolist(), round(1 / float(tensor_scale[0]))
    ([0.5, -6.0, 6.0, 0.0], [448.0, 11.0], 224)
    """
    x, axis = x.astype(jnp.float32), axis % x.ndim
    axes = tuple(range(x.ndim)) if tensor_axes is None else tuple(each % x.ndim for each in tensor_axes)
    block_amax = _max_of_blocks(_magnitude(x), axis, block_size)
    if square_axis is not None:
        assert square_axis % x.ndim in axes, f"tensor_axes {axes} lack square_axis {square_axis}"
        block_amax = _share_along(block_amax, square_axis % x.ndim, block_size)
    assert axis in axes, f"tensor_axes {axes} lack axis {axis}"
    is_finite = block_amax < _INFINITY

    # The tensor's amax, as a number between 1 and 4 and a power of two, by which everything is divided first: S itself
    # would overflow for small numbers, and 1 / S be subnormal.
    if amax is None:
        tensor_amax = jnp.max(jnp.where(is_finite, block_amax, 0), axis=axes, keepdims=True, initial=0)
    else:
        tensor_amax = jnp.broadcast_to(
            _magnitude(jnp.asarray(amax, jnp.float32)), [1 if i in axes else n for i, n in enumerate(x.shape)]
        )
    is_usable = (tensor_amax > 0) & (tensor_amax < _INFINITY)
    exponent = jnp.where(is_usable, jnp.clip((tensor_amax >> 23).astype(jnp.int32), 127 - 114, 127 + 126), 127)
    fraction = _divide(lax.bitcast_convert_type(tensor_amax, jnp.float32), exponent)
    factor = jnp.where(is_usable, jnp.minimum(_LARGEST_NV / fraction, _LARGEST_NV), 1.0)
    tensor_scale = jnp.minimum(1 / factor * _power_of_two(exponent), _LARGEST_TENSOR_SCALE)
    tensor_scale = jnp.where(tensor_amax < _INFINITY, tensor_scale, jnp.nan)

    # By a product with 1/6: a compiler may divide by a constant or multiply so, with other last bits.
    wanted = _divide(lax.bitcast_convert_type(block_amax, jnp.float32), exponent) * (factor * np.float32(1 / 6))
    scale = _round_to_nearest(wanted, is_finite, np.dtype(jnp.float8_e4m3fn))
    divisor = scale.astype(jnp.float32)
    has_values = is_finite & (divisor > 0)
    multiplier = jnp.where(has_values, factor / jnp.where(has_values, divisor, 1.0), 0.0)
    scaled = _divide(x, exponent) * _spread(multiplier, axis, block_size)
    if key is not None:
        scaled = _round_at_random(scaled, draw_noise(key, x.shape, axis))
    return Blocks(_round_to_nearest(scaled, _spread(is_finite, axis, block_size), E2M1), scale, tensor_scale)


def dequantize(blocks: Blocks, axis: int, dtype: Any = jnp.float32) -> jax.Array:
    """Multiplies numbers by their scales, in float32.

    Args:
      blocks: as `quantize_mx` and `quantize_nv` return them.
      axis: the axis that is in blocks.
      dtype: of the result.

    Returns:
      Numbers of that dtype. Products with a power of two are exact, unless they are subnormal in float32, which some
      backends flush to zero, or larger than its largest number; `tensor_scale` rounds once.

    >>> dequantize(quantize_mx(jnp.array([1.0, -460.0, 0.3, 0.0]), jnp.float8_e4m3fn, 0, 2), 0).tolist()
    [1.0, -448.0, 0.3125, 0.0]
    """
    values, scale, tensor_scale = blocks
    axis %= values.ndim
    block_size = values.shape[axis] // scale.shape[axis]
    x = values.astype(jnp.float32)
    if tensor_scale is not None:
        # Both narrow numbers first: their product is exact, and the scale of a block alone may be too small.
        return (x * _spread(scale.astype(jnp.float32), axis, block_size) * tensor_scale).astype(dtype)
    # In two halves, since 2**-127 is subnormal itself.
    exponent = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    half = exponent >> 1
    first = jnp.where(exponent == _NAN_E8M0, jnp.nan, _power_of_two(half + 64))
    second = _power_of_two(exponent - half + 63)
    return (x * _spread(first, axis, block_size) * _spread(second, axis, block_size)).astype(dtype)


def draw_noise(key: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Draws 8 random bits for each number, the same ones however an array is sharded.

    Four neighbours on an axis share a word: a number costs a quarter of what `jax.random.bits` computes for uint8.

    >>> draw_noise(jax.random.key(0), (2, 6), 1).shape
    (2, 6)
    """
    words = jax.random.bits(key, (*shape[:axis], -(-shape[axis] // 4), *shape[axis + 1 :]), jnp.uint32)
    quarters = jnp.moveaxis(lax.bitcast_convert_type(words, jnp.uint8), -1, axis + 1)
    joined = quarters.reshape(*shape[:axis], 4 * words.shape[axis], *shape[axis + 1 :])
    return lax.slice_in_dim(joined, 0, shape[axis], axis=axis)


def pack_e2m1(values: jax.Array, axis: int) -> jax.Array:
    """Packs numbers of 4 bits two to a byte, the first in the low half.

    Args:
      values: e2m1fn.
      axis: the axis to halve, of even length.

    Returns:
      uint8.

    >>> pack_e2m1(jnp.array([0.5, 1.0, -6.0, 0.0]).astype(jnp.float4_e2m1fn), 0).tolist()
    [33, 15]
    """
    axis %= values.ndim
    pairs = values.reshape(*values.shape[:axis], values.shape[axis] // 2, 2, *values.shape[axis + 1 :])
    return lax.bitcast_convert_type(jnp.moveaxis(pairs, axis + 1, -1), jnp.uint8)


def unpack_e2m1(packed: jax.Array, axis: int) -> jax.Array:
    """Unpacks the numbers that `pack_e2m1` put two to a byte.

    >>> unpack_e2m1(jnp.array([33, 15], jnp.uint8), 0).tolist()
    [0.5, 1.0, -6.0, 0.0]
    """
    axis %= packed.ndim
    # A barrier, since XLA of jax 0.10 splits the bytes of a constant wrongly, and reads beyond its end.
    pairs = jnp.moveaxis(lax.bitcast_convert_type(lax.optimization_barrier(packed), E2M1), -1, axis + 1)
    return pairs.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])


def _magnitude(x: jax.Array) -> jax.Array:
    """Takes the bits of float32 without the sign: in the order of magnitudes, infinities and nans last."""
    return lax.bitcast_convert_type(x, jnp.uint32) & _MAGNITUDE


def _max_of_blocks(bits: jax.Array, axis: int, block_size: int) -> jax.Array:
    shape = bits.shape
    assert shape[axis] % block_size == 0, f"{block_size} does not divide axis {axis} of {shape}"
    blocks = bits.reshape(*shape[:axis], shape[axis] // block_size, block_size, *shape[axis + 1 :])
    return jnp.max(blocks, axis=axis + 1)


def _share_along(amax: jax.Array, axis: int, block_size: int) -> jax.Array:
    """Gives blocks that are neighbours on another axis, `block_size` of them, their largest magnitude."""
    length = amax.shape[axis]
    padded = jnp.pad(amax, [(0, -length % block_size if i == axis else 0) for i in range(amax.ndim)])
    return lax.slice_in_dim(_spread(_max_of_blocks(padded, axis, block_size), axis, block_size), 0, length, axis=axis)


def _spread(of_blocks: jax.Array, axis: int, block_size: int) -> jax.Array:
    """Repeats what blocks have for each of their numbers."""
    shape = of_blocks.shape
    repeated = jnp.broadcast_to(
        jnp.expand_dims(of_blocks, axis + 1), (*shape[: axis + 1], block_size, *shape[axis + 1 :])
    )
    return repeated.reshape(*shape[:axis], shape[axis] * block_size, *shape[axis + 1 :])


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Makes `2 ** (exponent - 127)` of bits, for 0 < exponent < 255; zero of 0."""
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def _divide(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Divides float32 by `2 ** (exponent - 127)`, for 0 <= exponent < 254: exact but for results that are subnormal.

    Subnormal numbers are taken for the integers that their bits are, which no backend flushes.
    """
    words = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = words & _MAGNITUDE
    integer = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.uint32) | (words & ~np.uint32(_MAGNITUDE))
    is_subnormal = magnitude < 0x00800000
    number = jnp.where(is_subnormal, lax.bitcast_convert_type(integer, jnp.float32), x)
    return number * jnp.where(
        is_subnormal, _power_of_two(jnp.maximum(105 - exponent, 0)), _power_of_two(254 - exponent)
    )


def _round_to_nearest(x: jax.Array, is_finite: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds to the nearest number of a narrow format, clipped to its largest, ties to even.

    What is not finite is nan, and in e2m1 zero. Clipping serves scales that are rounded up too: XLA may keep numbers
    wider than half precision where `x` is read once more, and not where its amax was measured.
    """
    limit = float(jnp.finfo(dtype).max)
    otherwise = 0.0 if dtype == E2M1 else jnp.nan
    # The constant in an array of its own: what goes from a nan back to its origin would end at a literal.
    return lax.select(is_finite, jnp.clip(x, -limit, limit), jnp.full_like(x, otherwise)).astype(dtype)


def _round_at_random(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds to one of both neighbours in e2m1, the nearer the likelier."""
    size = jnp.minimum(jnp.abs(x), _LARGEST_E2M1)
    # The distance of neighbours is a power of two, so that the sum alone is inexact. Noise is never zero nor one, and
    # one half on average: multiples of the distance stay where they are.
    spacing = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    inverse = jnp.where(size < 2, 2.0, jnp.where(size < 4, 1.0, 0.5))
    noise = (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-8)
    return jnp.copysign(jnp.floor(size * inverse + noise) * spacing, x)
