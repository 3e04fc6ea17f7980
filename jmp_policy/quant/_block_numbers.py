"""Rounding to the block-scaled formats MXFP8, MXFP4, NVFP4 and E4M3, and of the operands of their matmuls.

CPUs, GPUs and TPUs, eager or compiled, must return the same bits. So magnitudes are compared as integers (some backends
flush subnormals, and XLA's float32 `max` on CPUs may lose a nan), and scales are powers of two made from bits, or
quotients that compilers cannot rewrite.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import ROUNDING_SCOPE, keep_rounding
from ..policy import MXFP8, NVFP4, BlockFormat, find_format
from ._numbers import Quantized, measure_amax, quantize_e4m3

E2M1 = np.dtype(jnp.float4_e2m1fn)  # 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of both signs; no nan or infinity
E8M0 = np.dtype(jnp.float8_e8m0fnu)  # powers of two from 2**-127 to 2**127, and nan

_LARGEST_E2M1 = find_format(E2M1).max
_LARGEST_NV = find_format(np.dtype(jnp.float8_e4m3fn)).max * _LARGEST_E2M1
# With a larger scale, the largest float32 values would dequantize to infinity.
_LARGEST_TENSOR_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(_LARGEST_NV), np.float32(0))

_INFINITY = 0x7F800000  # the bits of float32
_MAGNITUDE = 0x7FFFFFFF
_NAN_E8M0 = 255


class Blocks(NamedTuple):
    """Block-scaled elements: they stand for `values * scale * tensor_scale`."""

    values: jax.Array  # e4m3fn, e5m2 or e2m1fn
    scale: jax.Array  # one per block: e8m0fnu, or e4m3fn with a tensor_scale; nan if an element is not finite
    tensor_scale: jax.Array | None = None  # float32, of length 1 on the axes that share it


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
@jax.named_scope(ROUNDING_SCOPE)
def round_operand(
    x: jax.Array, key: jax.Array | None, format: BlockFormat, axis: int, role: Literal["input", "weight", "gradient"]
) -> Blocks:
    """Rounds an operand of a matmul in blocks along an axis; `key` is for stochastic rounding of gradients.

    An input is `(batch, rows, inputs)`, the gradient of an output `(batch, rows, outputs)`. A weight `(*stack, inputs,
    outputs)` is rounded along axis -2 in the forward pass, as `quantize` stores it, and along -1 in the backward pass.
    """
    if isinstance(format, NVFP4):
        # Without activations, no backward matmul sums over the outputs.
        is_square = role == "weight" and format.square_weights and format.activations
        square_axis = -3 - axis if is_square else None
        return quantize_nv(x, axis, format.block_size, square_axis=square_axis, tensor_axes=(-2, -1), key=key)
    dtype = jnp.float8_e4m3fn if isinstance(format, MXFP8) else jnp.float4_e2m1fn
    if role == "gradient" and isinstance(format, MXFP8) and format.gradients == "e5m2":
        dtype = jnp.float8_e5m2
    return quantize_mx(x, dtype, axis, format.block_size, rounding=format.scale_rounding)


@round_operand.defjvp
def _refuse_block_derivative(format: BlockFormat, axis: int, role: str, primals: Any, tangents: Any) -> Any:
    """Raises: JAX would silently differentiate the arithmetic on bits to zero."""
    raise TypeError(
        f"Block-scaled matmuls ({str(format)!r}) have no second derivative. For example, give layers that are "
        "differentiated twice the policy 'mixed_bfloat16'."
    )


def mix_rows(x: jax.Array, block: int) -> jax.Array:
    """Multiplies each block of rows of `(batch, rows, features)` by an orthonormal matrix that spreads outliers.

    A matmul that sums over rows gives the same result for two mixed operands.

    Source: NVIDIA, Pretraining Large Language Models with NVFP4, 2025, section 4 (random Hadamard transforms).
    """
    batch, rows, features = x.shape
    blocks = x.astype(jnp.float32).reshape(batch, rows // block, block, features)
    mixed = jnp.einsum("ij,bnjf->bnif", make_hadamard(block), blocks, precision=lax.Precision.HIGHEST)
    return mixed.reshape(x.shape)


@functools.cache
def make_hadamard(size: int) -> np.ndarray:
    """Returns Sylvester's orthonormal Hadamard matrix with fixed column signs."""
    # The signs are a bent function of the bits of the column: rows that are constant, or alternate like a row of the
    # matrix, are spread evenly. Without signs they would be concentrated in one row.
    rows, columns = np.arange(size)[:, None], np.arange(size)
    pairs = columns & (columns >> 1) & 0x55555555
    return ((-1.0) ** (np.bitwise_count(rows & columns) + np.bitwise_count(pairs)) / np.sqrt(size)).astype(np.float32)


