"""Sums of gradients that leave a backward pass: those of a weight that is used several times."""

import weakref
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ._tables import CLEAR

_PASSING = {*CLEAR, "add_any", "convert_element_type"}

_FOUND: weakref.WeakKeyDictionary[Jaxpr, set[int]] = weakref.WeakKeyDictionary()


def is_gradient_sum(program: Jaxpr, number: int) -> bool:
    """Whether an equation adds gradients, and what comes of it leaves the backward pass.

    What the backward pass itself goes on with is the gradient of an activation: those are half, as by hand. That of a
    weight is summed in float32, as it is where the casts of its uses are differentiated.
    """
    if program.eqns[number].primitive.name != "add_any" or not is_backward(program.eqns[number]):
        return False
    if program not in _FOUND:
        _FOUND[program] = _gradient_sums(program)
    return number in _FOUND[program]


def _gradient_sums(program: Jaxpr) -> set[int]:
    staying: set[Any] = set()  # what an operation of the backward pass computes with
    found = set()
    for number in reversed(range(len(program.eqns))):
        eqn = program.eqns[number]
        if not is_backward(eqn):
            continue
        passes = eqn.primitive.name in _PASSING and staying.isdisjoint(eqn.outvars)
        if passes and eqn.primitive.name == "add_any":
            found.add(number)
        if not passes:
            staying.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return found


def is_backward(eqn: JaxprEqn) -> bool:
    """By its own name alone: what leaves the body of a loop or call of a backward pass may be of an activation."""
    return "transpose(" in str(eqn.source_info.name_stack)
