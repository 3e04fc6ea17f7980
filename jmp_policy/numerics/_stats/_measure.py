"""Measures one tensor in two passes: `_counting.py` counts elements, `_what_if.py` adds up squared errors."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base import at_least_float32
from ._block_errors import BlockErrors, add_block_errors, make_no_errors
from ._counting import (
    FIRST_COUNTS,
    HISTOGRAM_BINS,
    LONGEST_BLOCK,
    Counters,
    count,
    count_nothing,
    read_counts,
    read_most,
)
from ._record import Record, float_dtype, join, make_empty, mantissa_bits
from ._what_if import (
    FloatFormat,
    Format,
    IntegerFormat,
    ScaledFormat,
    Sums,
    add_squares,
    convert_units,
    find_exponent,
    parse_format,
    split_blocks,
    widen,
)

_FLOAT32 = np.dtype(np.float32)


class PartialStats(NamedTuple):
    """The result of the passes over a tensor. Its shapes depend on the dtype alone, so that tensors can be stacked."""

    counters: Counters
    sums: Sums
    errors: list[BlockErrors]


@dataclasses.dataclass(frozen=True)
class StatsSpec:
    """Formats and counts to measure of each tensor.

    Attributes:
      formats: canonical names, as of `parse_format`.
      histogram: whether to count exponents.
      dtype: of extremes and sums: float64 where a program has float64 values, else float32.
    """

    formats: tuple[str, ...]
    histogram: bool = True
    dtype: np.dtype = _FLOAT32

    @property
    def columns(self) -> int:
        """The number of counts: four, three for each format, and the histogram."""
        return FIRST_COUNTS + 3 * len(self.formats) + HISTOGRAM_BINS * self.histogram

    def empty(self, rows: int) -> Record:
        """Returns the record of tensors that were never measured: the neutral element of `merge`."""
        return make_empty(rows, self.columns, 1 + 2 * len(self.formats), self.dtype)

    def measure(self, x: jax.Array) -> Record:
        """Measures a tensor of any shape and real floating dtype, into one row.

        Subnormal float32 elements are counted as such, and are zeros in the sums.
        """
        row = self._finish(self._look(x), at_least_float32(x.dtype))
        return Record(*map(_add_axis, row))

    def look(self, x: jax.Array) -> PartialStats | Record:
        """Does the part of a measurement that needs the tensor; `gather` does the rest for many tensors at once.

        In a program of both float32 and float64 this part is the whole measurement.
        """
        return jax.tree.map(_add_axis, self._look(x)) if self.dtype == _FLOAT32 else self.measure(x)

    def gather(self, looks: Sequence[PartialStats | Record]) -> Record:
        """Finishes several measurements, which are compiled once for all of them. Each becomes a row."""
        if self.dtype != _FLOAT32:
            return join([look for look in looks if isinstance(look, Record)])
        rows = jax.tree.map(lambda *parts: lax.concatenate(parts, 0), *looks)
        return jax.vmap(lambda look: self._finish(look, _FLOAT32))(rows)

    def _look(self, x: jax.Array) -> PartialStats:
        # XLA would measure a constant, such as a mask, while it compiles, for a minute each.
        x = lax.optimization_barrier(lax.stop_gradient(x))
        if x.dtype.itemsize == 8 and self.dtype.itemsize == 4:
            raise TypeError(f"A tensor of {x.dtype} needs float64 sums: StatsSpec(..., dtype=np.dtype('float64')).")
        floats, in_blocks = self._split_formats()
        if x.size == 0:
            dtype = at_least_float32(x.dtype)
            zeros = [lax.full((1 + 2 * len(floats),), 0, dtype)] * 2
            counters = count_nothing(self._formats, self.histogram, dtype)
            return PartialStats(counters, Sums(*zeros), [make_no_errors(dtype)] * len(in_blocks))
        x = widen(x if x.ndim else lax.expand_dims(x, (0,)))
        along = functools.partial(self._look_along, keeps_last=True)
        return lax.platform_dependent(x, tpu=along, default=self._look_along)

    def _look_along(self, x: jax.Array, *, keeps_last: bool = False) -> PartialStats:
        floats, in_blocks = self._split_formats()
        blocks, axes = split_blocks(x, LONGEST_BLOCK, keeps_last=keeps_last)
        counters = count(blocks, axes, x.size, self._formats, self.histogram)
        most = read_most(counters)
        errors = [add_block_errors(x, most, each) for each in in_blocks]
        return PartialStats(counters, add_squares(blocks, axes, most, floats), errors)

    def _finish(self, look: PartialStats, dtype: np.dtype) -> Record:
        """Returns the row of a tensor, without the leading axis; the passes ran in `dtype`."""
        floats, _ = self._split_formats()
        words, extremes = read_counts(look.counters, self._formats, self.histogram)
        most = lax.index_in_dim(extremes, 0, keepdims=False)
        indices = [i for i, each in enumerate(self._formats) if not isinstance(each, FloatFormat)]
        errors = dict(zip(indices, look.errors, strict=True))
        for i, each in errors.items():
            words = words.at[:, FIRST_COUNTS + 3 * i : FIRST_COUNTS + 3 * i + 3].set(each.lost)
        sums = _join_sums(convert_units(look.sums, most, floats), errors, len(self.formats))
        return Record(
            words,
            _convert_extremes(extremes, self.dtype),
            find_exponent(most, dtype),
            lax.convert_element_type(sums, self.dtype),
        )

    @property
    def _formats(self) -> list[Format]:
        return [parse_format(name) for name in self.formats]

    def _split_formats(self) -> tuple[list[FloatFormat], list[IntegerFormat | ScaledFormat]]:
        formats = self._formats
        floats = [each for each in formats if isinstance(each, FloatFormat)]
        return floats, [each for each in formats if not isinstance(each, FloatFormat)]


def _add_axis(x: jax.Array) -> jax.Array:
    return lax.expand_dims(x, (0,))


def _join_sums(sums: Sums, in_blocks: dict[int, BlockErrors], formats: int) -> jax.Array:
    """Returns the parts of all sums, `(S, 2)`, in the order of the formats."""
    parts = lax.concatenate([lax.expand_dims(each, (1,)) for each in (sums.high, sums.low)], 1)
    if not in_blocks:
        return parts
    rows, pairs = [parts[:1]], iter(range(1, parts.shape[0], 2))
    for i in range(formats):
        if i in in_blocks:
            rows.append(jnp.stack([in_blocks[i].high, in_blocks[i].low], 1))
        else:
            first = next(pairs)
            rows.append(parts[first : first + 2])
    return lax.concatenate(rows, 0)


def _convert_extremes(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts bits of floats to a dtype that may be wider, without flushing subnormal numbers."""
    floats = lax.bitcast_convert_type(bits, float_dtype(bits))
    if floats.dtype == dtype:
        return floats
    subnormal = lax.convert_element_type(bits, dtype) * dtype.type(2.0**-149)
    is_normal = lax.ge(bits, lax.full_like(bits, 1 << mantissa_bits(floats.dtype)))
    return lax.select(is_normal, lax.convert_element_type(floats, dtype), subnormal)
