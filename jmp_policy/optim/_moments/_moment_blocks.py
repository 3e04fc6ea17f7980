"""Moments as 8-bit codes with a scale for each block, updated in chunks."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from ._moment_codes import MomentCode

_ROWS, _COLUMNS = 32, 8  # TPUs store bytes in tiles of 32 rows, and copy them to split columns

Shape = tuple[int, ...]


class Blocks(NamedTuple):
    """A moment in blocks: uint8 `codes` of its shape, and the float32 `scale` of each block."""

    codes: jax.Array
    scale: jax.Array


def choose_sides(shape: Shape, block_size: int) -> Shape | None:
    """Returns the sides of a block of at most `block_size` elements: powers of two that divide the axes.

    None if only blocks of less than a quarter of that size fit.

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
    """Quantizes a float32 moment. `noise` is for stochastic rounding, as in `DynamicCode.encode`.

    The scale of a block with a nan is nan, and with an infinity infinite, so that dequantized blocks are all nan.
    """
    scale = _find_scales(x, sides)
    around = _spread(scale, sides)
    relative = x / jnp.where(around == 0, 1, around)
    return Blocks(code.encode(relative) if noise is None else code.encode(relative, noise), scale)


def dequantize(blocks: Blocks, code: MomentCode, sides: Shape) -> jax.Array:
    return code.decode(blocks.codes) * _spread(blocks.scale, sides)


