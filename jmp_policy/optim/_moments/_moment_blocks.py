"""Arrays of moments as 8-bit codes with a scale for each block, updated piece by piece."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from ._moment_codes import MomentCode

_ROWS, _COLUMNS = 32, 8
"""The sides of a block. TPUs keep bytes in tiles of 32 rows, and cannot split their columns without a copy."""

Shape = tuple[int, ...]


class Blocks(NamedTuple):
    """A moment, in blocks.

    Attributes:
      codes: uint8 of the shape of the moment.
      scale: the largest magnitude of each block, float32; each axis is as many times shorter as a block is long.
    """

    codes: jax.Array
    scale: jax.Array


def choose_sides(shape: Shape, block_size: int) -> Shape | None:
    """How many numbers of each axis a block has.

    Args:
      shape: of the moment.
      block_size: how many numbers a block has at most, a power of two.

    Returns:
      Powers of two that divide the axes; `None` where blocks of a quarter of that size do not fit.

    >>> choose_sides((768, 3072), 256), choose_sides((768, 12, 64), 256), choose_sides((3, 3), 256)
    ((32, 8), (8, 4, 8), None)
    """
    sides = [1] * len(shape)
    last = len(shape) - 1
    order = [(last - 1, _ROWS), (last, _COLUMNS), *((axis, _ROWS) for axis in range(last - 2, -1, -1))]
    order += [(axis, block_size) for axis in range(last, -1, -1)]
    left = block_size
    for axis, most in order:
        if axis >= 0:
            divisor = shape[axis] & -shape[axis]  # the largest power of two that divides it
            grown = max(sides[axis], min(divisor, most, sides[axis] * left))
            left //= grown // sides[axis]
            sides[axis] = grown
    return tuple(sides) if left <= 4 else None


def quantize(x: jax.Array, code: MomentCode, sides: Shape, noise: jax.Array | None = None) -> Blocks:
    """Writes a moment in blocks.

    Args:
      x: float32, whose axes are multiples of `sides`.
      code: what a number is written as, relative to the largest magnitude of its block.
      sides: of a block.
      noise: for stochastic rounding, as `MomentCode.encode` takes it.

    Returns:
      The blocks. The scale of a block with a nan is nan, with an infinity infinite, so that all of its numbers are
      nan once they are read.
    """
    scale = _find_scales(x, sides)
    around = _spread(scale, sides)
    relative = x / jnp.where(around == 0, 1, around)
    return Blocks(code.encode(relative) if noise is None else code.encode(relative, noise), scale)


def dequantize(blocks: Blocks, code: MomentCode, sides: Shape) -> jax.Array:
    """The float32 numbers of a moment in blocks."""
    return code.decode(blocks.codes) * _spread(blocks.scale, sides)


def read_sides(blocks: Blocks, shape: Shape) -> Shape:
    """The sides of the blocks of a moment of this shape, by the shapes of its arrays.

    Raises:
      ValueError: its blocks are not whole, or its scales not on the device that has its codes.
    """
    sides = tuple(length // max(count, 1) for length, count in zip(shape, blocks.scale.shape, strict=True))
    is_whole = scale_shape(shape, sides) == blocks.scale.shape and all(side & (side - 1) == 0 for side in sides)
    if not is_whole or _list_varying(blocks.codes) != _list_varying(blocks.scale):
        raise ValueError(
            f"A moment of shape {shape} has scales of shape {blocks.scale.shape} here, which are not those of whole "
            "blocks. Split a parameter over devices along multiples of the sides of its blocks (32 rows, 8 columns), "
            "and scales as their parameter: jmp_policy.sharding.state_shardings(tx, params, specs) says where all lie."
        )
    return sides


def _list_varying(x: jax.Array) -> frozenset[Any]:
    """The axes of `jax.shard_map` along which an array is split."""
    return jax.typeof(x).manual_axis_type.varying


def scale_shape(shape: Shape, sides: Shape) -> Shape:
    """The shape of the scales of a moment."""
    return tuple(length // side for length, side in zip(shape, sides, strict=True))


def place_alike(scale: jax.Array, moment: Any) -> jax.Array:
    """Places a first scale on devices as its moment lies there, if whole blocks do."""
    sharding = getattr(moment, "sharding", None)
    is_traced = isinstance(moment, Tracer)
    if is_traced or not isinstance(sharding, NamedSharding):
        return scale
    try:
        sharding.shard_shape(scale.shape)
    except ValueError:
        return scale
    return jax.device_put(scale, sharding)


def _find_scales(x: jax.Array, sides: Shape) -> jax.Array:
    """The number of each block whose magnitude is largest, with its sign.

    Divided by it, that number is 1, which all codes have: -1 they lack, and a moment that is written every step would
    lose .7 % of a negative block's scale each time. Compared as integers with the sign in the last bit, since a maximum
    of floats may lose a nan on CPUs.
    """
    words = lax.bitcast_convert_type(x, jnp.uint32)
    bits = (words << 1) | (words >> 31)
    for axis, side in enumerate(sides[:-1]):
        if side > 1:
            bits = bits.reshape(*bits.shape[:axis], -1, side, *bits.shape[axis + 1 :]).max(axis + 1)
    step = 1
    while step < sides[-1]:  # neighbours, then neighbours of neighbours: on TPUs, columns are dear to reshape
        bits = lax.max(bits, _shift(bits, -step))
        step *= 2
    bits = bits[..., :: sides[-1]]
    return lax.bitcast_convert_type((bits >> 1) | (bits << 31), jnp.float32)


def _spread(scale: jax.Array, sides: Shape) -> jax.Array:
    """The scale of the block of each number."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    if sides[-1] > 1:
        gap = sides[-1] - 1
        bits = lax.pad(bits, jnp.int32(0), [*[(0, 0, 0)] * (bits.ndim - 1), (0, gap, gap)])
    step = 1
    while step < sides[-1]:
        bits = lax.bitwise_or(bits, _shift(bits, step))
        step *= 2
    for axis, side in enumerate(sides[:-1]):
        if side > 1:
            wide = (*bits.shape[: axis + 1], side, *bits.shape[axis + 1 :])
            bits = lax.broadcast_in_dim(bits, wide, [i for i in range(len(wide)) if i != axis + 1])
            bits = bits.reshape(*bits.shape[:axis], -1, *bits.shape[axis + 2 :])
    return lax.bitcast_convert_type(bits, jnp.float32)


