"""Moments as 8-bit codes with a scale for each block, updated in chunks."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from ._moment_codes import MomentCode

_ROWS, _COLUMNS = 32, 8  # TPUs store bytes in tiles of 32 rows, and copy them to split columns

Shape = tuple[int, ...]


class MomentBlocks(NamedTuple):
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


def quantize_moment(x: jax.Array, code: MomentCode, sides: Shape, noise: jax.Array | None = None) -> MomentBlocks:
    """Quantizes a float32 moment. `noise` is for stochastic rounding, as in `DynamicCode.encode`.

    The scale of a block with a nan is nan, and with an infinity infinite, so that no dequantized element is finite.
    """
    scale = _find_largest(x, sides)
    relative = x / _spread_scales(jnp.where(scale == 0, 1, scale), sides)
    return MomentBlocks(code.encode(relative) if noise is None else code.encode(relative, noise), scale)


def dequantize_moment(blocks: MomentBlocks, code: MomentCode, sides: Shape) -> jax.Array:
    return code.decode(blocks.codes) * _spread_scales(blocks.scale, sides)


def read_sides(blocks: MomentBlocks, shape: Shape) -> Shape:
    """Returns the sides of the blocks of a moment of this shape, from the shapes of its arrays."""
    sides = tuple(length // max(count, 1) for length, count in zip(shape, blocks.scale.shape, strict=True))
    is_whole = scale_shape(shape, sides) == blocks.scale.shape and all(side & (side - 1) == 0 for side in sides)
    split, scale_split = (jax.typeof(x).manual_axis_type.varying for x in blocks)  # axes of `jax.shard_map`
    if not is_whole or split != scale_split:
        raise ValueError(
            f"A moment of shape {shape} has scales of shape {blocks.scale.shape} here, which do not belong to whole "
            "blocks. Split a parameter over devices along multiples of the sides of its blocks (32 rows, 8 columns), "
            "and scales like their parameter: jmp_policy.sharding.state_shardings(tx, params, specs)."
        )
    return sides


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


@functools.partial(jax.jit, static_argnums=1, inline=True)  # eager calls then compile the branches once
def _find_largest(x: jax.Array, sides: Shape) -> jax.Array:
    """Returns the element of each block with the largest magnitude, with its sign.

    Divided by it, that element is 1, which all codes contain. They lack -1: with unsigned scales a moment would lose
    0.7 % of the scale of a negative block in each step.
    """
    # Compares integers with the sign in the last bit, because a maximum of floats may lose a nan on CPUs.
    words = lax.bitcast_convert_type(x, jnp.uint32)
    bits = (words << 1) | (words >> 31)
    # Columns last: XLA:CPU reduces leading axes as vectors, and columns one number after the other.
    for axis, side in enumerate(sides[:-1]):
        bits = _max_by_reshape(bits, axis, side)
    # XLA:CPU emits slow code for shifts. For a single row of blocks it would also fuse the optimizer into the maximum,
    # and then copy all arrays in each iteration of a loop.
    by_shifts = functools.partial(_max_by_shifts, side=sides[-1])
    by_reshape = functools.partial(_max_by_reshape, axis=len(sides) - 1, side=sides[-1])
    bits = lax.platform_dependent(bits, cpu=by_reshape, default=by_shifts)
    return lax.bitcast_convert_type((bits >> 1) | (bits << 31), jnp.float32)


def _max_by_reshape(bits: jax.Array, axis: int, side: int) -> jax.Array:
    while side > 1:  # in steps of 32: to reduce more at once, XLA:CPU writes all elements to memory first
        part = min(side, 32)
        bits = bits.reshape(*bits.shape[:axis], -1, part, *bits.shape[axis + 1 :]).max(axis + 1)
        side //= part
    return bits


def _max_by_shifts(bits: jax.Array, side: int) -> jax.Array:
    step = 1
    while step < side:  # log-step maximum over neighbors: reshaping columns is expensive on TPUs
        bits = lax.max(bits, _shift(bits, -step))
        step *= 2
    return bits[..., ::side]


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _spread_scales(scale: jax.Array, sides: Shape) -> jax.Array:
    """Returns the scale of the block of each element."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    by_shifts = functools.partial(_repeat_by_shifts, times=sides[-1])
    by_reshape = functools.partial(_repeat_by_reshape, axis=len(sides) - 1, times=sides[-1])
    bits = lax.platform_dependent(bits, cpu=by_reshape, default=by_shifts)
    for axis, side in enumerate(sides[:-1]):
        bits = _repeat_by_reshape(bits, axis, side)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _repeat_by_reshape(bits: jax.Array, axis: int, times: int) -> jax.Array:
    if times == 1:
        return bits
    wide = (*bits.shape[: axis + 1], times, *bits.shape[axis + 1 :])
    spread = lax.broadcast_in_dim(bits, wide, [i for i in range(len(wide)) if i != axis + 1])
    return spread.reshape(*bits.shape[:axis], -1, *bits.shape[axis + 1 :])


