"""The elements that a format would lose of one tensor, and the loss scale that loses fewest."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .._stats import FIRST_EXPONENT, FloatFormat, IntegerFormat, Row, parse_format

MOST_ERROR = 1 / 8
"""The relative error from which on a tensor counts as lost. Rounding alone is 2**-12 of float16 and 2**-9 of bfloat16:
what reaches this lost numbers that mattered, and numbers that did not matter do not reach it."""

_ROUNDING = {"float8_e4m3fn": 0.027, "float8_e5m2": 0.053, "int8": 0.009, "int4": 0.11}
_ROUNDING |= {"mxfp8": 0.027, "mxfp8_e5m2": 0.053, "mxfp4": 0.116, "nvfp4": 0.096}
"""The relative error of normal numbers, where a scale puts the largest one as high as it fits."""

_ROUNDINGS = 3
"""How many times that a quantized tensor may lose."""


class Loss(NamedTuple):
    """What would be lost of a tensor.

    Attributes:
      what: `"overflow"`, `"underflow"`, `"precision"`, or the empty string where the format is good enough.
      share: of its numbers, those beyond the format or those that become zero; the relative error for `"precision"`.
      amax: its largest magnitude, multiplied.
      limit: what the format has: its largest number, its smallest one, or the largest error that is harmless.
      risk: how bad it is: the relative error up to 1, and for an overflow 1 and the binades that it is beyond.
    """

    what: str
    share: float
    amax: float
    limit: float
    risk: float


def find_loss(row: Row, format: str, exponent: int = 0) -> Loss:
    """What a floating format would lose of a tensor that is multiplied by `2**exponent`.

    Raises:
      ValueError: the row does not tell: it has neither the format nor a histogram.
    """
    known = parse_format(format)
    assert isinstance(known, FloatFormat)
    amax = math.ldexp(row.amax, exponent)
    if amax > _largest(known):
        beyond = math.log2(amax / known.max)
        return Loss("overflow", _count_beyond(row, known, exponent), amax, known.max, 1 + max(0.0, beyond))
    error, zeros = estimate_error(row, known, exponent), _count_zeros(row, known, exponent)
    smallest = math.ldexp(1.0, known.min_exponent - known.mantissa_bits)
    return Loss("underflow" if error > MOST_ERROR else "", zeros, amax, smallest, min(1.0, error))


def find_scaled_loss(row: Row, format: str) -> Loss:
    """What a quantized format would lose of a tensor, after the scale that suits it best.

    Raises:
      ValueError: the row does not tell: it was not measured for a format of blocks, or has no histogram.
    """
    known = parse_format(format)
    if format in row.formats:
        shares = row.formats[format]
        error = shares.error if isinstance(known, IntegerFormat) else shares.scaled_error
    elif isinstance(known, FloatFormat):
        highest = known.max_exponent - math.frexp(row.amax)[1] + 1 if row.amax else 0
        error = estimate_error(row, known, highest - (math.ldexp(row.amax, highest) > known.max))
    else:
        raise ValueError(_ask_for(format))
    limit = _ROUNDINGS * _ROUNDING[format.partition("/")[0]]
    return Loss("precision" if error > limit else "", error, row.amax, limit, min(1.0, error / limit * MOST_ERROR))


def find_span(row: Row, format: str) -> tuple[float, float]:
    """The least and the largest exponent of a power of two, by which a tensor is multiplied to fit into a format.

    Nothing fits where the first is above the second. A tensor of zeros fits with any.
    """
    known = parse_format(format)
    assert isinstance(known, FloatFormat)
    if not row.amax:
        return -math.inf, math.inf
    most = math.floor(math.log2(_largest(known)) - math.log2(row.amax))
    if estimate_error(row, known, most) > MOST_ERROR:
        return math.inf, float(most)
    # The error only falls with the exponent: the least good one is found by halves.
    bad, good = most - _WIDEST, most
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if estimate_error(row, known, middle) <= MOST_ERROR else (middle, good)
    return float(good), float(most)


_WIDEST = 600
"""More binades than a format of half precision has, and a tensor of float32 besides."""


def estimate_error(row: Row, known: FloatFormat, exponent: int) -> float:
    """The root of the sum of squared errors, relative to that of the numbers; as measured, where it was.

    From a histogram it is within a fifth of that: numbers are taken to be spread evenly over a binade.

    Raises:
      ValueError: the row has neither.
    """
    if not row.amax:
        return 0.0
    if exponent == 0 and known.name in row.formats:
        return row.formats[known.name].error
    rounding = math.ldexp(1.0, -known.mantissa_bits - 2)
    if row.histogram is None:
        least = row.min_nonzero or row.amax
        if math.ldexp(least, exponent) >= math.ldexp(1.0, known.min_exponent):
            return rounding
        if math.ldexp(row.amax, exponent) <= math.ldexp(1.0, known.min_exponent - known.mantissa_bits - 1):
            return 1.0
        raise ValueError(_ask_for(known.name, histogram=True))
    counts, squares = _list_bins(row)
    steps = _find_steps(known, exponent, squares)
    lost = np.where(squares < steps**2 / 4, squares, steps**2 / 12)
    return math.sqrt(float((counts * lost).sum() / (counts * squares).sum()))


def _largest(known: FloatFormat) -> float:
    return known.find_thresholds(np.dtype(np.float64))[2]


def _list_bins(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """How many numbers each exponent has, and the mean of their squares."""
    assert row.histogram is not None
    counts = row.histogram.astype(np.float64)
    exponents = np.arange(len(counts)) + FIRST_EXPONENT - 1
    squares = np.ldexp(7 / 3, 2 * exponents)
    total = row.rms**2 * (row.count - row.nans - row.infs)
    # What is beyond the bins is in the first one, or in the last: its squares are what the root mean square has more.
    if counts[-1]:
        squares[-1] = max(squares[-1], (total - float(counts[:-1] @ squares[:-1])) / counts[-1])
    if counts[0] == counts.sum():
        squares[0] = total / counts[0]
    return counts, squares


def _find_steps(known: FloatFormat, exponent: int, squares: np.ndarray) -> np.ndarray:
    """The distance of neighbours in a format, of numbers with these squares before they are multiplied."""
    exponents = np.frexp(np.sqrt(squares))[1] - 1
    kept = np.maximum(exponents + exponent, known.min_exponent)
    return np.ldexp(1.0, kept - known.mantissa_bits - exponent)


def _count_beyond(row: Row, known: FloatFormat, exponent: int) -> float:
    if exponent == 0 and known.name in row.formats:
        return row.formats[known.name].overflow
    return _count_bins(row, slice(known.max_exponent + 1 - exponent, None))


def _count_zeros(row: Row, known: FloatFormat, exponent: int) -> float:
    if exponent == 0 and known.name in row.formats:
        return row.formats[known.name].underflow
    return _count_bins(row, slice(None, known.min_exponent - known.mantissa_bits - 1 - exponent))


def _count_bins(row: Row, exponents: slice) -> float:
    """The share of numbers with certain exponents; at least one number, where the histogram does not reach."""
    if row.histogram is None or not row.count:
        return 0.0
    start, stop = (
        None if end is None else max(0, end - FIRST_EXPONENT + 1) for end in (exponents.start, exponents.stop)
    )
    return float(row.histogram[start:stop].sum() / row.count)


def _ask_for(format: str, *, histogram: bool = False) -> str:
    wanted = f"formats=[{format!r}]" + (", histogram=True" if histogram else "")
    return (
        f"These Stats do not tell what {format!r} would lose: they were measured neither for it nor with a histogram "
        f"of exponents. Measure them so: numerics.collect(fun, {wanted}, where='all')."
    )


_LEAST, _MOST = -14, 24
"""The exponents of the scales that are tried: from what brings a gradient of 2**30 into float16, to where
`DynamicLossScale` ends."""

Span = tuple[float, float]
"""The exponents of the scales with which a value fits."""


class Choice(NamedTuple):
    """A loss scale, and the scopes that it does not save.

    Attributes:
      exponent: the scale is two to this power.
      unsaved: the scopes with a value that does not fit.
    """

    exponent: int
    unsaved: tuple[str, ...]


def choose_scale(spans: Mapping[str, Sequence[Span]], given: int | None, formats: Sequence[str]) -> Choice:
    """Chooses the scale that saves most scopes, and of these the one that leaves most room on both sides.

    Args:
      spans: by scope, the spans of its values.
      given: the exponent of the user's scale, which wins where it saves as many.
      formats: what the values are in. Where each has the range of float32, there is nothing to scale.
    """
    tries = range(_LEAST, _MOST + 1) if any(map(is_short, formats)) else range(1)
    if given is not None and given not in tries:
        tries = [*tries, given]
    unsaved = {exponent: _list_unsaved(spans, exponent) for exponent in tries}
    fewest = min(map(len, unsaved.values()))
    if given is not None and len(unsaved[given]) == fewest:
        return Choice(given, unsaved[given])
    saving = [exponent for exponent in tries if len(unsaved[exponent]) == fewest]
    best = [exponent for exponent in saving if exponent >= 0] or saving  # a scale below 1 only where none else does
    chosen = max(best, key=lambda exponent: (_find_room(spans, unsaved[exponent], exponent), -abs(exponent)))
    return Choice(chosen, unsaved[chosen])


def is_short(format: str) -> bool:
    """Whether a format has a shorter range than float32."""
    known = parse_format(format)
    return isinstance(known, FloatFormat) and known.max_exponent < 100


def _list_unsaved(spans: Mapping[str, Sequence[Span]], exponent: int) -> tuple[str, ...]:
    return tuple(path for path, own in spans.items() if any(not least <= exponent <= most for least, most in own))


def _find_room(spans: Mapping[str, Sequence[Span]], unsaved: Sequence[str], exponent: int) -> float:
    """How many binades the gradients may grow or shrink before the scale is not good any more."""
    saved = (span for path, own in spans.items() if path not in unsaved for span in own)
    return min((min(exponent - least, most - exponent) for least, most in saved), default=math.inf)
