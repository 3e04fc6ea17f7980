"""Where results lead: to an operation that is steep where others saturate, or into or out of a backward pass.

A sigmoid is 1 in half precision from h = 6.2 (bfloat16) or 8.3 (float16) on, where float32 still has what is missing,
up to h = 17. Nothing is lost where it is a gate or an activation; a logarithm of `1 - sigmoid(h)` is infinite, without
a gradient.

A sum is passed on the way to a logarithm alone, of the probability of a class or of a mixture. On the way to a root it
is the sum of a norm, to which all that a model computes leads.
"""

import weakref
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from ..._jaxpr import SubJaxpr, float_dtype, is_backward, list_variables, sub_jaxprs
from ._tables import CLEAR, INFER, SATURATING, STEEP

NONE: frozenset[int] = frozenset()

PASSING = {*CLEAR, *INFER, "convert_element_type"} - set(SATURATING)
"""What moves, adds and multiplies numbers only."""


class _Way(NamedTuple):
    """Which operations are the ends of a way, and which are passed on it."""

    ends: frozenset[str]
    passing: frozenset[str]


_TO_STEEP = _Way(frozenset(STEEP), frozenset(PASSING))
_TO_LOGARITHM = _Way(frozenset({"log", "log2", "log1p"}), frozenset({*PASSING, "reduce_sum", "cumsum"}))

_Found = tuple[list[frozenset[int]], set[Var]]

_LEADING: weakref.WeakKeyDictionary[Jaxpr, dict[tuple[_Way, frozenset[int]], _Found]] = weakref.WeakKeyDictionary()


def find_steep_results(program: Jaxpr, leaving: frozenset[int]) -> list[frozenset[int]]:
    """Which results of each equation reach a steep operation through such as only move, add and multiply numbers.

    Args:
      program: its equations.
      leaving: which results of the program do, outside of it.
    """
    return _follow(program, leaving, _TO_STEEP)[0]


def find_logarithmic_results(program: Jaxpr, leaving: frozenset[int]) -> list[frozenset[int]]:
    """As `find_steep_results`: which results reach a logarithm, through sums as well."""
    return _follow(program, leaving, _TO_LOGARITHM)[0]


def is_steep_in(eqn: JaxprEqn, position: int) -> bool:
    """Whether an equation is steep in one of its operands: a quotient is in what it divides by."""
    name = eqn.primitive.name
    return name in STEEP and (name != "div" or position == 1)


def _follow(program: Jaxpr, leaving: frozenset[int], way: _Way) -> _Found:
    """Which results of each equation lead to the end of a way, and the variables that do."""
    found = _LEADING.setdefault(program, {})
    if (way, leaving) not in found:
        reaching = set(list_variables(atom for i, atom in enumerate(program.outvars) if i in leaving))
        steep = [_step(eqn, reaching, way) for eqn in reversed(program.eqns)]
        found[way, leaving] = steep[::-1], reaching
    return found[way, leaving]


def _step(eqn: JaxprEqn, reaching: set[Var], way: _Way) -> frozenset[int]:
    """Which results of an equation are among what reaches the end of a way; adds what it reads that does."""
    steep = frozenset(i for i, var in enumerate(eqn.outvars) if var in reaching) if reaching else NONE
    passes = steep and eqn.primitive.name in way.passing and not _is_of_backward(eqn)  # a gradient does not saturate
    if passes or eqn.primitive.name in way.ends:
        read = list_variables(atom for i, atom in enumerate(eqn.invars) if passes or is_steep_in(eqn, i))
        reaching.update(var for var in read if float_dtype(var) is not None)
    for body in sub_jaxprs(eqn):
        steep |= _step_inside(body, steep, reaching, way)
    return steep


def _step_inside(body: SubJaxpr, steep: frozenset[int], reaching: set[Var], way: _Way) -> frozenset[int]:
    """The same of a body of an equation, where what goes around a loop is one value."""
    inside = _follow(body.program, steep if body.outputs else NONE, way)[1]
    entering = [i for i, (_, var) in enumerate(body.inputs) if var in inside]
    carried = steep.union(i - body.carry.start for i in entering if i in body.carry)
    if carried != steep:
        return _step_inside(body, carried, reaching, way)
    reaching.update(list_variables(body.inputs[i][0] for i in entering))
    return steep


_SAVED: weakref.WeakKeyDictionary[Jaxpr, dict[frozenset[int], list[frozenset[int]]]] = weakref.WeakKeyDictionary()


def find_saved_results(program: Jaxpr, leaving: frozenset[int]) -> list[frozenset[int]]:
    """Which results of each equation that runs programs only a backward pass reads: what was kept for it.

    Args:
      program: its equations.
      leaving: which results of the program are kept, outside of it.
    """
    found = _SAVED.setdefault(program, {})
    if leaving not in found:
        forward = (eqn for eqn in program.eqns if not _is_of_backward(eqn))
        used = set(list_variables(atom for eqn in forward for atom in eqn.invars))
        used.update(list_variables(atom for i, atom in enumerate(program.outvars) if i not in leaving))
        found[leaving] = [_find_unused(eqn, used) for eqn in program.eqns]
    return found[leaving]


def _find_unused(eqn: JaxprEqn, used: set[Var]) -> frozenset[int]:
    if _is_of_backward(eqn) or not sub_jaxprs(eqn):
        return NONE
    return frozenset(i for i, var in enumerate(eqn.outvars) if var not in used)


_PASSING_GRADIENTS = {*CLEAR, "add_any", "convert_element_type"}

_GRADIENT_SUMS: weakref.WeakKeyDictionary[Jaxpr, set[int]] = weakref.WeakKeyDictionary()


def is_gradient_sum(program: Jaxpr, number: int) -> bool:
    """Whether an equation adds gradients, and what comes of it leaves the backward pass, as for a weight used twice.

    What the backward pass itself goes on with is the gradient of an activation: it is half, as by hand. The gradient of
    a weight is summed in float32, as it is where the casts of its uses are differentiated.
    """
    if program.eqns[number].primitive.name != "add_any" or not _is_of_backward(program.eqns[number]):
        return False
    if program not in _GRADIENT_SUMS:
        _GRADIENT_SUMS[program] = _find_gradient_sums(program)
    return number in _GRADIENT_SUMS[program]


def _find_gradient_sums(program: Jaxpr) -> set[int]:
    staying: set[Var] = set()  # what an operation of the backward pass computes with
    found = set()
    for number in reversed(range(len(program.eqns))):
        eqn = program.eqns[number]
        if not _is_of_backward(eqn):
            continue
        passes = eqn.primitive.name in _PASSING_GRADIENTS and staying.isdisjoint(eqn.outvars)
        if passes and eqn.primitive.name == "add_any":
            found.add(number)
        if not passes:
            staying.update(list_variables(eqn.invars))
    return found


def _is_of_backward(eqn: JaxprEqn) -> bool:
    """By its own name alone: what leaves the body of a loop or call of a backward pass may be of an activation."""
    return is_backward(str(eqn.source_info.name_stack))