def _repeat_by_shifts(bits: jax.Array, times: int) -> jax.Array:
    bits = lax.pad(bits, jnp.int32(0), [*[(0, 0, 0)] * (bits.ndim - 1), (0, times - 1, times - 1)])
    step = 1
    while step < times:
        bits = lax.bitwise_or(bits, _shift(bits, step))
        step *= 2
    return bits


def _shift(bits: jax.Array, by: int) -> jax.Array:
    """Moves each column by `by` places and fills with zeros."""
    return lax.pad(bits, bits.dtype.type(0), [*[(0, 0, 0)] * (bits.ndim - 1), (by, -by, 0)])


def number_positions(shape: Shape) -> jax.Array:
    return lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)


def scramble(words: jax.Array) -> jax.Array:
    """Hashes uint32 to 16 bits that look random.

    Source: the finalizer of MurmurHash3, by Appleby.
    """
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return (words >> 16).astype(jnp.uint16)


def make_thresholds(positions: jax.Array, step: jax.Array, salt: int | np.uint32) -> jax.Array:
    """Returns 16-bit noise that differs for each position, and at each position goes through all values evenly.

    Source: Weyl, Über die Gleichverteilung von Zahlen mod. Eins, 1916 (multiples of the golden ratio, modulo 1).
    """
    offset = step.astype(jnp.uint32) * np.uint32(2654435769)  # 2**32 / golden ratio
    # As an operand, which a barrier makes of the constant: XLA compiles equal kernels once for all leaves of a shape.
    salt = lax.optimization_barrier(jnp.uint32(salt))
    return scramble(positions + salt * np.uint32(0x9E3779B1)) + (offset >> 16).astype(jnp.uint16)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A partition of an array into chunks: runs of blocks along some axes.

    If a run does not divide an axis, the last run overlaps the one before, and only its new blocks are written. An axis
    may have several parts, whose runs are updated together: devices that hold whole parts need no communication.

    Attributes:
      blocks: the number of blocks along each axis.
      parts: the number of parts of each axis.
      runs: the number of blocks of a chunk along each axis, in each part.
    """

    blocks: Shape
    parts: Shape
    runs: Shape

    @property
    def counts(self) -> Shape:
        """The number of chunks along each axis."""
        return tuple(-(-n // (part * run)) for n, part, run in zip(self.blocks, self.parts, self.runs, strict=True))

    @property
    def count(self) -> int:
        return math.prod(self.counts)

    def split(self, x: jax.Array) -> jax.Array:
        """Reshapes an array to two axes for each axis with several parts, without moving elements."""
        return x.reshape(self._split_shape(x.shape))

    def take(self, split: jax.Array, i: jax.Array) -> jax.Array:
        """Returns chunk `i` of a split array, with the axes of the array."""
        starts, sizes, _ = self._place(split.shape, i)
        return self._merge(lax.dynamic_slice(split, starts, sizes, allow_negative_indices=False))

    def number(self, shape: Shape, i: jax.Array) -> jax.Array:
        """Returns the positions of the elements of chunk `i` in an array of this shape, counted by rows."""
        split = self._split_shape(shape)
        starts, sizes, _ = self._place(split, i)
        positions = jnp.zeros(sizes, jnp.uint32)
        for axis, start in enumerate(starts):
            along = lax.broadcasted_iota(jnp.uint32, sizes, axis) + start.astype(jnp.uint32)
            positions += along * np.uint32(math.prod(split[axis + 1 :]) % 2**32)
        return self._merge(positions)

    def put(self, split: jax.Array, chunk: jax.Array, i: jax.Array) -> jax.Array:
        """Replaces chunk `i` of a split array, except for blocks of the chunk before."""
        starts, sizes, overlaps = self._place(split.shape, i)
        chunk = chunk.reshape(sizes)
        for axis, overlap in overlaps.items():
            is_old = lax.broadcasted_iota(i.dtype, sizes, axis) < overlap
            chunk = lax.select(is_old, lax.dynamic_slice(split, starts, sizes, allow_negative_indices=False), chunk)
        return lax.dynamic_update_slice(split, chunk, starts, allow_negative_indices=False)

    def _split_shape(self, shape: Shape) -> Shape:
        # Without axes of length 1: XLA would choose another layout and copy the array.
        pairs = zip(shape, self.parts, strict=True)
        return tuple(n for length, part in pairs for n in ([length] if part == 1 else [part, length // part]))

    def _merge(self, chunk: jax.Array) -> jax.Array:
        lengths = iter(chunk.shape)
        return chunk.reshape([next(lengths) if part == 1 else next(lengths) * next(lengths) for part in self.parts])

    def _place(self, split: Shape, i: jax.Array) -> tuple[list[jax.Array], list[int], dict[int, jax.Array]]:
        """Returns the start of chunk `i` in a split array, its sizes, and its overlap with the one before by axis."""
        starts, sizes, overlaps = [], [], {}
        zero = jnp.zeros_like(i)
        for blocks, part, run, count in zip(self.blocks, self.parts, self.runs, self.counts, strict=True):
            if part > 1:
                starts.append(zero)
                sizes.append(part)
            length = split[len(sizes)]
            size = length * part // blocks * run
            start = lax.rem(i, jnp.full_like(i, count)) * size
            i = lax.div(i, jnp.full_like(i, count))
            if count * size > length:
                inside = lax.min(start, jnp.full_like(i, length - size))
                overlaps[len(sizes)] = start - inside
                start = inside
            starts.append(start if count > 1 else zero)
            sizes.append(size)
        return starts, sizes, overlaps


def plan_chunks(shape: Shape, sides: Shape, largest: int, devices: int = 1, *, cuts_columns: bool = True) -> Chunks:
    """Cuts leading axes until a chunk has at most `largest` elements on each of a number of devices.

    Columns are cut last, if one row of blocks is larger than that.

    >>> plan_chunks((4096, 1024), (32, 8), 2**16)
    Chunks(blocks=(128, 128), parts=(1, 1), runs=(2, 128))
    >>> plan_chunks((4096, 1024), (32, 8), 2**16, devices=4)
    Chunks(blocks=(128, 128), parts=(4, 1), runs=(2, 128))
    """
    blocks = [length // side for length, side in zip(shape, sides, strict=True)]
    parts, runs = [1] * len(shape), list(blocks)
    size = math.prod(shape)
    for axis, n in enumerate(blocks if cuts_columns else blocks[:-1]):
        least = math.ceil(size / (largest * devices))
        if least == 1:
            break
        parts[axis] = math.gcd(n, devices)
        own = n // parts[axis]
        runs[axis] = own // min(least, own)
        size = size * runs[axis] // own
    return Chunks(tuple(blocks), tuple(parts), tuple(runs))