def quantize_mx(
    x: jax.Array, dtype: Any, axis: int, block_size: int = 32, *, rounding: Literal["up", "floor"] = "up"
) -> Blocks:
    """Rounds to the nearest elements of a narrow format, ties to even, with a power-of-two scale (e8m0fnu) per block.

    A block of zeros has the scale 2**-127. A block with a nan or an infinity has the scale nan, because e2m1 cannot
    represent either; its values are nan, or zero in e2m1.

    Source: OCP Microscaling Formats (MX) v1.0, section 6.3, for "floor"; NVIDIA's Transformer Engine for "up".
    """
    x, axis, dtype = x.astype(jnp.float32), axis % x.ndim, np.dtype(dtype)
    largest = np.float32(find_format(dtype).max)
    amax = _max_of_blocks(_magnitude(x), axis, block_size)
    # The float32 exponent that makes `amax` fit, biased by 127 as in e8m0. It is negative for a subnormal `amax`.
    exponent = (amax >> 23).astype(jnp.int32) - int(np.frexp(largest)[1] - 1)
    if rounding == "up":
        fraction = int(largest.view(np.uint32)) & 0x007FFFFF
        exponent += ((amax & 0x007FFFFF) > fraction).astype(jnp.int32)
    exponent = jnp.maximum(exponent, 0)
    is_finite = amax < _INFINITY
    scale = jnp.where(is_finite, exponent, _NAN_E8M0).astype(jnp.uint8)
    # The exponent of a non-finite block may be too large for `_divide_by_power`.
    scaled = _divide_by_power(x, _repeat_in_blocks(jnp.where(is_finite, exponent, 0), axis, block_size))
    values = _round_elements(scaled, _repeat_in_blocks(is_finite, axis, block_size), dtype)
    return Blocks(values, lax.bitcast_convert_type(scale, E8M0))


def quantize_nv(
    x: jax.Array,
    axis: int,
    block_size: int = 16,
    *,
    square_axis: int | None = None,
    tensor_axes: tuple[int, ...] | None = None,
    key: jax.Array | None = None,
) -> Blocks:
    """Rounds to e2m1, with an e4m3 scale per block and a float32 scale per tensor.

    With S = 2688 / amax of the tensor, the scale of a block is e4m3(amax of the block * S / 6) and its values are
    e2m1(x * (S / scale)); the tensor's scale is 1 / S. S is 1 for a zero amax, and `2688 * 2**114` below `2**-114`. A
    block whose scale rounds to zero has zeros. A block with a nan or an infinity has the scale nan and zeros, and does
    not count in the tensor's amax.

    Source: Pretraining Large Language Models with NVFP4, NVIDIA, 2025, appendix B; NVIDIA's Transformer Engine.
    """
    x, axis = x.astype(jnp.float32), axis % x.ndim
    axes = tuple(range(x.ndim)) if tensor_axes is None else tuple(each % x.ndim for each in tensor_axes)
    block_amax = _max_of_blocks(_magnitude(x), axis, block_size)
    if square_axis is not None:
        square_axis %= x.ndim
        assert square_axis in axes, f"tensor_axes {axes} lack square_axis {square_axis}"
        # Each group of `block_size` neighboring blocks has their common maximum.
        largest = _max_of_blocks(pad_axes(block_amax, (square_axis,), block_size), square_axis, block_size)
        shared = _repeat_in_blocks(largest, square_axis, block_size)
        block_amax = lax.slice_in_dim(shared, 0, block_amax.shape[square_axis], axis=square_axis)
    assert axis in axes, f"tensor_axes {axes} lack axis {axis}"
    is_finite = block_amax < _INFINITY

    # The tensor's amax is a fraction between 1 and 4 times a power of two. Everything is divided by the power first,
    # because S would overflow for small tensors, and 1 / S would be subnormal.
    tensor_amax = jnp.max(jnp.where(is_finite, block_amax, 0), axis=axes, keepdims=True, initial=0)
    is_usable = tensor_amax > 0
    exponent = jnp.where(is_usable, jnp.clip((tensor_amax >> 23).astype(jnp.int32), 127 - 114, 127 + 126), 127)
    fraction = _divide_by_power(lax.bitcast_convert_type(tensor_amax, jnp.float32), exponent)
    factor = jnp.where(is_usable, jnp.minimum(_LARGEST_NV / fraction, _LARGEST_NV), 1.0)
    tensor_scale = jnp.minimum(1 / factor * _power_of_two(exponent), _LARGEST_TENSOR_SCALE)

    # Multiplied by 1/6: compilers may divide by a constant or multiply by its inverse, with different last bits.
    wanted = _divide_by_power(lax.bitcast_convert_type(block_amax, jnp.float32), exponent) * (
        factor * np.float32(1 / 6)
    )
    scale = _round_elements(wanted, is_finite, np.dtype(jnp.float8_e4m3fn))
    divisor = scale.astype(jnp.float32)
    has_values = is_finite & (divisor > 0)
    multiplier = jnp.where(has_values, factor / jnp.where(has_values, divisor, 1.0), 0.0)
    scaled = _divide_by_power(x, exponent) * _repeat_in_blocks(multiplier, axis, block_size)
    if key is not None:
        scaled = _round_e2m1_at_random(scaled, draw_noise(key, x.shape, axis))
    return Blocks(_round_elements(scaled, _repeat_in_blocks(is_finite, axis, block_size), E2M1), scale, tensor_scale)


