"""What is recorded of a tensor, and how records merge."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HISTOGRAM_BINS = 64
FIRST_EXPONENT = -46
_FLOAT32 = np.dtype("float32")
_NO_EXPONENT = -(2**20)


class Record(NamedTuple):
    counts: jax.Array
    extremes: jax.Array
    exponents: jax.Array
    sums: jax.Array


@dataclasses.dataclass(frozen=True)
class Meter:
    formats: tuple[str, ...]
    histogram: bool = True
    dtype: np.dtype = _FLOAT32

    def empty(self, rows: int) -> Record:
        columns = 4 + 3 * len(self.formats) + HISTOGRAM_BINS * self.histogram
        extremes = jnp.broadcast_to(jnp.array([0.0, jnp.inf], self.dtype), (rows, 2))
        sums = jnp.zeros((rows, 1 + 2 * len(self.formats), 2), self.dtype)
        counts = jnp.zeros((rows, 2, columns), jnp.uint32)
        return Record(counts, extremes, jnp.full((rows,), _NO_EXPONENT, jnp.int32), sums)


def merge(a: Record, b: Record) -> Record:
    low = a.counts[..., 0, :] + b.counts[..., 0, :]
    high = a.counts[..., 1, :] + b.counts[..., 1, :] + (low < a.counts[..., 0, :]).astype(jnp.uint32)
    amax = jnp.maximum(a.extremes[..., 0], b.extremes[..., 0])
    least = jnp.minimum(a.extremes[..., 1], b.extremes[..., 1])
    exponents = jnp.maximum(a.exponents, b.exponents)
    dtype = a.sums.dtype

    def scale(record: Record) -> jax.Array:
        shift = jnp.maximum(record.exponents - exponents, -60).astype(dtype)
        return record.sums * jnp.exp2(2 * shift)[..., None, None]

    left, right = scale(a), scale(b)
    total = left[..., 0] + right[..., 0]
    part = total - left[..., 0]
    rest = (left[..., 0] - (total - part)) + (right[..., 0] - part) + left[..., 1] + right[..., 1]
    sums = jnp.stack([total, rest], -1)
    return Record(jnp.stack([low, high], -2), jnp.stack([amax, least], -1), exponents, sums)


def fold(record: Record, axis: int = 0) -> Record:
    parts = [jax.tree.map(lambda leaf, n=n: jnp.take(leaf, n, axis), record) for n in range(record.counts.shape[axis])]
    total, *others = parts
    for part in others:
        total = merge(total, part)
    return total
