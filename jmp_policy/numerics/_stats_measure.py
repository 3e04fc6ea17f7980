"""Measures one tensor: `_counting.py` counts elements, `_what_if.py` adds up squared errors."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._base import at_least_float32
from ..policy import NumberFormat, parse_format
from ._stats_counting import (
    FIRST_COUNTS,
    HISTOGRAM_BINS,
    BlockErrors,
    ExactStats,
    add_block_errors,
    convert_square,
    count_losses,
    make_empty_extremes,
    measure_exactly,
)
from ._stats_record import Record, exponent_bias, mantissa_bits
from ._what_if import Sums, add_squares, convert_units, find_exponent, split_blocks, upcast_exactly

_FLOAT32 = np.dtype(np.float32)
_COUNTED, _SUMMED = 4096, 128  # elements of a block; a sum of more squares would lose digits
_LARGEST_NUMBER = 2**31


Losses = tuple[jax.Array, Sums]
"""The counts of `count_losses` and the sums of `add_squares`."""


class Sample(NamedTuple):
    """Elements whose losses are still to be counted."""

    values: jax.Array  # filled up with zeros: `jax_debug_nans` would raise for nan
    padding: jax.Array  # the number of these zeros, uint32
    # The elements of the tensor per element of the sample. If it is 1, the tensor has no other `ExactStats`.
    weight: jax.Array


class PartialStats(NamedTuple):
    """The part of a measurement that needs the tensor. Its shapes depend on the dtype alone."""

    extremes: ExactStats  # of all elements
    values: Losses | Sample  # the losses of all elements, or a sample
    errors: list[BlockErrors]  # in each block-scaled format


@dataclasses.dataclass(frozen=True)
class StatsSpec:
    """Formats and counts to measure of each tensor."""

    formats: tuple[str, ...]  # canonical names, as of `parse_format`
    histogram: bool = True  # whether to count exponents
    dtype: np.dtype = _FLOAT32  # of extremes and sums: float64 where a program has float64 values, else float32
    sample: int | None = None  # the number of elements for formats and histogram, `None` for all

    @property
    def columns(self) -> int:
        """The number of counts: four, three for each format, and the histogram."""
        return FIRST_COUNTS + 3 * len(self.formats) + HISTOGRAM_BINS * self.histogram

    @property
    def has_blocks(self) -> bool:
        return any(each.block for each in self._formats)

    def count_sampled(self, shape: tuple[int, ...]) -> int:
        """Returns the number of elements of a tensor of this shape that formats and histogram are of."""
        size = math.prod(shape)
        if self.sample is None or size <= self.sample:
            return size
        windows = self._choose_windows(shape or (1,))
        numbers = np.arange(windows.taken) * windows.step % windows.total
        missing = -shape[-1] % windows.width
        return windows.taken * windows.width - missing * int((numbers % windows.per_row == windows.per_row - 1).sum())

    def empty(self, rows: int) -> Record:
        """Returns the record of tensors that were never measured: the neutral element of `merge`."""
        extremes = np.broadcast_to(np.array([0, np.inf], self.dtype), (rows, 2))
        return Record(
            jnp.zeros((rows, 2, self.columns), np.uint32),
            jnp.asarray(extremes),
            jnp.full((rows,), -exponent_bias(self.dtype), np.int32),
            jnp.zeros((rows, 1 + 2 * len(self.formats), 2), self.dtype),
        )

    def look(self, x: jax.Array) -> PartialStats | Record:
        """Does the part of a measurement that needs the tensor; `gather` does the rest for many tensors at once.

        The tensor has any shape and real floating dtype. Subnormal float32 elements are counted as such, and are zeros
        in the sums. In a program of both float32 and float64 this part is the whole measurement.
        """
        return self._look(x) if self.dtype == _FLOAT32 else self._finish(self._look(x), at_least_float32(x.dtype))

    def gather(self, looks: PartialStats | Record) -> Record:
        """Finishes several measurements, stacked, which are compiled once for all of them. Each becomes a row."""
        return looks if isinstance(looks, Record) else jax.vmap(lambda look: self._finish(look, _FLOAT32))(looks)

    def _look(self, x: jax.Array) -> PartialStats:
        # XLA would measure a constant, such as a mask, while it compiles, for a minute each.
        x = lax.optimization_barrier(lax.stop_gradient(x))
        if x.dtype.itemsize == 8 and self.dtype.itemsize == 4:
            raise TypeError(f"A tensor of {x.dtype} needs float64 sums: StatsSpec(..., dtype=np.dtype('float64')).")
        x = upcast_exactly(x if x.ndim else lax.expand_dims(x, (0,)))
        size, shape, in_blocks = x.size, x.shape, [each for each in self._formats if each.block]
        is_whole = self.sample is not None and size <= self.sample
        extremes = make_empty_extremes(x.dtype) if is_whole and not in_blocks else measure_exactly(x)
        if size == 0:
            x = lax.optimization_barrier(lax.full((1,), 0, x.dtype))  # which is not counted
        if self.sample is not None:
            x = self._take_sample(x)
        errors = [add_block_errors(x, extremes.most, each) for each in in_blocks]
        if self.sample is None:
            return PartialStats(extremes, self._count(x, extremes.most), errors)
        values = lax.pad(lax.reshape(x, (x.size,)), x.dtype.type(0), [(0, self.sample - x.size, 0)])
        weight = max(1, size) / max(1, self.count_sampled(shape))
        return PartialStats(
            extremes, Sample(values, jnp.uint32(max(0, self.sample - size)), jnp.float32(weight)), errors
        )

    def _choose_windows(self, shape: tuple[int, ...]) -> "_Windows":
        """Chooses parts of the last axis, each of whole blocks of all block-scaled formats."""
        assert self.sample is not None
        last, size = shape[-1], math.prod(shape)
        blocks = [each.block for each in self._formats if each.block]
        width = last if size <= self.sample else min(last, math.lcm(*blocks), self.sample)
        per_row = -(-last // width)
        total = min(size // last * per_row, _LARGEST_NUMBER)
        # A step without a common divisor visits no window twice, and all columns equally often.
        step = int(total * _GOLDEN_RATIO) | 1
        while math.gcd(step, total) > 1:
            step += 2
        return _Windows(width, per_row, total, min(total, self.sample // width), step)

    def _take_sample(self, x: jax.Array) -> jax.Array:
        """Takes windows of a tensor, `(windows, elements)`, with zeros past the end of the last axis.

        Indices leave a sharded tensor where it is: a slice or a reshape of a sharded axis would gather it.
        """
        windows, mesh = self._choose_windows(x.shape), jax.typeof(x).sharding.mesh
        is_explicit = AxisType.Explicit in mesh.axis_types
        if windows.width * windows.taken == x.size:
            x = jax.sharding.reshard(x, PartitionSpec()) if is_explicit else x
            return lax.reshape(x, (windows.taken, windows.width))
        # Constants: the same arithmetic for each tensor would compile for longer.
        numbers = np.arange(windows.taken) * windows.step % windows.total
        places = np.unravel_index(numbers, (*x.shape[:-1], windows.per_row))
        *others, last = (each[:, None].astype(np.int32) for each in places)
        last = last * np.int32(windows.width) + np.arange(windows.width, dtype=np.int32)
        mode: dict[str, Any] = (
            {"mode": "fill", "fill_value": 0} if x.shape[-1] % windows.width else {"mode": "promise_in_bounds"}
        )
        if is_explicit:
            mode["out_sharding"] = NamedSharding(mesh, PartitionSpec(None, None))
        return x.at[*others, last].get(wrap_negative_indices=False, **mode)

    def _count(self, x: jax.Array, most: jax.Array) -> Losses:
        along = functools.partial(self._count_along, keeps_last=True)
        return lax.platform_dependent(x, most, tpu=along, default=self._count_along)

    def _count_along(self, x: jax.Array, most: jax.Array, *, keeps_last: bool = False) -> Losses:
        counts = count_losses(*split_blocks(x, _COUNTED, keeps_last=keeps_last), self._formats, self.histogram)
        floats = [each for each in self._formats if not each.block]
        return counts, add_squares(*split_blocks(x, _SUMMED, keeps_last=keeps_last), most, floats)

    def _finish(self, look: PartialStats, dtype: np.dtype) -> Record:
        """Returns the row of a tensor, without the leading axis; the passes ran in `dtype`."""
        extremes, losses, errors = look
        if isinstance(losses, Sample):
            extremes = _choose_extremes(losses, extremes)
        most = extremes.most
        counts, sums = self._count(losses.values, most) if isinstance(losses, Sample) else losses
        floats = [each for each in self._formats if not each.block]
        in_blocks = [i for i, each in enumerate(self._formats) if each.block]
        own = jnp.stack([jnp.stack([np.uint32(1), *extremes.low]), lax.pad(extremes.high, np.uint32(0), [(1, 0, 0)])])
        words = lax.concatenate([own, counts], 1)
        for i, each in zip(in_blocks, errors, strict=True):
            words = words.at[:, FIRST_COUNTS + 3 * i : FIRST_COUNTS + 3 * i + 3].set(each.lost)
        sums = _join_sums(convert_units(sums, most, floats), in_blocks, errors)
        if isinstance(losses, Sample):
            sums = lax.select(
                lax.broadcast(losses.weight == 1, sums.shape), sums, _scale_sums(sums, extremes, losses.weight)
            )
        return Record(
            words,
            _convert_extremes(jnp.stack([most, extremes.least]), self.dtype),
            find_exponent(most, dtype),
            lax.convert_element_type(sums, self.dtype),
        )

    @property
    def _formats(self) -> list[NumberFormat]:
        return [parse_format(name) for name in self.formats]


class _Windows(NamedTuple):
    """Windows of `width` elements: window `step * i % total` for `taken` integers `i`; `per_row` on each last axis."""

    width: int
    per_row: int
    total: int
    taken: int
    step: int


_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def _choose_extremes(sample: Sample, extremes: ExactStats) -> ExactStats:
    """Returns the extremes of the sample if it is the whole tensor."""
    found = measure_exactly(sample.values)
    zeros, nans, infinities = found.low
    own = found._replace(low=[zeros - sample.padding, nans, infinities])
    return jax.tree.map(functools.partial(lax.select, sample.weight == 1), own, extremes)


def _scale_sums(sums: jax.Array, extremes: ExactStats, weight: jax.Array) -> jax.Array:
    """Replaces the sum of squares of a sample by the sum over all elements, and scales errors by the same factor."""
    of_sample = lax.reduce(sums[0], sums.dtype.type(0), lax.add, (0,))
    square = convert_square(extremes, of_sample * lax.convert_element_type(weight, sums.dtype))
    ratio = lax.select(lax.gt(of_sample, lax.full_like(of_sample, 0)), square / of_sample, lax.full_like(square, 0))
    exact = lax.pad(lax.broadcast(square, (1, 1)), sums.dtype.type(0), [(0, 0, 0), (0, 1, 0)])
    errors = lax.slice_in_dim(sums, 1, sums.shape[0]) * lax.broadcast(ratio, (sums.shape[0] - 1, 2))
    return lax.concatenate([exact, errors], 0)


def _join_sums(sums: Sums, in_blocks: Sequence[int], errors: Sequence[BlockErrors]) -> jax.Array:
    """Returns the parts of all sums, `(S, 2)`, in the order of the formats."""
    floats = sums[0].shape[0] // 2 - 1
    formats = iter(range(1, 1 + floats)), iter(range(2 + 2 * floats, 2 + 2 * floats + 2 * len(in_blocks), 2))
    order = [0]
    for i in range(floats + len(in_blocks)):
        first = next(formats[i in in_blocks])
        order += [first, first + (1 if i in in_blocks else 1 + floats)]
    parts = jnp.stack([lax.concatenate([sums[n], *(each[1 + n] for each in errors)], 0) for n in (0, 1)], 1)
    return parts.at[np.array(order)].get(mode="promise_in_bounds")


def _convert_extremes(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts bits of floats to a dtype that may be wider, without flushing subnormal numbers."""
    floats = lax.bitcast_convert_type(bits, at_least_float32(bits.dtype))
    if floats.dtype == dtype:
        return floats
    subnormal = lax.convert_element_type(bits, dtype) * dtype.type(2.0**-149)
    is_normal = lax.ge(bits, lax.full_like(bits, 1 << mantissa_bits(floats.dtype)))
    return lax.select(is_normal, lax.convert_element_type(floats, dtype), subnormal)
