"""Finds the dtype of each value of a jaxpr under a policy, without running or compiling it."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._base import at_least_float32, list_paths_to
from .._jaxpr import (
    HALF,
    AbstractValue,
    Atom,
    Fact,
    JaxprBuilder,
    ModulePaths,
    Rewriter,
    Rewritten,
    Rule,
    Value,
    float_dtype,
    having,
    is_backward,
    is_float,
    is_from_custom_rule,
    make_module_finder,
    walk,
)
from ..autocast import AS_TRACED, FUNCTIONS, AutocastRules, EquationPlace, Functions, make_casting_rule, root_policy
from ..policy import Policy, PolicyMap, match_policy
from ._stats_choice import ObservedProgram

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_CAST = frozenset({_FLOAT32, _FLOAT64, *HALF})

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

    def __init__(self, policy: Policy | PolicyMap, observed: ObservedProgram, traced_half: bool):
        self._policy, self._types, self._traced_half = policy, observed.list_types(), traced_half
        self._paths, self._norms = ModulePaths(observed.modules), Functions(_NORMS)
        find_module = make_module_finder(self._types)
        around = lambda path: reversed(list_paths_to(find_module(path)))
        self._find_module = functools.cache(
            lambda path: next((outer for outer in around(path) if outer in self._types), None)
        )

    def contexts(self, outer: LayerPlace, program: Jaxpr) -> list[LayerPlace]:
        return [self._find_place(outer, eqn) for eqn in program.eqns]

    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: LayerPlace) -> list[Value]:
        dtype, state = self._find_result(eqn, values, context)
        kinds = [AbstractValue(dtype if float_dtype(var) in _CAST else float_dtype(var), state) for var in eqn.outvars]
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
            return self._promote(eqn, values), _LayerState()
        compute = self._policy_at(module).compute_dtype or _FLOAT32
        wide = place.norm or (eqn.primitive.name in _SUMS and not place.backward) or self._continues_sum(eqn, values)
        return (at_least_float32(compute) if wide else compute), _LayerState(module, wide)

    def _continues_sum(self, eqn: JaxprEqn, values: Sequence[Value]) -> bool:
        """True for the division of a mean, and for a reshape or broadcast of a float32 sum."""
        is_mean = eqn.primitive.name == "div" and isinstance(eqn.invars[1], Literal)
        moves = eqn.primitive.name in ("broadcast_in_dim", "reshape")
        return (is_mean or moves) and values[0].kind.state is not None and values[0].kind.state.wide

    def _promote(self, eqn: JaxprEqn, values: Sequence[Value]) -> np.dtype:
        """Dtype of an op outside all modules: the widest dtype of its operands."""
        strong = [value for value in values if not getattr(value.atom.aval, "weak_type", False)]
        dtypes = [self._leave(value.kind) for value in strong if value.kind.dtype in _CAST]
        traced = next((dtype for dtype in map(float_dtype, eqn.outvars) if dtype is not None), _FLOAT32)
        return max((dtype for dtype in dtypes if dtype is not None), key=lambda dtype: dtype.itemsize, default=traced)

    def _leave(self, kind: AbstractValue) -> np.dtype | None:
        """Dtype of a value outside the outermost module."""
        state = kind.state
        if state is None or state.module is None:
            return kind.dtype
        outermost = next(outer for outer in list_paths_to(state.module) if outer in self._types)
        return self._policy_at(outermost).output_dtype or kind.dtype

    def _policy_at(self, path: str) -> Policy:
        return match_policy(self._policy, path, self._types).policy


class Written(NamedTuple):
    """Dtypes of the operands of an equation (before it casts them) and of its results. `None` for other dtypes."""

    operands: tuple[np.dtype | None, ...]
    results: tuple[np.dtype | None, ...]


Chain = tuple[int, ...]


def try_policy(observed: ObservedProgram, policy: Policy | PolicyMap, by: str) -> dict[Chain, Written]:
    """Finds the dtypes of each equation under a policy, by the ids of the equations around it and of itself."""
    # A jaxpr with half precision was traced under a policy: the new one is taken to leave the same values in float32.
    program, start = observed.program, EquationPlace()
    inside = (atom for step in walk(program) for atom in step.results)
    traced_half = any(float_dtype(atom) in HALF for atom in (*program.invars, *inside))
    if by == "with_policy" or traced_half:
        rule, start = LayerRule(policy, observed, traced_half), LayerPlace()
    else:
        scoped = observed.modules._replace(types=tuple(observed.list_types().items()))
        scoped = scoped if isinstance(policy, PolicyMap) else None
        rule = make_casting_rule(policy, root_policy(policy), AutocastRules(), "opaque", scoped)
        rule.rewritten = weakref.WeakKeyDictionary()
    watcher = _Watcher(rule)
    kinds = [rule.argument(float_dtype(var)) for var in program.invars]
    watcher.rewrite(program, kinds, start, [float_dtype(var) for var in program.outvars])
    return watcher.found


class _Watcher(Rewriter):
    """Records the dtypes of each equation, at each place that runs it; of a loop, from its last rewrite."""

    def __init__(self, rule: Rule):
        super().__init__(rule)
        self.found: dict[Chain, Written] = {}
        self._chain: Chain = ()
        self._rewritten: dict[Any, Rewritten] = {}

    def rewrite(
        self, program: Any, kinds: Sequence[AbstractValue], context: Any, out_dtypes: Sequence[Any] | None = None
    ) -> Rewritten:
        key = program, self._chain, tuple(kinds), context, None if out_dtypes is None else tuple(out_dtypes)
        if key not in self._rewritten:
            self._rewritten[key] = self._rewrite(program, kinds, context, key[-1])
        return self._rewritten[key]

    def _fuse(
        self, program: Jaxpr, start: int, read: Callable[[Atom], Value], body: JaxprBuilder, contexts: Sequence[Any]
    ) -> tuple[int, list[Value]] | None:
        fused = super()._fuse(program, start, read, body, contexts)
        if fused is not None:
            # Equations that autocast fuses into one op compute in float32 inside it.
            count, results = fused
            *inside, last = program.eqns[start : start + count]
            for eqn in inside:
                full = getattr(self.rule, "full_dtype", _FLOAT32)
                wide = tuple(full if is_float(var) else None for var in eqn.outvars)
                self.found[*self._chain, id(eqn)] = Written((), wide)
            operands = [read(atom) for atom in last.invars] if count == 1 else []
            self.found[*self._chain, id(last)] = _read_dtypes(operands, results)
        return fused

    def _write(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Any) -> list[Value]:
        # autocast runs a custom derivative as traced. Here differentiation has replaced the call by its equations.
        if isinstance(context, EquationPlace) and is_from_custom_rule(eqn):
            context = context._replace(function=AS_TRACED)
        outer = self._chain
        self._chain = chain = (*outer, id(eqn))
        results = super()._write(eqn, values, body, context)
        self._chain = outer
        self.found[chain] = _read_dtypes(values, results)
        return results


def _read_dtypes(operands: Sequence[Value], results: Sequence[Value]) -> Written:
    return Written(*(tuple(value.kind.dtype for value in values) for values in (operands, results)))
