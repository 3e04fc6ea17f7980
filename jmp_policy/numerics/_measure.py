"""One tensor, measured: what its numbers look like, and what a cast to each format would lose.

Two passes over it: `_counting.py` for what is counted, then `_errors.py` for what is added up.
"""

import dataclasses

import jax
import numpy as np
from jax import lax

from ._blocks import split_blocks, widen
from ._counting import (
    FIRST_COUNTS as FIRST_COUNTS,
    FIRST_EXPONENT as FIRST_EXPONENT,
    HISTOGRAM_BINS as HISTOGRAM_BINS,
    LONGEST_BLOCK,
    count,
)
from ._errors import Sums, add_squares
from ._integers import IntegerErrors, add_integer_errors
from ._record import (
    Record as Record,
    float_dtype,
    fold as fold,
    join as join,
    make_empty,
    mantissa_bits,
    merge as merge,
)
from ._what_if import FloatFormat, IntegerFormat, parse_format as parse_format

_FLOAT32 = np.dtype(np.float32)


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
        # A value that XLA knows, such as a mask, it would otherwise measure while it compiles, for a minute each.
        x = lax.optimization_barrier(lax.stop_gradient(x))
        if x.dtype.itemsize == 8 and self.dtype.itemsize == 4:
            raise TypeError(f"A tensor of {x.dtype} needs a meter of float64: Meter(..., dtype=np.dtype('float64')).")
        if x.size == 0:
            empty = self.empty(1)
            return empty._replace(counts=empty.counts.at[:, 0, 0].set(np.uint32(1)))
        formats = [parse_format(name) for name in self.formats]
        x = widen(x if x.ndim else lax.expand_dims(x, (0,)))
        blocks, axes = split_blocks(x, LONGEST_BLOCK)
        counts = count(blocks, axes, x.size, formats, self.histogram)
        most = lax.index_in_dim(counts.extremes, 0, keepdims=False)
        floats = [each for each in formats if isinstance(each, FloatFormat)]
        sums = add_squares(blocks, axes, most, floats)
        integers = {
            i: add_integer_errors(x, most, each) for i, each in enumerate(formats) if isinstance(each, IntegerFormat)
        }
        row = Record(
            _insert_counts(counts.words, integers),
            _convert_extremes(counts.extremes, self.dtype),
            sums.exponent,
            lax.convert_element_type(_join_sums(sums, integers, len(formats)), self.dtype),
        )
        return Record(*(lax.expand_dims(part, (0,)) for part in row))


def _insert_counts(words: jax.Array, integers: dict[int, IntegerErrors]) -> jax.Array:
    """The words of all counts, with those of integers where their formats stand."""
    for i, errors in integers.items():
        words = words.at[:, FIRST_COUNTS + 3 * i].set(errors.underflow)
    return words


def _join_sums(sums: Sums, integers: dict[int, IntegerErrors], formats: int) -> jax.Array:
    """The parts of all sums `(S, 2)`, with those of integers where their formats stand."""
    parts = lax.concatenate([lax.expand_dims(each, (1,)) for each in (sums.high, sums.low)], 1)
    if not integers:
        return parts
    rows, pairs = [parts[:1]], iter(range(1, parts.shape[0], 2))
    for i in range(formats):
        if i in integers:
            rows.append(jax.numpy.stack([integers[i].high, integers[i].low], 1))
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
