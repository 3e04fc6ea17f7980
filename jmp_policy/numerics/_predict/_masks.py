"""Finds the mask constants of a measured jaxpr: large values that hide others, and may become infinite."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal, Var

from ..._base import group_by_key
from ..._jaxpr import Fact, Step, float_dtype, having, list_variables, walk
from .._stats import ObservedProgram, Row, identify

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
        size = abs(atom.val) if float_dtype(atom) and np.ndim(atom.val) == 0 and np.isfinite(atom.val) else 0
        is_large = bool(size > largest)
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
