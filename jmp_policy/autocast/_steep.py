"""Which results reach an operation that is steep where others saturate: a logarithm of `1 - sigmoid(h)`, a quotient.

A sigmoid is 1 in half precision from h = 6.2 (bfloat16) or 8.3 (float16) on, where float32 still has what is missing,
up to h = 17. Nothing is lost where that is a gate or an activation; a logarithm of it is infinite, without a gradient.

A sum is passed on the way to a logarithm alone, of the probability of a class or of a mixture. On the way to a root it
is that of a norm, to which all that a model computes leads.
"""

import weakref
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..interpreter import Inside, bodies_of, float_dtype
from ._gradient_sums import is_backward
from ._tables import CLEAR, INFER, SATURATING, STEEP

NONE: frozenset[int] = frozenset()

_PASSING = {*CLEAR, *INFER, "convert_element_type"} - set(SATURATING)


class _Way(NamedTuple):
    """Which operations are the ends of a way, and which are passed on it."""

    ends: frozenset[str]
    passing: frozenset[str]


_TO_STEEP = _Way(frozenset(STEEP), frozenset(_PASSING))
_TO_LOGARITHM = _Way(frozenset({"log", "log2", "log1p"}), frozenset({*_PASSING, "reduce_sum", "cumsum"}))

_FOUND: weakref.WeakKeyDictionary[Jaxpr, dict[tuple[_Way, frozenset[int]], tuple[list[frozenset[int]], set]]]
_FOUND = weakref.WeakKeyDictionary()


def steep_results(program: Jaxpr, leaving: frozenset[int]) -> list[frozenset[int]]:
    """Which results of each equation reach a steep operation through such as only move, add and multiply numbers.

    Args:
      program: its equations.
      leaving: which results of the program do, outside of it.
    """
    return _find(program, leaving, _TO_STEEP)[0]


def logarithmic_results(program: Jaxpr, leaving: frozenset[int]) -> list[frozenset[int]]:
    """As `steep_results`: which results reach a logarithm, through sums as well."""
    return _find(program, leaving, _TO_LOGARITHM)[0]


def is_steep_in(eqn: JaxprEqn, position: int) -> bool:
    """Whether an equation is steep in one of its operands: a quotient is in what it divides by."""
    name = eqn.primitive.name
    return name in STEEP and (name != "div" or position == 1)


def _find(program: Jaxpr, leaving: frozenset[int], way: _Way) -> tuple[list[frozenset[int]], set]:
    """Which results of each equation lead to the end of a way, and the variables that do."""
    found = _FOUND.setdefault(program, {})
    if (way, leaving) not in found:
        leaves = (atom for i, atom in enumerate(program.outvars) if i in leaving)
        reaching = {atom for atom in leaves if not isinstance(atom, Literal)}
        steep = [_step(eqn, reaching, way) for eqn in reversed(program.eqns)]
        found[way, leaving] = steep[::-1], reaching
    return found[way, leaving]


def _step(eqn: JaxprEqn, reaching: set, way: _Way) -> frozenset[int]:
    """Which results of an equation are among what reaches the end of a way; adds what it reads that does."""
    steep = frozenset(i for i, var in enumerate(eqn.outvars) if var in reaching) if reaching else NONE
    passes = steep and eqn.primitive.name in way.passing and not is_backward(eqn)  # a gradient does not saturate
    if passes or eqn.primitive.name in way.ends:
        read = (atom for i, atom in enumerate(eqn.invars) if passes or is_steep_in(eqn, i))
        reaching.update(atom for atom in read if not isinstance(atom, Literal) and float_dtype(atom) is not None)
    for body in bodies_of(eqn):
        steep |= _step_inside(body, steep, reaching, way)
    return steep


def _step_inside(body: Inside, steep: frozenset[int], reaching: set, way: _Way) -> frozenset[int]:
    """The same of a body of an equation, where what goes around a loop is one value."""
    inside = _find(body.program, steep if body.leaving else NONE, way)[1]
    entering = [i for i, (_, var) in enumerate(body.entering) if var in inside]
    carried = steep.union(i - body.carry.start for i in entering if i in body.carry)
    if carried != steep:
        return _step_inside(body, carried, reaching, way)
    reaching.update(body.entering[i][0] for i in entering if not isinstance(body.entering[i][0], Literal))
    return steep
