"""Loss of one tensor in a format, the loss scale that saves most scopes, and masks, which may be lost."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal, Var

from .._base import group_by_key
from .._jaxpr import Fact, Step, float_dtype, having, list_variables, walk
from ..policy import NumberFormat, parse_format
from ._stats_choice import ObservedProgram, identify
from ._stats_counting import FIRST_EXPONENT
from ._stats_row import Row

MOST_ERROR = 1 / 8
"""A tensor with a larger relative error counts as lost. Rounding alone causes 2**-12 (float16) or 2**-9 (bfloat16)."""

_ROUNDING = {"float8_e4m3fn": 0.027, "float8_e5m2": 0.053, "int8": 0.009, "int4": 0.11}
_ROUNDING |= {"mxfp8": 0.027, "mxfp8_e5m2": 0.053, "mxfp4": 0.116, "nvfp4": 0.096}
"""Relative error of normally distributed values, scaled to the range of the format."""

_ROUNDINGS = 3
"""A quantized tensor may have this many times that error."""


class Loss(NamedTuple):
    """Predicted loss of a tensor. Same fields as `Reason`; `what` is empty if the format is good enough."""

    what: str
    share: float
    amax: float
    limit: float
    risk: float


def find_loss(row: Row, format: str, exponent: int = 0) -> Loss:
    """Predicts the loss in a floating format of a tensor multiplied by `2**exponent`."""
    known, amax = parse_format(format), math.ldexp(row.amax, exponent)
    measured = row.formats.get(known.name) if exponent == 0 else None
    if amax > _largest(known):
        counted = _count_bins(row, slice(known.max_exponent + 1 - exponent, None))
        share = measured.overflow if measured else counted
        return find_overflow(amax, format, share)
    error, least = estimate_error(row, known, exponent), known.least_exponent
    zeros = measured.underflow if measured else _count_bins(row, slice(None, least - 1 - exponent))
    return Loss("underflow" if error > MOST_ERROR else "", zeros, amax, math.ldexp(1.0, least), min(1.0, error))


def find_overflow(amax: float, format: str, share: float = 1.0) -> Loss:
    """Returns the loss of a tensor or constant that is too large for a floating format."""
    largest = parse_format(format).max
    return Loss("overflow", share, amax, largest, 1 + max(0.0, math.log2(amax / largest)))


def find_scaled_loss(row: Row, format: str) -> Loss:
    """Predicts the loss in a quantized format, with the best scale."""
    known = parse_format(format)
    if format in row.formats:
        shares = row.formats[format]
        error = shares.error if known.has_integers else shares.scaled_error
    elif not known.block:
        highest = known.max_exponent - math.frexp(row.amax)[1] + 1 if row.amax else 0
        error = estimate_error(row, known, highest - (math.ldexp(row.amax, highest) > known.max))
    else:
        raise ValueError(_ask_for(format))
    limit = _ROUNDINGS * _ROUNDING[format.partition("/")[0]]
    return Loss("precision" if error > limit else "", error, row.amax, limit, min(1.0, error / limit * MOST_ERROR))


def find_span(row: Row, format: str) -> tuple[float, float]:
    """Returns the least and largest exponent of a scale with which a tensor fits a format; none fits if they cross."""
    known = parse_format(format)
    if not row.amax:
        return -math.inf, math.inf
    most = math.floor(math.log2(_largest(known)) - math.log2(row.amax))
    if estimate_error(row, known, most) > MOST_ERROR:
        return math.inf, float(most)
    # The error decreases with the exponent, so bisect. 600 binades are more than float32 and half precision have.
    bad, good = most - 600, most
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if estimate_error(row, known, middle) <= MOST_ERROR else (middle, good)
    return float(good), float(most)


def estimate_error(row: Row, known: NumberFormat, exponent: int) -> float:
    """Returns the relative error in the 2-norm, measured, or estimated to about 20 % from the histogram."""
    if not row.amax:
        return 0.0
    if exponent == 0 and known.name in row.formats:
        return row.formats[known.name].error
    rounding = math.ldexp(1.0, -known.mantissa_bits - 2)
    if row.histogram is None:
        least = row.min_nonzero or row.amax
        if math.ldexp(least, exponent) >= math.ldexp(1.0, known.min_exponent):
            return rounding
        if math.ldexp(row.amax, exponent) <= math.ldexp(1.0, known.least_exponent - 1):
            return 1.0
        raise ValueError(_ask_for(known.name, histogram=True))
    counts, squares = _list_bins(row)
    # The rounding step of the format at each mean square, in units before scaling.
    kept = np.maximum(np.frexp(np.sqrt(squares))[1] - 1 + exponent, known.min_exponent)
    steps = np.ldexp(1.0, kept - known.mantissa_bits - exponent)
    lost = np.where(squares < steps**2 / 4, squares, steps**2 / 12)
    return math.sqrt(float((counts * lost).sum() / (counts * squares).sum()))


def _largest(known: NumberFormat) -> float:
    return known.find_thresholds(np.dtype(np.float64))[2]


def _list_bins(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Returns the element count and the mean square for each exponent."""
    assert row.histogram is not None
    counts = row.histogram.astype(np.float64)
    exponents = np.arange(len(counts)) + FIRST_EXPONENT - 1
    squares = np.ldexp(7 / 3, 2 * exponents)
    total = row.rms**2 * (row.count - row.nans - row.infs)
    # The first and last bin also hold everything beyond the bins. Their mean square follows from the tensor's.
    if counts[-1]:
        squares[-1] = max(squares[-1], (total - float(counts[:-1] @ squares[:-1])) / counts[-1])
    if counts[0] == counts.sum():
        squares[0] = total / counts[0]
    return counts, squares


