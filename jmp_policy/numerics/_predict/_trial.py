"""Finds the dtype of each value of a jaxpr under a policy, without running or compiling it."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._base import list_paths_to
from ..._jaxpr import (
    AbstractValue,
    Atom,
    Fact,
    JaxprBuilder,
    ModulePaths,
    Modules,
    Rewriter,
    Rule,
    Value,
    float_dtype,
    having,
    is_backward,
    is_float,
    walk,
)
from ...autocast._rewrite import (
    COMPUTE_DTYPES,
    FUNCTIONS,
    AutocastRules,
    CastingRule,
    CastState,
    EquationPlace,
    Functions,
    Level,
    Scopes,
    root_policy,
)
from ...policy import Policy, PolicyMap, match_policy
from .._stats import ObservedProgram

_FLOAT32 = np.dtype(np.float32)
HALF = frozenset(map(np.dtype, ("float16", "bfloat16")))

_NORMS = {name: way for name, way in FUNCTIONS.items() if name.startswith("flax.") and "Norm" in name}
_SUMS = having(Fact.SUMS) | {"add_any"}


class LayerPlace(NamedTuple):
    """Module path of an equation, and whether it is inside a norm layer or in the backward pass."""

    path: str = ""
    norm: bool = False
    backward: bool = False


class _LayerState(NamedTuple):
    """The module that made a value, if any, and whether the value stays float32 until it is used."""

    module: str | None = None
    wide: bool = False


class LayerRule(Rule):
    """Dtypes of values under `with_policy`. If `traced_half`, the values that were traced in half precision stay so."""

    def __init__(self, policy: Policy | PolicyMap, modules: Modules, types: Mapping[str, type], traced_half: bool):
        self._policy, self._types, self._traced_half = policy, dict(types), traced_half
        self._paths, self._norms = ModulePaths(modules), Functions(_NORMS)

    def contexts(self, outer: LayerPlace, program: Jaxpr) -> list[LayerPlace]:
        return [self._find_place(outer, eqn) for eqn in program.eqns]

    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: LayerPlace) -> list[Value]:
        dtype, state = self._find_result(eqn, values, context)
        kinds = [
            AbstractValue(dtype if float_dtype(var) in (_FLOAT32, *HALF) else float_dtype(var), state)
            for var in eqn.outvars
        ]
        return body.append(eqn, [value.atom for value in values], kinds)

    def argument(self, dtype: np.dtype | None) -> AbstractValue:
        return AbstractValue(dtype, _LayerState())

    def literal(self, literal: Literal) -> AbstractValue:
        return AbstractValue(float_dtype(literal), _LayerState())

    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        return next((kind for kind in kinds if kind.dtype in HALF), kinds[0])

    def rewrites_custom_rule(self, eqn: JaxprEqn, context: Any) -> bool:
        return True

    def rewrites_primal_only(self, eqn: JaxprEqn, context: Any) -> bool:
        return True

    def _find_place(self, outer: LayerPlace, eqn: JaxprEqn) -> LayerPlace:
        backward = outer.backward or is_backward(str(eqn.source_info.name_stack))
        norm = outer.norm or self._norms.find(eqn) is not None
        return LayerPlace(self._paths.find(outer.path, eqn), norm, backward)

    def _find_result(self, eqn: JaxprEqn, values: Sequence[Value], place: LayerPlace) -> tuple[np.dtype, _LayerState]:
        if self._traced_half:
            half = any(float_dtype(var) in HALF for var in eqn.outvars)
            compute = self._policy_at(place.path).compute_dtype
            return (compute if half and compute is not None and compute in HALF else _FLOAT32), _LayerState(place.path)
        module = self._find_module(place.path)
        if module is None:
            return self._promote(values), _LayerState()
        compute = self._policy_at(module).compute_dtype or _FLOAT32
        wide = place.norm or (eqn.primitive.name in _SUMS and not place.backward) or self._continues_sum(eqn, values)
        return (_FLOAT32 if wide else compute), _LayerState(module, wide)

    def _continues_sum(self, eqn: JaxprEqn, values: Sequence[Value]) -> bool:
        """True for the division of a mean, and for a reshape or broadcast of a float32 sum."""
        is_mean = eqn.primitive.name == "div" and isinstance(eqn.invars[1], Literal)
        moves = eqn.primitive.name in ("broadcast_in_dim", "reshape")
        return (is_mean or moves) and values[0].kind.state is not None and values[0].kind.state.wide

    def _promote(self, values: Sequence[Value]) -> np.dtype:
        """Dtype of an op outside all modules: the widest dtype of its operands."""
        strong = [value for value in values if not getattr(value.atom.aval, "weak_type", False)]
        dtypes = [self._leave(value.kind) for value in strong if value.kind.dtype in (_FLOAT32, *HALF)]
        wide = not dtypes or _FLOAT32 in dtypes
        return _FLOAT32 if wide else next(dtype for dtype in dtypes if dtype is not None)

    def _leave(self, kind: AbstractValue) -> np.dtype | None:
        """Dtype of a value outside the outermost module."""
        state = kind.state
        if state is None or state.module is None:
            return kind.dtype
        outermost = next(outer for outer in list_paths_to(state.module) if outer in self._types)
        return self._policy_at(outermost).output_dtype or kind.dtype

    def _find_module(self, path: str) -> str | None:
        return next((outer for outer in reversed(list_paths_to(path)) if outer in self._types), None)

    def _policy_at(self, path: str) -> Policy:
        return match_policy(self._policy, path, self._types).policy


class Written(NamedTuple):
    """Dtypes of the operands of an equation (before it casts them) and of its results. `None` for other dtypes."""

    operands: tuple[np.dtype | None, ...]
    results: tuple[np.dtype | None, ...]


Chain = tuple[int, ...]


def try_policy(observed: ObservedProgram, policy: Policy | PolicyMap, by: str) -> dict[Chain, Written]:
    """Finds the dtypes of each equation under a policy, by the ids of the equations around it and of itself.

    A jaxpr with half-precision values was traced under a policy already. The new policy is taken to have the same
    values in half precision.
    """
    program, found = observed.program, dict[Chain, Written]()
    rule: Rule
    if by == "with_policy" or has_half(program):
        rule, start = LayerRule(policy, observed.modules, observed.list_types(), has_half(program)), LayerPlace()
    else:
        rule, start = _make_casting_rule(observed, policy), EquationPlace()
    kinds = [
        AbstractValue(float_dtype(var), CastState(Level.TRACED))
        if isinstance(rule, CastingRule)
        else rule.argument(float_dtype(var))
        for var in program.invars
    ]
    wanted = [float_dtype(var) for var in program.outvars]
    _Watcher(_PlacedRule(rule, found), found).rewrite(program, kinds, _Place(start), wanted)
    return found


def has_half(program: Jaxpr) -> bool:
    inside = (atom for step in walk(program) for atom in step.results)
    return any(is_float(atom) and float_dtype(atom) in HALF for atom in (*program.invars, *inside))


def _make_casting_rule(observed: ObservedProgram, policy: Policy | PolicyMap) -> CastingRule:
    rules, scopes = AutocastRules(), None
    if isinstance(policy, PolicyMap):
        modules = observed.modules._replace(types=tuple(observed.list_types().items()))
        scopes = Scopes(policy, rules.scopes, rules.backward, modules)
    root = root_policy(policy)
    dtype: Any = root.compute_dtype if root.compute_dtype in COMPUTE_DTYPES else np.dtype(np.float32)
    rule = CastingRule(dtype, rules, "opaque", scopes, root.accumulate_dtype)
    rule.rewritten = weakref.WeakKeyDictionary()
    return rule


class _Place(NamedTuple):
    """The inner rule's context of an equation, and the ids of the equations around it and of itself."""

    inner: Any
    chain: Chain = ()