def _shift(bits: jax.Array, by: int) -> jax.Array:
    """The array with each column moved by so many places, and zeros where none came."""
    return lax.pad(bits, bits.dtype.type(0), [*[(0, 0, 0)] * (bits.ndim - 1), (by, -by, 0)])


_PARTS = 8
"""Over so many devices each axis may be split, if it is long enough, and still every device has its part of a chunk."""

_SMALL = 2**16
"""A chunk with no more numbers takes less than a megabyte."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How an array is cut: a chunk has the same rows of each of several parts of the array.

    An axis that is cut counts its parts, the chunks of a part, and the blocks of a chunk. A device that has whole parts
    has a part of every chunk: it waits for no other, and sends nothing.

    Attributes:
      parts: into how many parts each axis falls.
      counts: how many chunks there are along each axis.
    """

    parts: Shape
    counts: Shape

    @property
    def count(self) -> int:
        """The number of chunks."""
        return math.prod(self.counts)

    def split(self, x: jax.Array) -> jax.Array:
        """The array with three axes for each that is cut; no number is moved."""
        shape: list[int] = []
        for length, parts, count in zip(x.shape, self.parts, self.counts, strict=True):
            shape += [length] if count == 1 else [parts, count, length // (parts * count)]
        return x.reshape(shape)

    def take(self, split: jax.Array, i: jax.Array) -> jax.Array:
        """Chunk `i` of a split array, which has as many axes as the array has."""
        starts, sizes, shape = self._place(split.shape, i)
        return lax.dynamic_slice(split, starts, sizes).reshape(shape)

    def put(self, split: jax.Array, chunk: jax.Array, i: jax.Array) -> jax.Array:
        """The split array with another chunk `i`."""
        starts, sizes, _ = self._place(split.shape, i)
        return lax.dynamic_update_slice(split, chunk.reshape(sizes), starts)

    def shape(self, shape: Shape) -> Shape:
        """The shape of a chunk of an array."""
        return tuple(length // count for length, count in zip(shape, self.counts, strict=True))

    def _place(self, split: Shape, i: jax.Array) -> tuple[list[jax.Array], list[int], list[int]]:
        """Where chunk `i` begins in a split array, its sizes there, and its shape."""
        starts, sizes, shape, axis = [], [], [], 0
        zero = jnp.zeros_like(i)
        for parts, count in zip(self.parts, self.counts, strict=True):
            if count == 1:
                starts.append(zero)
                sizes.append(split[axis])
                shape.append(split[axis])
                axis += 1
                continue
            starts += [zero, lax.rem(i, jnp.full_like(i, count)), zero]
            sizes += [parts, 1, split[axis + 2]]
            shape.append(parts * split[axis + 2])
            i = lax.div(i, jnp.full_like(i, count))
            axis += 3
        return starts, sizes, shape


def plan_chunks(shape: Shape, sides: Shape, least: int, *, cuts_columns: bool = True) -> Chunks:
    """Chooses chunks of whole blocks.

    Args:
      shape: of the array.
      sides: of its blocks.
      least: how many chunks there should be; there are fewer where the axes have too few divisors.
      cuts_columns: whether the last axis may be cut.

    >>> plan_chunks((4096, 1024), (32, 8), 16)
    Chunks(parts=(8, 8), counts=(16, 1))
    >>> plan_chunks((4096, 1024), (32, 8), 128).counts
    (16, 8)
    """
    blocks = [length // side for length, side in zip(shape, sides, strict=True)]
    counts = [1] * len(shape)
    rows, columns = range(len(shape) - 2, -1, -1), [len(shape) - 1]
    # Rows first, which cost nothing to cut anywhere. What would be left with too few parts for the devices comes last,
    # and only if chunks are still large: each would be gathered.
    order = [(rows, _PARTS), (columns, _PARTS), (rows, 1), (columns, 1)]
    for axes, parts in order if cuts_columns else order[:1]:
        if parts == 1 and math.prod(shape) <= _SMALL * math.prod(counts):
            break
        for axis in axes:
            need = math.ceil(least / math.prod(counts))
            counts[axis] *= _choose_divisor(blocks[axis] // counts[axis], need, parts)
    # No more parts of the columns than that, for the runs of a part are contiguous, and short ones are slow on CPUs.
    parts = [n // count for n, count in zip(blocks, counts, strict=True)]
    parts[-1] = max(d for d in range(1, _PARTS + 1) if parts[-1] % d == 0)
    return Chunks(tuple(parts), tuple(counts))


def _choose_divisor(n: int, need: int, parts: int) -> int:
    """The smallest divisor of `n` that is `need` or a little more and leaves so many parts, or the largest below."""
    divisors = [d for d in range(1, min(n, 4 * need) + 1) if n % d == 0 and (d == 1 or n // d >= parts)]
    return min((d for d in divisors if d >= need), default=max(divisors))