def _count_bins(row: Row, exponents: slice) -> float:
    """Returns the fraction of elements with certain exponents; 0 without a histogram."""
    if row.histogram is None or not row.count:
        return 0.0
    ends = exponents.start, exponents.stop
    start, stop = (None if end is None else max(0, end - FIRST_EXPONENT + 1) for end in ends)
    return float(row.histogram[start:stop].sum() / row.count)


def _ask_for(format: str, *, histogram: bool = False) -> str:
    wanted = f"formats=[{format!r}]" + (", histogram=True" if histogram else "")
    return (
        f"These Stats do not contain what {format!r} would lose: collect had neither this format nor a histogram of "
        f"exponents. For example: numerics.collect(fun, {wanted}, where='all')."
    )


_LEAST, _MOST = -14, 24
"""Exponents of the tried scales, up to the maximum of `DynamicLossScale`."""

Spans = Mapping[str, Sequence[tuple[float, float]]]
"""By scope: the smallest and largest exponent of the scales with which each value fits."""


class ScaleChoice(NamedTuple):
    """The exponent of a loss scale, and the scopes with a value that does not fit with it."""

    exponent: int
    unsaved: tuple[str, ...]


def choose_scale(spans: Spans, given: int | None, formats: Sequence[str]) -> ScaleChoice:
    """Chooses the scale that saves most scopes, with most room, or `given` if that saves as many."""
    known = map(parse_format, formats)
    is_short = any(not format.block and format.max_exponent < 100 for format in known)
    tries = range(_LEAST, _MOST + 1) if is_short else range(1)
    if given is not None and given not in tries:
        tries = [*tries, given]
    unsaved = {
        exponent: tuple(path for path, own in spans.items() if any(not low <= exponent <= high for low, high in own))
        for exponent in tries
    }
    fewest = min(map(len, unsaved.values()))
    if given is not None and len(unsaved[given]) == fewest:
        return ScaleChoice(given, unsaved[given])
    saving = [exponent for exponent in tries if len(unsaved[exponent]) == fewest]
    best = [exponent for exponent in saving if exponent >= 0] or saving  # prefer scales of at least 1

    def find_room(exponent: int) -> float:
        """Returns how many binades the gradients may grow or shrink before they no longer fit."""
        saved = (span for path, own in spans.items() if path not in unsaved[exponent] for span in own)
        return min((min(exponent - least, most - exponent) for least, most in saved), default=math.inf)

    chosen = max(best, key=lambda exponent: (find_room(exponent), -abs(exponent)))
    return ScaleChoice(chosen, unsaved[chosen])


CHOOSING = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS, Fact.DEVICE_CHOOSES, Fact.CHOOSES)
CHOOSING |= {"link", "carry", "convert_element_type"}
"""Ops whose outputs are elements of their operands. An infinite element that is not chosen does no harm."""

_ABSORBING = {-1: frozenset(("exp", "exp2", "expm1", "logistic", "tanh", "erf")), 1: frozenset(("tanh", "erf"))}
"""By the sign of an infinite operand: ops whose output is then finite."""

_ADDING = ("add", "add_any", "sub")

_LIMIT = float(np.finfo(np.float32).max)


class _Value(NamedTuple):
    """`is_large` is None if a value was not measured. `sign` is the sign of its masks; 0 if it has none.

    `is_kept` is True if the masks stay finite, because autocast clamps them or because they are the limit of a dtype.
    """

    is_large: bool | None = None
    sign: int = 0
    is_kept: bool = False
    has_zeros: bool = True


class _Visit(NamedTuple):
    """A step with its values, and the rows of each result."""

    step: Step
    reads: list[_Value]
    makes: list[_Value]
    rows: list[list[int]]


