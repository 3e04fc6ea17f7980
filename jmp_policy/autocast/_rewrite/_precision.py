"""In which precision an operation runs: what the tables, its place and its constants say."""

import functools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..._jaxpr import Value, float_dtype, multiplies_only
from . import _tables
from ._marks import Colour, is_lost, is_sum
from ._place import EquationPlace
from ._scopes import COMPUTE_DTYPES
from ._tables import SATURATING, Precision

_ALL_FULL = dict.fromkeys(
    (Precision.LOW, Precision.FULL, Precision.WIDE, Precision.INFER, Precision.CLEAR), Precision.FULL
)
_INSIDE = {
    "full": _ALL_FULL,
    "narrow": _ALL_FULL,
    "infer": {Precision.FULL: Precision.INFER},
    "low": dict.fromkeys((Precision.FULL, Precision.INFER), Precision.LOW),
    "traced": dict.fromkeys(Precision, Precision.TRACED),
}
"""What the classes become inside of a function that is treated as one operation."""


class PrecisionFinder:
    """Finds the precision of each equation.

    Args:
      rows: the user's primitives, each with its class.
      compute_dtype: the dtype of low operations.
    """

    def __init__(self, rows: tuple[tuple[str, str], ...], compute_dtype: np.dtype):
        self._classes = _classify_primitives(rows, compute_dtype)
        self._compute = compute_dtype

    def find(self, eqn: JaxprEqn, values: Sequence[Value], place: EquationPlace) -> Precision:
        """The precision of an equation that reads certain values in a place."""
        if not is_castable(eqn):
            return Precision.TRACED
        # What the tables say of the operation by itself; an outer product sums nothing, and is a multiplication.
        precision = self._classes.get(_name_operation(eqn), Precision.TRACED)
        if precision is Precision.LOW and multiplies_only(eqn):
            precision = Precision.INFER
        # The function or scope around it is above that, and what its constants must still mean is above both.
        if place.treatment is not None:
            precision = _INSIDE[place.treatment].get(precision, precision)
        if precision in (Precision.INFER, Precision.CLEAR) and self._is_too_fine(eqn, values, place):
            return Precision.FULL
        return precision

    def _is_too_fine(self, eqn: JaxprEqn, values: Sequence[Value], place: EquationPlace) -> bool:
        """Whether an equation that would follow its inputs makes a difference that the compute dtype has not."""
        if place.steep and eqn.primitive.name in SATURATING:
            return any(value.kind.dtype == self._compute or is_sum(value.kind) for value in values)
        marks = [(i, value.kind.mark) for i, value in enumerate(values) if value.kind.dtype is not None]
        constants = [(i, mark.numbers) for i, mark in marks if mark.numbers]
        if not constants or is_applied_to_each(eqn) or all(mark.colour is Colour.TRACED for _, mark in marks):
            return False
        return any(is_lost(numbers, eqn, i, self._compute) for i, numbers in constants)


def is_castable(eqn: JaxprEqn) -> bool:
    """Whether there are floating arrays, and none that autocast leaves alone: float64, float8."""
    dtypes = {float_dtype(atom) for atom in (*eqn.invars, *eqn.outvars)} - {None}
    return bool(dtypes) and dtypes <= COMPUTE_DTYPES


def is_applied_to_each(eqn: JaxprEqn) -> bool:
    """Whether it does the same to each of several arrays, as barriers, sorts and collectives do."""
    return eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars) > 1


def _name_operation(eqn: JaxprEqn) -> str:
    """The row of the tables that an equation has: a product of a value with itself is its square."""
    is_square = eqn.primitive.name == "mul" and eqn.invars[0] is eqn.invars[1]
    return "square" if is_square else eqn.primitive.name


@functools.cache
def _classify_primitives(rows: tuple[tuple[str, str], ...], compute_dtype: np.dtype) -> Mapping[str, Precision]:
    """The class of each primitive under a user's rows, where the compute dtype is this one."""
    found = {}
    for precision in Precision:
        found |= dict.fromkeys(getattr(_tables, precision.name), precision)
    if jnp.finfo(compute_dtype).maxexp < 100:
        found |= dict.fromkeys(_tables.FULL_IN_FLOAT16, Precision.FULL)
    return found | {name: Precision[precision.upper()] for name, precision in rows}