def quantize_squares(x: jax.Array, block_size: int) -> Quantized:
    """Rounds matrices to e4m3, with a float32 scale per square; the last squares of both axes may be partial.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3.2.
    """
    padded = pad_axes(x, (x.ndim - 2, x.ndim - 1), block_size)
    rows, columns = (length // block_size for length in padded.shape[-2:])
    # One axis at a time: with explicit shardings, JAX splits and merges no two at once.
    strips = padded.reshape(*x.shape[:-2], rows, block_size, padded.shape[-1])
    squares = strips.reshape(*strips.shape[:-1], columns, block_size)
    values, scale, _ = quantize_e4m3(squares, measure_amax(squares, (-3, -1)))
    values = values.reshape(strips.shape).reshape(padded.shape)[..., : x.shape[-2], : x.shape[-1]]
    return Quantized(values, scale.reshape(*x.shape[:-2], rows, columns))


def spread_over_axis(scale: jax.Array, axis: int, block_size: int, length: int) -> jax.Array:
    """Repeats the scales of blocks for the elements of an axis of a length, whose last block may be partial."""
    axis %= scale.ndim
    return lax.slice_in_dim(_repeat_in_blocks(scale, axis, block_size), 0, length, axis=axis)


def dequantize(blocks: Blocks, axis: int, dtype: Any = jnp.float32) -> jax.Array:
    """Multiplies values by their scales in float32, and casts to `dtype`; `axis` is divided into blocks."""
    values, scale, tensor_scale = blocks
    axis %= values.ndim
    block_size = values.shape[axis] // scale.shape[axis]
    x = values.astype(jnp.float32)
    if tensor_scale is not None:
        # The product of both narrow values is exact; scale * tensor_scale may underflow.
        return (x * _repeat_in_blocks(scale.astype(jnp.float32), axis, block_size) * tensor_scale).astype(dtype)
    # In two factors, since 2**-127 is subnormal.
    exponent = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    half = exponent >> 1
    first = jnp.where(exponent == _NAN_E8M0, jnp.nan, _power_of_two(half + 64))
    second = _power_of_two(exponent - half + 63)
    return (x * _repeat_in_blocks(first, axis, block_size) * _repeat_in_blocks(second, axis, block_size)).astype(dtype)


def pad_axes(x: jax.Array, axes: Sequence[int], block: int) -> jax.Array:
    """Pads axes with zeros to multiples of `block`."""
    widths = [(0, -length % block if n in axes else 0, 0) for n, length in enumerate(x.shape)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths) if any(missing for _, missing, _ in widths) else x


def draw_noise(key: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Draws 8 random bits per element, independent of the sharding."""
    # Four neighbors along an axis share a word, at a quarter of the cost of `jax.random.bits` for uint8.
    words = jax.random.bits(key, (*shape[:axis], -(-shape[axis] // 4), *shape[axis + 1 :]), jnp.uint32)
    quarters = jnp.moveaxis(lax.bitcast_convert_type(words, jnp.uint8), -1, axis + 1)
    joined = quarters.reshape(*shape[:axis], 4 * words.shape[axis], *shape[axis + 1 :])
    return lax.slice_in_dim(joined, 0, shape[axis], axis=axis)


def pack(values: jax.Array, axis: int) -> jax.Array:
    """Packs 4-bit values two to a byte (uint8). An axis of odd length is padded.

    Of floats, the first of two neighbors is in the low half of a byte. Of integers, the first half of the axis is in
    the low halves: XLA for TPUs fuses their shifts into a matmul, but writes interleaved values to memory.
    """
    axis %= values.ndim
    values = pad_axes(values, (axis,), 2)
    half = values.shape[axis] // 2
    if values.dtype == jnp.uint4:
        low, high = jnp.split(values.astype(jnp.uint8), 2, axis)
        return low | (high << 4)
    pairs = values.reshape(*values.shape[:axis], half, 2, *values.shape[axis + 1 :])
    return lax.bitcast_convert_type(jnp.moveaxis(pairs, axis + 1, -1), jnp.uint8)


def unpack(packed: jax.Array, axis: int, dtype: Any) -> jax.Array:
    """Inverse of `pack`; integers as uint8. Padding of an axis of odd length remains."""
    axis %= packed.ndim
    if dtype == jnp.uint4:
        # XLA for TPUs would write both operands of a concatenation to memory.
        halves = lax.broadcasted_iota(jnp.uint8, [2 if i == axis else 1 for i in range(packed.ndim + 1)], axis)
        pairs = (jnp.expand_dims(packed, axis) >> (halves * 4)) & 15
    else:
        # XLA of jax 0.10 splits the bytes of a constant wrongly and reads past its end; the barrier prevents that.
        pairs = jnp.moveaxis(lax.bitcast_convert_type(lax.optimization_barrier(packed), dtype), -1, axis + 1)
    return pairs.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])


def _magnitude(x: jax.Array) -> jax.Array:
    """Returns the bits of float32 without the sign, in the order of magnitudes; infinities and nans are last."""
    return lax.bitcast_convert_type(x, jnp.uint32) & _MAGNITUDE


def _max_of_blocks(bits: jax.Array, axis: int, block_size: int) -> jax.Array:
    shape = bits.shape
    assert shape[axis] % block_size == 0, f"{block_size} does not divide axis {axis} of {shape}"
    blocks = bits.reshape(*shape[:axis], shape[axis] // block_size, block_size, *shape[axis + 1 :])
    return jnp.max(blocks, axis=axis + 1)


def _repeat_in_blocks(of_blocks: jax.Array, axis: int, block_size: int) -> jax.Array:
    """Repeats per-block values for each element."""
    shape = of_blocks.shape
    repeated = jnp.broadcast_to(
        jnp.expand_dims(of_blocks, axis + 1), (*shape[: axis + 1], block_size, *shape[axis + 1 :])
    )
    return repeated.reshape(*shape[:axis], shape[axis] * block_size, *shape[axis + 1 :])


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Makes `2 ** (exponent - 127)` from bits, for 0 < exponent < 255; zero for 0."""
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def _divide_by_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Divides float32 by `2 ** (exponent - 127)`, for 0 <= exponent < 254; exact unless the result is subnormal."""
    words = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = words & _MAGNITUDE
    # Subnormal inputs are read as the integers of their bits, because some backends flush them.
    integer = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.uint32) | (words & ~np.uint32(_MAGNITUDE))
    is_subnormal = magnitude < 0x00800000
    number = jnp.where(is_subnormal, lax.bitcast_convert_type(integer, jnp.float32), x)
    return number * jnp.where(
        is_subnormal, _power_of_two(jnp.maximum(105 - exponent, 0)), _power_of_two(254 - exponent)
    )


def _round_elements(x: jax.Array, is_finite: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds to the nearest value of a format, ties to even, saturating; non-finite blocks become nan (e2m1: 0)."""
    # Scales that are rounded up need saturation too: XLA may read `x` more precisely than its amax was measured.
    limit = find_format(dtype).max
    otherwise = 0.0 if dtype == E2M1 else jnp.nan
    # An array and not a literal, so that tracing a nan back to its origin does not end here.
    return keep_rounding(lax.select(is_finite, jnp.clip(x, -limit, limit), jnp.full_like(x, otherwise)).astype(dtype))


def _round_e2m1_at_random(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds stochastically to e2m1."""
    size = jnp.minimum(jnp.abs(x), _LARGEST_E2M1)
    # The spacing is a power of two, so only the sum is inexact. Noise is strictly between 0 and 1, with mean 0.5, so
    # representable values do not change.
    spacing = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    inverse = jnp.where(size < 2, 2.0, jnp.where(size < 4, 1.0, 0.5))
    noise = (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-8)
    return jnp.copysign(jnp.floor(size * inverse + noise) * spacing, x)
