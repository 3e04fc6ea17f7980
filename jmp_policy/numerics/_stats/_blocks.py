"""Tensors as blocks of few numbers, for small counters and short sums, with their leading axes as they are."""

import math

import jax
import numpy as np
from jax import lax

from ..._base import at_least_float32


def widen(x: jax.Array) -> jax.Array:
    """A tensor in float32, or in float64 if it is that, with every subnormal number.

    >>> widen(jax.numpy.bfloat16([1.0, 1e-40])).dtype
    dtype('float32')
    """
    if x.dtype != jax.numpy.bfloat16:
        return lax.convert_element_type(x, at_least_float32(x.dtype))
    # Its subnormal numbers are those of float32, which a conversion may flush.
    bits = lax.convert_element_type(lax.bitcast_convert_type(x, np.uint16), np.uint32)
    return lax.bitcast_convert_type(bits << np.uint32(16), np.float32)


def split_blocks(x: jax.Array, length: int, *, keeps_last: bool = False) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits the last axes so that all after the first split make blocks of at most so many numbers.

    No axes are ever joined, and those before stay: a tensor that is sharded along them is looked at where it is.

    Args:
      x: at least one axis, and no axis of length zero.
      length: of the longest block.
      keeps_last: whether blocks are made of the axes before the last one, which stays. A TPU, whose vectors lie along
        the last axis, then adds up vectors, where it would have to turn them; the compiler needs a second for that,
        and for the other up to forty.

    Returns:
      The tensor, with a first axis of length 1, filled with zeros where an axis has no good divisor; and the axes of
      a block.

    >>> blocks, axes = split_blocks(jax.numpy.ones((8, 512, 4, 16)), 255)
    >>> blocks.shape, axes
    ((1, 8, 256, 2, 4, 16), (3, 4, 5))
    >>> blocks, axes = split_blocks(jax.numpy.ones((8, 512, 4, 16)), 255, keeps_last=True)
    >>> blocks.shape, axes
    ((1, 8, 16, 32, 4, 16), (3, 4))
    """
    if keeps_last and x.ndim == 1:
        x = lax.expand_dims(x, (0,))
    shape = x.shape
    first = end = x.ndim - keeps_last
    while first and shape[first - 1] <= length:
        first -= 1
        length //= shape[first]
    if first and length > 1:
        shape, end = (*shape[: first - 1], *_split_axis(shape[first - 1], length), *shape[first:]), end + 1
        missing = math.prod(shape) // (x.size // x.shape[first - 1]) - x.shape[first - 1]
        if missing:
            widths = [(0, missing if axis == first - 1 else 0, 0) for axis in range(x.ndim)]
            x = lax.pad(x, x.dtype.type(0), widths)
    return lax.reshape(x, (1, *shape)), tuple(range(first + 1, end + 1))


def _split_axis(axis: int, length: int) -> tuple[int, int]:
    """How many blocks of which length an axis becomes, or what is a little longer."""
    divisor = max(size for size in range(1, length + 1) if axis % size == 0)
    if 2 * divisor >= length:
        return axis // divisor, divisor
    blocks = -(-axis // length)
    return blocks, -(-axis // blocks)
