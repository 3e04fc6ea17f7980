"""Finds the carried values that a loop accumulates: the new value is the old one plus, times or blended with something.

Rounded to half precision in each iteration, such a value stalls (512 + 1 is 512 in bfloat16), drifts, or never
converges. So a loop carries it in float32.

A value that is only moved, as in a cache or shift register, does not accumulate. Neither does one that reaches its next
value only through a matmul or a saturating activation, as in a simple recurrent cell.
"""

import collections
from collections.abc import Mapping

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._jaxpr import Atom, SubJaxpr, float_dtype, list_variables, multiplies_only, remember_by_jaxpr, sub_jaxprs
from ._dataflow import PASSING
from ._precision import is_applied_to_each
from ._tables import INFER

Sources = frozenset[tuple[int, bool]]
"""The carried values that a value depends on, each with True if it does through arithmetic, not only moves."""

_NONE: Sources = frozenset()

_PASSING = PASSING - {"sign", "one_minus_square"} | {"scatter-add", "scatter-sub", "scatter-mul"}
_ARITHMETIC = (PASSING & set(INFER)) | {"scatter-add", "scatter-sub", "scatter-mul", "dot_general"}


@remember_by_jaxpr  # a body is rewritten several times, until the kinds of its carry settle
def find_accumulators(program: Jaxpr, carry: range) -> frozenset[int]:
    """Finds the positions in the carry of accumulated values; `carry` numbers the carried arguments of `program`."""
    return _find_float32_accumulators(program, carry) | _find_plain_sums(program, carry)


def _find_float32_accumulators(program: Jaxpr, carry: range) -> frozenset[int]:
    """Finds float32 values that depend on themselves, over one or more iterations, through arithmetic."""
    variables = [program.invars[i] for i in carry]
    sources: dict[Atom, Sources] = {var: frozenset([(i, False)]) for i, var in enumerate(variables) if _is_float32(var)}
    made = _spread_sources(program, sources)
    made_of = [_find_sources(atom, made) for atom in program.outvars[: len(carry)]]
    links: dict[int, set[int]] = {}
    for target, origins in enumerate(made_of):
        for origin, _ in origins:
            links.setdefault(origin, set()).add(target)
    reached = [_find_reached(i, links) for i in range(len(carry))]
    steps = [(i, target) for target, origins in enumerate(made_of) for i, is_calculated in origins if is_calculated]
    return frozenset(i for origin, target in steps for i in reached[target] if origin in reached[i])


def _find_reached(start: int, links: Mapping[int, set[int]]) -> set[int]:
    reached, pending = {start}, [start]
    while pending:
        for i in links.get(pending.pop(), ()):
            if i not in reached:
                reached.add(i)
                pending.append(i)
    return reached


def _spread_sources(program: Jaxpr, sources: Mapping[Atom, Sources]) -> dict[Atom, Sources]:
    """Finds the sources of all values of a jaxpr, given the sources of some arguments."""
    found: dict[Atom, Sources] = dict(sources)
    for eqn in program.eqns:
        if found.keys().isdisjoint(list_variables(eqn.invars)):
            continue
        for inside in sub_jaxprs(eqn):
            for var, leaving in _spread_inside(inside, found).items():
                found[var] = found.get(var, _NONE) | leaving
        if eqn.primitive.name in _PASSING or multiplies_only(eqn):
            found.update(_pass_sources(eqn, found))
    return found


def _pass_sources(eqn: JaxprEqn, found: Mapping[Atom, Sources]) -> dict[Atom, Sources]:
    """Finds the sources of the outputs of an equation that moves elements or computes with them."""
    read = [_find_sources(atom, found) for atom in eqn.invars]
    joined = _NONE.union(*read)
    if eqn.primitive.name in _ARITHMETIC:
        joined = frozenset((i, True) for i, _ in joined)
    each = read if is_applied_to_each(eqn) else [joined] * len(eqn.outvars)
    return {var: own for var, own in zip(eqn.outvars, each, strict=True) if own and _is_float32(var)}


def _spread_inside(inside: SubJaxpr, found: Mapping[Atom, Sources]) -> dict[Atom, Sources]:
    """Finds the sources of the outputs of a sub-jaxpr, over all iterations of a loop."""
    entering = {inner: _find_sources(outer, found) for outer, inner in inside.inputs if _is_float32(inner)}
    while True:
        made = _spread_sources(inside.program, {var: own for var, own in entering.items() if own})
        again = dict(entering)
        for i in inside.carry if inside.outputs else ():
            inner, result = inside.program.invars[i], inside.program.outvars[i - inside.carry.start]
            if inner in entering:
                again[inner] |= _find_sources(result, made)
        if again == entering:
            return {outer: own for inner, outer in inside.outputs if (own := _find_sources(inner, made))}
        entering = again


def _find_sources(atom: Atom, found: Mapping[Atom, Sources]) -> Sources:
    return _NONE if isinstance(atom, Literal) else found.get(atom, _NONE)


def _is_float32(atom: Atom) -> bool:
    return float_dtype(atom) == np.float32


def _find_plain_sums(program: Jaxpr, carry: range) -> frozenset[int]:
    """Finds values of any dtype that one addition per iteration updates, and nothing else reads."""
    carried = {program.invars[number]: i for i, number in enumerate(carry)}
    read = [*(atom for eqn in program.eqns for atom in eqn.invars), *program.outvars]
    uses = collections.Counter(list_variables(read))
    found = set()
    for eqn in program.eqns:
        if eqn.primitive.name not in ("add", "add_any") or uses[eqn.outvars[0]] != 1:
            continue
        for var in list_variables(eqn.invars):
            i = carried.get(var)
            if i is not None and uses[var] == 1 and program.outvars[i] is eqn.outvars[0]:
                found.add(i)
    return frozenset(found)
