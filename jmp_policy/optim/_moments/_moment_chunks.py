"""Large parameters taken piece by piece, so that no whole float32 copy of a moment is ever alive."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

Shape = tuple[int, ...]

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