def find_masked(observed: ObservedProgram, rows: Sequence[Row], largest: float, *, clamps: bool) -> set[int]:
    """Finds rows whose values above `largest` are masks.

    A mask is a large negative constant that is added or selected, and that only a softmax, a maximum or a comparison
    reads; or a positive one and a minimum. It may become infinite. A factor is not a mask: infinity times zero is nan.
    `clamps` is True if masks are clamped to the format, as autocast does.
    """
    masked: set[int] = set()
    harmful: set[Any] = set(list_variables(observed.program.outvars))
    for step, reads, makes, indices in reversed(_find_masks(observed, rows, largest, clamps)):
        lost = [var in harmful for var in step.results]
        harmful.difference_update(step.results)
        for made, is_lost, own in zip(makes, lost, indices, strict=True):
            masked.update(index for index in own if made.sign and not is_lost)
        for position, (atom, read) in enumerate(zip(step.operands, reads, strict=True)):
            if isinstance(atom, Var) and read.sign and _is_harmed(step, position, reads, makes, lost):
                harmful.add(atom)
    return masked


def _find_masks(observed: ObservedProgram, rows: Sequence[Row], largest: float, clamps: bool) -> list[_Visit]:
    """Follows masks from the constants on. A carry is not followed to the next iteration."""
    rows_of = group_by_key((value, index) for index, value in enumerate(observed.values))
    known: dict[Any, _Value] = {}

    def read(atom: Any) -> _Value:
        if not isinstance(atom, Literal):
            # The arrays of a program are not kept: they may be masks.
            unknown = _Value(sign=-1 if not isinstance(atom, Var) or float_dtype(atom) else 0)
            return known.get(atom, unknown) if isinstance(atom, Var) else unknown
        is_number = float_dtype(atom) and np.ndim(atom.val) == 0 and np.isfinite(atom.val)
        size = abs(float(atom.val)) if is_number else 0.0  # NumPy would round `largest` to the dtype of the number
        is_large = size > largest
        return _Value(is_large, int(np.sign(atom.val)) if is_large else 0, clamps or size >= _LIMIT, size == 0)

    def measure(indices: Sequence[int]) -> _Value:
        own = [rows[index] for index in indices]
        is_large = any(row.amax > largest for row in own) if own else None
        return _Value(is_large, has_zeros=not own or any(row.zeros for row in own))

    known.update((var, measure(rows_of.get(((), i), []))) for i, var in enumerate(observed.program.invars))
    visits = []
    for step in walk(observed.program, live_only=True):
        chain, indices = identify(step.around, step.eqn), {id(var): i for i, var in enumerate(step.eqn.outvars)}
        reads = [read(atom) for atom in step.operands]
        own = [rows_of.get((chain, indices.get(id(var), -1)), []) for var in step.results]
        makes = [_follow_masks(step, reads, measure(found), var) for var, found in zip(step.results, own, strict=True)]
        known.update(zip(step.results, makes, strict=True))
        visits.append(_Visit(step, reads, makes, own))
    return visits


def _follow_masks(step: Step, reads: Sequence[_Value], made: _Value, var: Any) -> _Value:
    """Returns a result, with the sign of its masks."""
    if step.name == "constant":
        return reads[0]
    if step.name in ("link", "carry") and made.is_large is None and len(reads) == 1:
        return reads[0]
    masks = {i: read for i, read in enumerate(reads) if read.sign and read.is_large is not False}
    if made.is_large is False or not masks or float_dtype(var) is None:
        return made
    others = [read for i, read in enumerate(reads) if i not in masks]
    is_kept = all(mask.is_kept for mask in masks.values())
    signs = [-mask.sign if step.name == "sub" and i == 1 else mask.sign for i, mask in masks.items()]
    if step.name in CHOOSING or step.name in _ADDING:
        # Large values that are not masks would be hidden by them. A row that is masked throughout, minus its maximum,
        # is infinity minus infinity.
        is_clear = not any(read.is_large for read in others) and (is_kept or len(set(signs)) == 1)
        return made._replace(sign=signs[0], is_kept=is_kept) if is_clear else made
    if step.name in ("neg", "abs"):
        return made._replace(sign=-signs[0] if step.name == "neg" else 1, is_kept=is_kept)
    is_scaled = (step.name == "mul" or (step.name == "div" and 0 in masks)) and len(masks) == 1
    is_nonzero = not any(read.has_zeros or read.is_large for read in others)
    if is_scaled and is_nonzero and all(mask.is_large for mask in masks.values()):
        return made._replace(sign=signs[0])
    return made


def _is_harmed(
    step: Step, position: int, reads: Sequence[_Value], makes: Sequence[_Value], lost: Sequence[bool]
) -> bool:
    """True if an op that reads an infinite mask returns anything else than a mask or a finite value."""
    passes = [is_lost for made, is_lost in zip(makes, lost, strict=True) if made.sign]
    if passes:
        return any(passes)
    if not any(map(float_dtype, step.results)) or step.name in _ABSORBING[reads[position].sign]:
        return False
    if step.name == "sub":
        return not all(read.sign and read.is_kept for read in reads)
    if step.name == "div":
        return position == 0
    return step.name not in CHOOSING or any(made.is_large for made in makes)
