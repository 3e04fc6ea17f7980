"""One tensor, measured: what its numbers look like, and what a cast to each format would lose.

Two passes over it: `_counting.py` for what is counted, then `_errors.py` for what is added up.
"""

import dataclasses

import jax
import numpy as np
from jax import lax

from ._blocks import read_magnitudes
from ._counting import (
    FIRST_COUNTS as FIRST_COUNTS,
    FIRST_EXPONENT as FIRST_EXPONENT,
    HISTOGRAM_BINS as HISTOGRAM_BINS,
    Counts,
    count,
)
from ._errors import Sums, add_squares, float_dtype
from ._integers import add_integer_errors
from ._record import (
    Record as Record,
    fold as fold,
    join as join,
    make_empty,
    merge as merge,
)
from ._what_if import FloatFormat, Format as Format, IntegerFormat, parse_format as parse_format

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
        x = lax.stop_gradient(x)
        if x.dtype.itemsize == 8 and self.dtype.itemsize == 4:
            raise TypeError(f"A tensor of {x.dtype} needs a meter of float64: Meter(..., dtype=np.dtype('float64')).")
        if x.size == 0:
            empty = self.empty(1)
            return empty._replace(counts=empty.counts.at[:, 0, 0].set(np.uint32(1)))
        formats = [parse_format(name) for name in self.formats]
        magnitudes = read_magnitudes(x if x.ndim else lax.expand_dims(x, (0,)))
        counts = count(magnitudes, formats, self.histogram)
        sums = add_squares(magnitudes, counts.most, [each for each in formats if isinstance(each, FloatFormat)])
        words, parts = _insert_integers(magnitudes, counts, sums, formats)
        extremes = lax.concatenate([lax.expand_dims(bits, (0,)) for bits in (counts.most, counts.least)], 0)
        row = Record(words, _widen(extremes, self.dtype), sums.exponent, lax.convert_element_type(parts, self.dtype))
        return Record(*(lax.expand_dims(part, (0,)) for part in row))


def _insert_integers(
    magnitudes: jax.Array, counts: Counts, sums: Sums, formats: list[Format]
) -> tuple[jax.Array, jax.Array]:
    """The words of all counts and the parts of all sums, with those of integers where their formats stand."""
    parts = _stack_last(sums.high, sums.low)
    if not any(isinstance(each, IntegerFormat) for each in formats):
        return counts.words, parts
    words, rows, floats = counts.words, [parts[:1]], 0
    for i, each in enumerate(formats):
        if isinstance(each, FloatFormat):
            rows.append(parts[1 + 2 * floats : 3 + 2 * floats])
            floats += 1
        else:
            errors = add_integer_errors(magnitudes, counts.most, each)
            words = words.at[:, FIRST_COUNTS + 3 * i].set(errors.underflow)
            rows.append(_stack_last(errors.high, errors.low))
    return words, lax.concatenate(rows, 0)


def _stack_last(high: jax.Array, low: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(high, (1,)), lax.expand_dims(low, (1,))], 1)


def _widen(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    """Bits of floats, as numbers of a dtype that may be wider; a conversion alone may flush subnormal numbers."""
    floats = lax.bitcast_convert_type(bits, float_dtype(bits))
    if floats.dtype == dtype:
        return floats
    wide = lax.convert_element_type(floats, dtype)
    subnormal = lax.convert_element_type(bits, dtype) * dtype.type(2.0**-149)
    return lax.select(lax.lt(bits, lax.full_like(bits, 1 << 23)), subnormal, wide)