class _PlacedRule(Rule):
    """Applies a rule to a sub-jaxpr again at each place that calls it."""

    def __init__(self, rule: Rule, found: dict[Chain, Written]):
        self._rule, self._found = rule, found
        self.rewritten = weakref.WeakKeyDictionary()

    def contexts(self, outer: _Place, program: Jaxpr) -> list[_Place]:
        inner = self._rule.contexts(outer.inner, program)
        return [_Place(place, (*outer.chain, id(eqn))) for place, eqn in zip(inner, program.eqns, strict=True)]

    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: _Place) -> list[Value]:
        return self._rule.equation(eqn, values, body, context.inner)

    def fuse(
        self, program: Jaxpr, start: int, read: Callable[[Atom], Value], body: JaxprBuilder, contexts: Sequence[_Place]
    ) -> tuple[int, list[Value]] | None:
        several = self._rule.fuse(program, start, read, body, [place.inner for place in contexts])
        if several is not None:
            # Equations that autocast fuses into one op compute in float32 inside it.
            count, results = several
            *inside, last = range(start, start + count)
            for i in inside:
                wide = tuple(np.dtype(np.float32) if is_float(var) else None for var in program.eqns[i].outvars)
                self._found[contexts[i].chain] = Written((), wide)
            operands = [read(atom) for atom in program.eqns[last].invars] if count == 1 else []
            self._found[contexts[last].chain] = _describe(operands, results)
        return several

    def cast_operands(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: _Place) -> list[Value]:
        return self._rule.cast_operands(eqn, values, body, context.inner)

    def argument(self, dtype: np.dtype | None) -> AbstractValue:
        return self._rule.argument(dtype)

    def literal(self, literal: Literal) -> AbstractValue:
        return self._rule.literal(literal)

    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        return self._rule.join(kinds)

    def accumulators(self, program: Jaxpr, carry: range) -> frozenset[int]:
        return self._rule.accumulators(program, carry)

    def accumulated(self, kind: AbstractValue) -> AbstractValue:
        return self._rule.accumulated(kind)

    def stacked(self, eqn: JaxprEqn, kinds: Sequence[AbstractValue], context: _Place) -> Sequence[AbstractValue]:
        return self._rule.stacked(eqn, kinds, context.inner)

    def rewrites_custom_rule(self, eqn: JaxprEqn, context: _Place) -> bool:
        return self._rule.rewrites_custom_rule(eqn, context.inner)

    def rewrites_primal_only(self, eqn: JaxprEqn, context: _Place) -> bool:
        return self._rule.rewrites_primal_only(eqn, context.inner)


class _Watcher(Rewriter):
    """Records the dtypes of each equation; for a loop, the dtypes of its last rewrite."""

    def __init__(self, rule: Rule, found: dict[Chain, Written]):
        super().__init__(rule)
        self._found = found

    def _write(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: _Place) -> list[Value]:
        results = super()._write(eqn, values, body, context)
        self._found[context.chain] = _describe(values, results)
        return results


def _describe(operands: Sequence[Value], results: Sequence[Value]) -> Written:
    return Written(*(tuple(value.kind.dtype for value in values) for values in (operands, results)))
