"""One tensor, measured: what its numbers look like, and what a cast to each format would lose.

Two passes over it: `_counting.py` for what is counted, then `_errors.py` for what is added up.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base import at_least_float32
from ...quant._numbers import Blocks, dequantize, quantize_mx, quantize_nv
from ._counting import (
    FIRST_COUNTS as FIRST_COUNTS,
    FIRST_EXPONENT as FIRST_EXPONENT,
    HISTOGRAM_BINS as HISTOGRAM_BINS,
    LONGEST_BLOCK,
    BlockErrors,
    Tally,
    add_integer_errors,
    count,
    count_flags,
    fill_tally,
    pad_last_axis,
    read_counts,
    read_most,
)
from ._record import (
    Record as Record,
    add_up,
    bits_like,
    bits_of,
    float_dtype,
    fold as fold,
    join as join,
    make_empty,
    mantissa_bits,
    merge as merge,
    power_of_two,
)
from ._what_if import (
    FloatFormat,
    Format,
    IntegerFormat,
    ScaledFormat,
    Sums,
    add_squares,
    convert_units,
    find_exponent,
    parse_format as parse_format,
    read_units,
    split_blocks,
    widen,
)

_FLOAT32 = np.dtype(np.float32)


class Look(NamedTuple):
    """What the passes over a tensor leave; its arrays have the same shapes for all tensors of a dtype.

    Attributes:
      tally: of the first pass.
      sums: of the second one, for formats of floats.
      errors: of formats of blocks, in their order.
    """

    tally: Tally
    sums: Sums
    errors: list[BlockErrors]


@dataclasses.dataclass(frozen=True)
class Meter:
    """What is measured of each tensor.

    Attributes:
      formats: canonical names, as of `parse_format`.
      histogram: whether exponents are counted.
      dtype: of extremes and sums: float64 where a program has float64 values, float32 otherwise.
    """

    formats: tuple[str, ...]
    histogram: bool = True
    dtype: np.dtype = _FLOAT32

    @property
    def columns(self) -> int:
        """The number of counts: four, three for each format, and the histogram."""
        return FIRST_COUNTS + 3 * len(self.formats) + HISTOGRAM_BINS * self.histogram

    def empty(self, rows: int) -> Record:
        """The record of tensors that were never measured: the neutral element of `merge`."""
        return make_empty(rows, self.columns, 1 + 2 * len(self.formats), self.dtype)

    def measure(self, x: jax.Array) -> Record:
        """Measures a tensor of any shape and any real floating dtype, into one row.

        float32 numbers below the normal ones are counted as what they are, and are zeros in the sums.
        """
        row = self._finish(self._look(x), at_least_float32(x.dtype))
        return Record(*map(_add_axis, row))

    def look(self, x: jax.Array) -> Look | Record:
        """What of a measurement must be done where the tensor is, in one row; `gather` does the rest for many at once.

        In a program of both float32 and float64 that is all of it.
        """
        return jax.tree.map(_add_axis, self._look(x)) if self.dtype == _FLOAT32 else self.measure(x)

    def gather(self, looks: Sequence[Look | Record]) -> Record:
        """The record of several looks, a row for each. It is `measure`, compiled once for all of them."""
        if self.dtype != _FLOAT32:
            return join([look for look in looks if isinstance(look, Record)])
        rows = jax.tree.map(lambda *parts: lax.concatenate(parts, 0), *looks)
        return jax.vmap(lambda look: self._finish(look, _FLOAT32))(rows)

    def _look(self, x: jax.Array) -> Look:
        # A value that XLA knows, such as a mask, it would otherwise measure while it compiles, for a minute each.
        x = lax.optimization_barrier(lax.stop_gradient(x))
        if x.dtype.itemsize == 8 and self.dtype.itemsize == 4:
            raise TypeError(f"A tensor of {x.dtype} needs a meter of float64: Meter(..., dtype=np.dtype('float64')).")
        floats, in_blocks = self._split_formats()
        if x.size == 0:
            dtype = at_least_float32(x.dtype)
            zeros = [lax.full((1 + 2 * len(floats),), 0, dtype)] * 2
            tally = fill_tally(self._formats, self.histogram, dtype)
            return Look(tally, Sums(*zeros), [_make_no_errors(dtype)] * len(in_blocks))
        x = widen(x if x.ndim else lax.expand_dims(x, (0,)))
        along = functools.partial(self._look_along, keeps_last=True)
        return lax.platform_dependent(x, tpu=along, default=self._look_along)

    def _look_along(self, x: jax.Array, *, keeps_last: bool = False) -> Look:
        floats, in_blocks = self._split_formats()
        blocks, axes = split_blocks(x, LONGEST_BLOCK, keeps_last=keeps_last)
        tally = count(blocks, axes, x.size, self._formats, self.histogram)
        most = read_most(tally)
        errors = [_add_block_errors(x, most, each) for each in in_blocks]
        return Look(tally, add_squares(blocks, axes, most, floats), errors)

    def _finish(self, look: Look, dtype: np.dtype) -> Record:
        """The row of a tensor, whose numbers were looked at in a dtype."""
        floats, _ = self._split_formats()
        counts = read_counts(look.tally, self._formats, self.histogram)
        most = lax.index_in_dim(counts.extremes, 0, keepdims=False)
        places = [i for i, each in enumerate(self._formats) if not isinstance(each, FloatFormat)]
        errors = dict(zip(places, look.errors, strict=True))
        sums = _join_sums(convert_units(look.sums, most, floats), errors, len(self.formats))
        return Record(
            _insert_counts(counts.words, errors),
            _convert_extremes(counts.extremes, self.dtype),
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


def _add_block_errors(x: jax.Array, most: jax.Array, spec: IntegerFormat | ScaledFormat) -> BlockErrors:
    if isinstance(spec, IntegerFormat):
        return add_integer_errors(x, most, spec)
    return add_scaled_errors(x, most, spec)


def _add_axis(x: jax.Array) -> jax.Array:
    return lax.expand_dims(x, (0,))


def _make_no_errors(dtype: np.dtype) -> BlockErrors:
    zeros = lax.full((2,), 0, dtype)
    return BlockErrors(lax.full((2, 3), 0, np.uint32), zeros, zeros)


def _insert_counts(words: jax.Array, in_blocks: dict[int, BlockErrors]) -> jax.Array:
    """The words of all counts, with those of blocks where their formats stand."""
    for i, errors in in_blocks.items():
        words = words.at[:, FIRST_COUNTS + 3 * i : FIRST_COUNTS + 3 * i + 3].set(errors.lost)
    return words


def _join_sums(sums: Sums, in_blocks: dict[int, BlockErrors], formats: int) -> jax.Array:
    """The parts of all sums `(S, 2)`, with those of blocks where their formats stand."""
    parts = lax.concatenate([lax.expand_dims(each, (1,)) for each in (sums.high, sums.low)], 1)
    if not in_blocks:
        return parts
    rows, pairs = [parts[:1]], iter(range(1, parts.shape[0], 2))
    for i in range(formats):
        if i in in_blocks:
            rows.append(jax.numpy.stack([in_blocks[i].high, in_blocks[i].low], 1))
        else:
            first = next(pairs)
            rows.append(parts[first : first + 2])
    return lax.concatenate(rows, 0)


def _convert_extremes(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    """Bits of floats, as numbers of a dtype that may be wider; a conversion alone may flush subnormal numbers."""
    floats = lax.bitcast_convert_type(bits, float_dtype(bits))
    if floats.dtype == dtype:
        return floats
    subnormal = lax.convert_element_type(bits, dtype) * dtype.type(2.0**-149)
    is_normal = lax.ge(bits, lax.full_like(bits, 1 << mantissa_bits(floats.dtype)))
    return lax.select(is_normal, lax.convert_element_type(floats, dtype), subnormal)


_MOST = np.finfo(np.float32).max


def add_scaled_errors(x: jax.Array, most: jax.Array, spec: ScaledFormat) -> BlockErrors:
    """Rounds a tensor block by block along its last axis.

    What is not finite counts as zero here, and not as what makes a block nan; a format with a scale for the tensor has
    one for all of it. Scales are what they are: the error with the best power of two is the same.

    Args:
      x: float32 or float64; at least one axis and number.
      most: the bits of the largest finite magnitude of all, an integer.
      spec: the format.
    """
    x, format = pad_last_axis(x, spec.block), spec.numbers
    magnitudes = bits_of(lax.abs(x))
    is_finite = lax.lt(magnitudes, lax.full_like(magnitudes, bits_like((np.inf,), x.dtype)[0]))
    x = lax.select(is_finite, x, lax.full_like(x, 0))
    blocks = _round(lax.clamp(x.dtype.type(-_MOST), x, x.dtype.type(_MOST)).astype(jnp.float32), spec)
    # Near the end of float32 the nearest number may be beyond it.
    back = lax.min(lax.abs(dequantize(blocks, -1)), _MOST).astype(x.dtype)
    values = lax.abs(blocks.values.astype(jnp.float32))
    is_number = is_finite & lax.gt(magnitudes, lax.full_like(magnitudes, 0))
    becomes_zero = is_number & (values == 0)
    is_subnormal = (values > 0) & (values < 2.0**format.min_exponent)
    # What would be rounded to more than the largest number, if there was more.
    bound = format.find_thresholds(np.dtype(np.float32))[2] / format.max
    is_clipped = (values == format.max) & (lax.abs(x) > back * x.dtype.type(bound))
    if x.dtype.itemsize == 8:
        is_clipped |= lax.abs(x) > x.dtype.type(_MOST)
    lost = [lax.expand_dims(count_flags(flags), (1,)) for flags in (becomes_zero, is_subnormal, is_clipped)]
    units = lax.broadcast(power_of_two(lax.neg(find_exponent(most, x.dtype)), x.dtype), x.shape)
    errors = read_units(back, units) - read_units(x, units)
    squares = errors * errors
    sums = add_up(*add_up(squares, lax.full_like(squares, 0), (x.ndim - 1,)), tuple(range(x.ndim - 1)))
    return BlockErrors(lax.concatenate(lost, 1), *(lax.broadcast(part, (2,)) for part in sums))


def _round(x: jax.Array, spec: ScaledFormat) -> Blocks:
    if spec.has_tensor_scale:
        return quantize_nv(x, -1, spec.block)
    return quantize_mx(x, spec.dtype, -1, spec.block)