def read_sides(blocks: Blocks, shape: Shape) -> Shape:
    """Returns the sides of the blocks of a moment of this shape, from the shapes of its arrays."""
    sides = tuple(length // max(count, 1) for length, count in zip(shape, blocks.scale.shape, strict=True))
    is_whole = scale_shape(shape, sides) == blocks.scale.shape and all(side & (side - 1) == 0 for side in sides)
    if not is_whole or _list_varying(blocks.codes) != _list_varying(blocks.scale):
        raise ValueError(
            f"A moment of shape {shape} has scales of shape {blocks.scale.shape} here, which do not belong to whole "
            "blocks. Split a parameter over devices along multiples of the sides of its blocks (32 rows, 8 columns), "
            "and scales like their parameter: jmp_policy.sharding.state_shardings(tx, params, specs)."
        )
    return sides


def _list_varying(x: jax.Array) -> frozenset[Any]:
    """Returns the axes of `jax.shard_map` along which an array is split."""
    return jax.typeof(x).manual_axis_type.varying


def scale_shape(shape: Shape, sides: Shape) -> Shape:
    return tuple(length // side for length, side in zip(shape, sides, strict=True))


def place_alike(scale: jax.Array, moment: Any) -> jax.Array:
    """Puts a new scale on the devices of its moment, if they hold whole blocks."""
    # A tracer composes an error message over the whole jaxpr when it is asked for its sharding.
    sharding = None if isinstance(moment, Tracer) else getattr(moment, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return scale
    try:
        sharding.shard_shape(scale.shape)
    except ValueError:
        return scale
    return jax.device_put(scale, sharding)


def _find_scales(x: jax.Array, sides: Shape) -> jax.Array:
    """Returns the element of each block with the largest magnitude, with its sign.

    Divided by it, that element is 1, which all codes contain. They lack -1: with unsigned scales a moment would lose
    0.7 % of the scale of a negative block in each step.
    """
    # Compares integers with the sign in the last bit, because a maximum of floats may lose a nan on CPUs.
    words = lax.bitcast_convert_type(x, jnp.uint32)
    bits = (words << 1) | (words >> 31)
    for axis, side in enumerate(sides[:-1]):
        if side > 1:
            bits = bits.reshape(*bits.shape[:axis], -1, side, *bits.shape[axis + 1 :]).max(axis + 1)
    step = 1
    while step < sides[-1]:  # log-step maximum over neighbors: reshaping columns is expensive on TPUs
        bits = lax.max(bits, _shift(bits, -step))
        step *= 2
    bits = bits[..., :: sides[-1]]
    return lax.bitcast_convert_type((bits >> 1) | (bits << 31), jnp.float32)


def _spread(scale: jax.Array, sides: Shape) -> jax.Array:
    """Returns the scale of the block of each element."""
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
    """Moves each column by `by` places and fills with zeros."""
    return lax.pad(bits, bits.dtype.type(0), [*[(0, 0, 0)] * (bits.ndim - 1), (by, -by, 0)])


_PARTS = 8  # each long axis may be split over up to 8 devices such that every device has a shard of every chunk
_SMALL = 2**16  # a chunk of this size takes less than a megabyte


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A partition of an array into chunks, where each chunk has the same rows of each of several parts of the array.

    An axis that is cut becomes three: its parts, the chunks of a part, and the blocks of a chunk. A device that holds
    whole parts holds a shard of every chunk, so that chunks need no communication.

    Attributes:
      parts: the number of parts of each axis.
      counts: the number of chunks along each axis.
    """

    parts: Shape
    counts: Shape

    @property
    def count(self) -> int:
        return math.prod(self.counts)

    def split(self, x: jax.Array) -> jax.Array:
        """Reshapes an array to three axes for each axis that is cut, without moving elements."""
        shape: list[int] = []
        for length, parts, count in zip(x.shape, self.parts, self.counts, strict=True):
            shape += [length] if count == 1 else [parts, count, length // (parts * count)]
        return x.reshape(shape)

    def take(self, split: jax.Array, i: jax.Array) -> jax.Array:
        """Returns chunk `i` of a split array, with the axes of the array."""
        starts, sizes, shape = self._place(split.shape, i)
        return lax.dynamic_slice(split, starts, sizes).reshape(shape)

    def put(self, split: jax.Array, chunk: jax.Array, i: jax.Array) -> jax.Array:
        """Replaces chunk `i` of a split array."""
        starts, sizes, _ = self._place(split.shape, i)
        return lax.dynamic_update_slice(split, chunk.reshape(sizes), starts)

    def shape(self, shape: Shape) -> Shape:
        """The shape of a chunk of an array."""
        return tuple(length // count for length, count in zip(shape, self.counts, strict=True))

    def _place(self, split: Shape, i: jax.Array) -> tuple[list[jax.Array], list[int], list[int]]:
        """Returns the start of chunk `i` in a split array, its sizes there, and its shape."""
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
    """Chooses about `least` chunks of whole blocks; fewer if the axes have too few divisors.

    >>> plan_chunks((4096, 1024), (32, 8), 16)
    Chunks(parts=(8, 8), counts=(16, 1))
    >>> plan_chunks((4096, 1024), (32, 8), 128).counts
    (16, 8)
    """
    blocks = [length // side for length, side in zip(shape, sides, strict=True)]
    counts = [1] * len(shape)
    rows, columns = range(len(shape) - 2, -1, -1), [len(shape) - 1]
    # Rows are free to cut. Cuts that leave too few parts for the devices come last, and only if chunks are still large,
    # because each chunk would be gathered.
    order = [(rows, _PARTS), (columns, _PARTS), (rows, 1), (columns, 1)]
    for axes, parts in order if cuts_columns else order[:1]:
        if parts == 1 and math.prod(shape) <= _SMALL * math.prod(counts):
            break
        for axis in axes:
            need = math.ceil(least / math.prod(counts))
            counts[axis] *= _choose_divisor(blocks[axis] // counts[axis], need, parts)
    # At most `_PARTS` parts of the columns: short contiguous runs are slow on CPUs.
    parts = [n // count for n, count in zip(blocks, counts, strict=True)]
    parts[-1] = max(d for d in range(1, _PARTS + 1) if parts[-1] % d == 0)
    return Chunks(tuple(parts), tuple(counts))


def _choose_divisor(n: int, need: int, parts: int) -> int:
    """Returns the smallest divisor of `n` from `need` on that leaves `parts` parts, or the largest below."""
    divisors = [d for d in range(1, min(n, 4 * need) + 1) if n % d == 0 and (d == 1 or n // d >= parts)]
    return min((d for d in divisors if d >= need), default=max(divisors))
