"""Follows values through a jaxpr, to steep operations and backward passes.

A sigmoid of h is 1 in half precision from h = 6.2 (bfloat16) or 8.3 (float16) on. Float32 still represents the
difference to 1 up to h = 17. Gates and activations lose nothing, but `log(1 - sigmoid(h))` becomes infinite, without a
gradient.

Sums are followed only to logarithms, as of the probability of a class or mixture. A sum before a root is a norm, and
all values of a model lead to norms.
"""

from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from .._jaxpr import WITHOUT_JAXPRS, SubJaxpr, float_dtype, is_backward, list_variables, remember_by_jaxpr, sub_jaxprs
from ._tables import CLEAR, INFER, SATURATING, STEEP

NONE: frozenset[int] = frozenset()

PASSING = {*CLEAR, *INFER, "convert_element_type"} - set(SATURATING)
"""Operations that only move, add and multiply elements."""


class _Search(NamedTuple):
    """The operations to search for, and those to pass through."""

    targets: frozenset[str]
    passing: frozenset[str]


STEEP_OPERATIONS = _Search(frozenset(STEEP), frozenset(PASSING))
LOGARITHMS = _Search(frozenset({"log", "log2", "log1p"}), frozenset({*PASSING, "reduce_sum", "cumsum"}))


@remember_by_jaxpr  # else the time doubles with each level of nested calls
def find_reaching(program: Jaxpr, leaving: frozenset[int], search: _Search) -> tuple[list[frozenset[int]], set[Var]]:
    """Finds the outputs of each equation that reach a target, and all variables that do.

    `leaving` are the outputs of `program` that do.
    """
    reaching = set(list_variables(atom for i, atom in enumerate(program.outvars) if i in leaving))
    others = WITHOUT_JAXPRS - search.targets
    steep = [
        NONE
        if eqn.primitive.name in others and (not reaching or reaching.isdisjoint(eqn.outvars))
        else _step(eqn, reaching, search)
        for eqn in reversed(program.eqns)
    ]
    return steep[::-1], reaching


def _step(eqn: JaxprEqn, reaching: set[Var], search: _Search) -> frozenset[int]:
    """Returns the outputs of an equation that are in `reaching`, and adds its operands that reach a target."""
    steep = frozenset(i for i, var in enumerate(eqn.outvars) if var in reaching)
    # Gradients do not saturate.
    passes = steep and eqn.primitive.name in search.passing and not _is_of_backward(eqn)
    if passes or eqn.primitive.name in search.targets:
        read = list_variables(atom for i, atom in enumerate(eqn.invars) if passes or is_steep_in(eqn, i))
        reaching.update(var for var in read if float_dtype(var) is not None)
    for body in sub_jaxprs(eqn):
        steep |= _step_inside(body, steep, reaching, search)
    return steep


def _step_inside(body: SubJaxpr, steep: frozenset[int], reaching: set[Var], search: _Search) -> frozenset[int]:
    """Does the same for a sub-jaxpr. A carried value reaches a target if it does in any iteration."""
    inside = find_reaching(body.program, steep if body.outputs else NONE, search)[1]
    inputs = [i for i, (_, var) in enumerate(body.inputs) if var in inside]
    carried = steep.union(i - body.carry.start for i in inputs if i in body.carry)
    if carried != steep:
        return _step_inside(body, carried, reaching, search)
    reaching.update(list_variables(body.inputs[i][0] for i in inputs))
    return steep


def is_steep_in(eqn: JaxprEqn, position: int) -> bool:
    """True if an equation is steep in one of its operands; a quotient is steep in its denominator."""
    name = eqn.primitive.name
    return name in STEEP and (name != "div" or position == 1)


def find_saved_results(program: Jaxpr, leaving: frozenset[int]) -> list[frozenset[int]]:
    """Finds the outputs of equations with sub-jaxprs that only a backward pass reads; so are those in `leaving`."""
    forward = (eqn for eqn in program.eqns if not _is_of_backward(eqn))
    used = set(list_variables(atom for eqn in forward for atom in eqn.invars))
    used.update(list_variables(atom for i, atom in enumerate(program.outvars) if i not in leaving))
    return [
        NONE
        if _is_of_backward(eqn) or not sub_jaxprs(eqn)
        else frozenset(i for i, var in enumerate(eqn.outvars) if var not in used)
        for eqn in program.eqns
    ]


_PASSING_GRADIENTS = {*CLEAR, "add_any", "convert_element_type"}


def is_gradient_sum(program: Jaxpr, number: int) -> bool:
    """True if an equation adds gradients that leave the backward pass, as for a weight that is used twice.

    Their sum is in float32. Gradients that the backward pass reads are of activations, and stay in half precision.
    """
    eqn = program.eqns[number]
    return eqn.primitive.name == "add_any" and _is_of_backward(eqn) and number in _find_gradient_sums(program)


@remember_by_jaxpr  # else each sum would look for all of them
def _find_gradient_sums(program: Jaxpr) -> set[int]:
    staying: set[Var] = set()  # operands of computations of the backward pass
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
    """True by the own name stack: outputs of a loop in a backward pass may be gradients of activations."""
    return is_backward(str(eqn.source_info.name_stack))


def is_applied_to_each(eqn: JaxprEqn) -> bool:
    """True if an equation treats several arrays independently, as barriers, sorts and collectives do."""
    return eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars) > 1
