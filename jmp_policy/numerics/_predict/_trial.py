"""A policy tried on a program: which of its values it puts in which dtype. Nothing runs, and nothing is compiled.

The rules are the ones that write real programs: autocast's own, and `_layer_rule.py` for `with_policy`. They are asked
about each equation at each place that it is called from, and what they say is noted.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._jaxpr import Atom, Body, Kind, Rewriter, Rule, Value, float_dtype, is_float, walk
from ...autocast._rewrite import (
    COMPUTE_DTYPES,
    AutocastRules,
    Casting,
    CastingRule,
    Colour,
    EquationPlace,
    Mark,
    Scopes,
    root_policy,
)
from ...policy import Policy, PolicyMap
from .._stats import ObservedProgram
from ._layer_rule import HALF, LayerPlace, LayerRule


class Written(NamedTuple):
    """What a policy makes of an equation.

    Attributes:
      operands: the dtypes in which its operands reach it, before it casts them; `None` for what is no float.
      results: the dtypes of its results.
    """

    operands: tuple[np.dtype | None, ...]
    results: tuple[np.dtype | None, ...]


Chain = tuple[int, ...]


def try_policy(observed: ObservedProgram, policy: Policy | PolicyMap, by: str) -> dict[Chain, Written]:
    """What a policy makes of each equation of a program, by the identities of the equations around it and of itself.

    Args:
      observed: the program.
      policy: the policy.
      by: `"autocast"` or `"with_policy"`. A program that has values in half already was traced under a policy: what
        that has in half the other one is taken to have, too, whichever of the two it was.
    """
    program, found = observed.program, dict[Chain, Written]()
    rule: Rule
    if by == "with_policy" or has_half(program):
        rule, start = LayerRule(policy, observed.modules, observed.list_types(), has_half(program)), LayerPlace()
    else:
        rule, start = _make_casting_rule(observed, policy), EquationPlace()
    kinds = [
        Kind(float_dtype(var), Mark(Colour.TRACED))
        if isinstance(rule, CastingRule)
        else rule.argument(float_dtype(var))
        for var in program.invars
    ]
    wanted = [float_dtype(var) for var in program.outvars]
    _Watcher(_PlacedRule(rule, found), found).rewrite(program, kinds, _Place(start), wanted)
    return found


def has_half(program: Jaxpr) -> bool:
    """Whether a program has values in half precision."""
    inside = (atom for step in walk(program) for atom in step.results)
    return any(is_float(atom) and float_dtype(atom) in HALF for atom in (*program.invars, *inside))


def _make_casting_rule(observed: ObservedProgram, policy: Policy | PolicyMap) -> CastingRule:
    """The rule of `autocast(fun, policy)`."""
    rules, scopes = AutocastRules(), None
    if isinstance(policy, PolicyMap):
        modules = observed.modules._replace(types=tuple(observed.list_types().items()))
        scopes = Scopes(policy, rules.scopes, rules.backward, modules)
    root = root_policy(policy)
    dtype: Any = root.compute_dtype if root.compute_dtype in COMPUTE_DTYPES else np.dtype(np.float32)
    rule = CastingRule(Casting(dtype, rules, "opaque", scopes, root.accumulate_dtype))
    rule.rewritten = weakref.WeakKeyDictionary()
    return rule


class _Place(NamedTuple):
    """Where an equation stands: what the rule knows of it, and the equations around it and itself, by identity."""

    inner: Any
    chain: Chain = ()


class _PlacedRule(Rule):
    """A rule that is asked about a body again at each place that it is called from."""

    def __init__(self, rule: Rule, found: dict[Chain, Written]):
        self._rule, self._found = rule, found
        self.rewritten = weakref.WeakKeyDictionary()

    def contexts(self, outer: _Place, program: Jaxpr) -> list[_Place]:
        inner = self._rule.contexts(outer.inner, program)
        return [_Place(place, (*outer.chain, id(eqn))) for place, eqn in zip(inner, program.eqns, strict=True)]

    def equation(self, eqn: JaxprEqn, values: list[Value], body: Body, context: _Place) -> list[Value]:
        return self._rule.equation(eqn, values, body, context.inner)

    def together(
        self, program: Jaxpr, start: int, read: Callable[[Atom], Value], body: Body, contexts: Sequence[_Place]
    ) -> tuple[int, list[Value]] | None:
        several = self._rule.together(program, start, read, body, [place.inner for place in contexts])
        if several is not None:
            # What is inside of several equations that are written as one runs in float32.
            count, results = several
            *inside, last = range(start, start + count)
            for i in inside:
                wide = tuple(np.dtype(np.float32) if is_float(var) else None for var in program.eqns[i].outvars)
                self._found[contexts[i].chain] = Written((), wide)
            operands = [read(atom) for atom in program.eqns[last].invars] if count == 1 else []
            self._found[contexts[last].chain] = _describe(operands, results)
        return several

    def entering(self, eqn: JaxprEqn, values: list[Value], body: Body, context: _Place) -> list[Value]:
        return self._rule.entering(eqn, values, body, context.inner)

    def argument(self, dtype: np.dtype | None) -> Kind:
        return self._rule.argument(dtype)

    def literal(self, literal: Literal) -> Kind:
        return self._rule.literal(literal)

    def join(self, kinds: Sequence[Kind]) -> Kind:
        return self._rule.join(kinds)

    def accumulators(self, program: Jaxpr, carry: range) -> frozenset[int]:
        return self._rule.accumulators(program, carry)

    def accumulated(self, kind: Kind) -> Kind:
        return self._rule.accumulated(kind)

    def stacked(self, eqn: JaxprEqn, kinds: Sequence[Kind], context: _Place) -> Sequence[Kind]:
        return self._rule.stacked(eqn, kinds, context.inner)

    def opens(self, eqn: JaxprEqn, context: _Place) -> bool:
        return self._rule.opens(eqn, context.inner)

    def opens_inside(self, eqn: JaxprEqn, context: _Place) -> bool:
        return self._rule.opens_inside(eqn, context.inner)


class _Watcher(Rewriter):
    """Notes what becomes of each equation; of a loop, what its last turn is written as."""

    def __init__(self, rule: Rule, found: dict[Chain, Written]):
        super().__init__(rule)
        self._found = found

    def _write(self, eqn: JaxprEqn, values: list[Value], body: Body, context: _Place) -> list[Value]:
        results = super()._write(eqn, values, body, context)
        self._found[context.chain] = _describe(values, results)
        return results


def _describe(operands: Sequence[Value], results: Sequence[Value]) -> Written:
    return Written(*(tuple(value.kind.dtype for value in values) for values in (operands, results)))
