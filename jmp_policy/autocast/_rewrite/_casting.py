"""Rewrites each equation in its precision, given the levels of its operands."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ..._base import at_least_float32
from ..._jaxpr import (
    WRITERS,
    AbstractValue,
    Atom,
    JaxprBuilder,
    Modules,
    Rewriter,
    Rule,
    Value,
    body_of,
    float_dtype,
    is_float,
)
from ...policy import Policy, PolicyMap, Quantization
from ._accumulators import find_accumulators
from ._dataflow import is_gradient_sum, is_steep_in
from ._place import COMPUTE_DTYPES, EquationPlace, PlaceFinder, Scope, Scopes, find_functions, find_sums_dtype
from ._precision import (
    PRODUCTS,
    CastState,
    Level,
    PrecisionFinder,
    as_low,
    cast_value,
    clamp_masks,
    find_numbers,
    is_applied_to_each,
    is_castable,
    is_exact,
    is_stored,
    is_sum,
    join_states,
    keeps_sums,
    make_wide_product,
    round_sum,
    write_product,
)
from ._residuals import KEEPING, SOFTMAX, find_softmax, make_softmax, measure_run, write_again
from ._rules import AutocastRules
from ._tables import Precision
from ._weights import (
    A_WEIGHT,
    NO_WEIGHT,
    WHY_BACKWARD,
    Names,
    WeightProduct,
    describe_weight_product,
    follow_weights,
)

_FLOAT32 = np.dtype(np.float32)
_TRACED, _LOW, _SUM, _FULL = (CastState(level) for level in Level)


@dataclasses.dataclass(unsafe_hash=True)
class CastingRule(Rule):
    """The rule of autocast. Its fields decide how each operation runs."""

    compute_dtype: np.dtype
    rules: AutocastRules
    custom_rules: str
    scopes: Scopes | None = None
    accumulate_dtype: np.dtype | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        self._sums = find_sums_dtype(self.accumulate_dtype, self.compute_dtype)
        self._precisions = PrecisionFinder(self.rules.primitives, self.compute_dtype)
        may_have_sums = self._sums is not None or (self.scopes is not None and self.scopes.accumulates)
        self._places = PlaceFinder(find_functions(self.rules.functions), self.scopes, may_have_sums)
        self._in_scopes: dict[Any, CastingRule] = {}

    def contexts(self, outer: EquationPlace, program: Jaxpr) -> list[EquationPlace]:
        return self._places.find(outer, program)

    def argument(self, dtype: np.dtype | None) -> AbstractValue:
        return AbstractValue(dtype, _TRACED)

    def literal(self, literal: Literal) -> AbstractValue:
        is_number = np.ndim(literal.val) == 0 and (is_float(literal) or isinstance(literal.val, int | np.integer))
        numbers = (float(literal.val),) if is_number else ()
        return AbstractValue(float_dtype(literal), _TRACED._replace(numbers=numbers))

    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        first = kinds[0]
        if all(kind == first for kind in kinds):
            return first
        if first.dtype not in COMPUTE_DTYPES:
            return AbstractValue(first.dtype, _TRACED)
        state = join_states(kinds)
        if state.level is Level.SUM and any(kind.dtype != _FLOAT32 for kind in kinds):
            state = state._replace(level=Level.LOW)
        low_dtypes = {kind.dtype for kind in kinds if kind.state.level is Level.LOW}
        if state.level is Level.LOW and len(low_dtypes) == 1:  # may be another scope's compute dtype
            return AbstractValue(low_dtypes.pop(), state)
        return AbstractValue(first.dtype if state.level is Level.TRACED else self._dtype_of(state.level), state)

    def accumulators(self, program: Jaxpr, carry: range) -> frozenset[int]:
        return find_accumulators(program, carry)

    def accumulated(self, kind: AbstractValue) -> AbstractValue:
        return AbstractValue(_FLOAT32, _FULL) if kind.dtype in COMPUTE_DTYPES else kind

    def stacked(self, eqn: JaxprEqn, kinds: Sequence[AbstractValue], context: EquationPlace) -> list[AbstractValue]:
        # Residuals for the backward pass of a loop stay as small as without an accumulate dtype.
        numbered, dtype = enumerate(kinds, len(eqn.outvars) - len(kinds)), self._compute_dtype_in(context)
        return [as_low(kind, dtype) if i in context.saved else kind for i, kind in numbered]

    def rewrites_custom_rule(self, eqn: JaxprEqn, context: EquationPlace) -> bool:
        # The derivatives of JAX's own functions work for any dtype.
        return f" at {_JAX}{os.sep}" in eqn.params["call_jaxpr"].jaxpr.debug_info.func_src_info

    def rewrites_primal_only(self, eqn: JaxprEqn, context: EquationPlace) -> bool:
        return self.custom_rules == "inside"

    def enters(self, eqn: JaxprEqn, context: EquationPlace) -> bool:
        """True if the sub-jaxprs of an equation are rewritten."""
        if eqn.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
            return eqn.primitive.name in WRITERS
        is_own = eqn.primitive.name == "custom_jvp_call" and self.rewrites_custom_rule(eqn, context)
        return is_own or self.rewrites_primal_only(eqn, context)

    def as_weight(self, kind: AbstractValue) -> AbstractValue:
        """Marks an argument as a weight to quantize."""
        return kind._replace(state=kind.state._replace(weight=True))

    def of_derivative(self, kind: AbstractValue, dtype: np.dtype | None) -> AbstractValue:
        argument = self.argument(dtype)
        return self.as_weight(argument) if dtype is not None and kind.state.weight else argument

    def cast_operands(
        self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: EquationPlace
    ) -> list[Value]:
        if eqn.primitive.name == "remat2":  # whose inputs are kept for the backward pass
            values = [round_sum(value, self._compute_dtype_in(context), eqn, body) for value in values]
        if context.treatment not in ("full", "narrow"):
            return values
        # Cast once, outside the jitted parts of a loss or norm. Casts inside would sum the gradients in half precision.
        return [self._upcast(value, eqn, body) for value in values]

    def _upcast(self, value: Value, eqn: JaxprEqn, body: JaxprBuilder) -> Value:
        dtype, state = value.kind
        if dtype == _FLOAT32 or dtype not in COMPUTE_DTYPES:
            return value
        return cast_value(value, AbstractValue(_FLOAT32, state._replace(level=Level.FULL)), eqn, body)

    def fuse(
        self,
        program: Jaxpr,
        start: int,
        read: Callable[[Atom], Value],
        body: JaxprBuilder,
        contexts: Sequence[EquationPlace],
    ) -> tuple[int, list[Value]] | None:
        eqn, place = program.eqns[start], contexts[start]
        # A gradient that leaves the backward pass is summed in float32. Later equations show whether it leaves.
        if is_gradient_sum(program, start) and is_castable(eqn):
            results = self._write_full(eqn, [*map(read, eqn.invars)], body)
            return 1, [self._mark_place(result, place) for result in results]
        # Float32 arithmetic on half-precision arrays is computed again in the backward pass.
        if eqn.primitive.name in KEEPING and self._is_upcast(eqn, [*map(read, eqn.invars)], place):
            count = measure_run(program, start, contexts)
            write = functools.partial(self.equation, context=place)
            read_low = lambda atom: round_sum(read(atom), self.compute_dtype, eqn, body)
            return count, write_again(program.eqns[start : start + count], read_low, body, write)
        is_softmax = eqn.primitive.name == SOFTMAX[0]
        return self._write_softmax(program, start, read(eqn.invars[0]), body, contexts) if is_softmax else None

    def _is_upcast(self, eqn: JaxprEqn, values: list[Value], place: EquationPlace) -> bool:
        """True if an equation upcasts a half-precision operand, and would keep it in float32 for the backward pass."""
        if place.backward or place.scope is not None or place.treatment is not None or not is_castable(eqn):
            return False
        kinds = [as_low(value.kind, self.compute_dtype) for value in values]
        pairs = zip(values, kinds, strict=True)
        halves = [_shape_of(value.atom) for value, kind in pairs if kind.dtype == self.compute_dtype != _FLOAT32]
        if _shape_of(eqn.outvars[0]) not in halves:
            return False
        level = self._follow(eqn, values).state.level
        precision = self._precisions.find(eqn, values, place)
        if precision is Precision.FULL:  # reads sums uncast
            return not any(is_sum(value.kind) for value in values)
        return precision is Precision.INFER and level is Level.FULL

    def _write_softmax(
        self, program: Jaxpr, start: int, logits: Value, body: JaxprBuilder, contexts: Sequence[EquationPlace]
    ) -> tuple[int, list[Value]] | None:
        """Writes the softmax that starts at an equation as one operation, if its output is in half precision."""
        place = contexts[start]
        if is_sum(logits.kind):
            logits = self._cast_at_boundary(logits, Precision.FULL, program.eqns[start], body, place, False)
        kind = as_low(logits.kind, self._compute_dtype_in(place))
        if kind.dtype == _FLOAT32 or not is_castable(program.eqns[start]):
            return None
        if place.function is None or place.function.name != "jax.nn.softmax" or place.treatment != "narrow":
            return None
        eqns = find_softmax(program, start)
        if eqns is None or contexts[start + len(eqns) - 1].steep:
            return None
        softmax = make_softmax(logits.kind.dtype, kind.dtype, eqns)
        if softmax is None:
            return None
        last, outvars = eqns[-1], [Var(softmax.outvars[0].aval)]
        here = softmax.replace(outvars=outvars, source_info=last.source_info, ctx=last.ctx)
        results = body.append(here, [logits.atom], [kind])
        return len(eqns), [self._mark_place(result, place) for result in results]

    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: EquationPlace) -> list[Value]:
        # A scope may have other dtypes, and another matmul precision.
        scope = context.scope
        rule = self if scope is None else self._find_rule_of(scope)
        if rule is not self:
            return rule.equation(eqn, values, body, context)
        eqn = eqn if scope is None else scope.set_precision(eqn)
        precision = self._precisions.find(eqn, values, context)
        weights = [A_WEIGHT if value.kind.dtype and value.kind.state.weight else NO_WEIGHT for value in values]
        values = [
            self._cast_at_boundary(value, precision, eqn, body, context, bool(context.steep) or is_steep_in(eqn, i))
            for i, value in enumerate(values)
        ]
        if precision in _ROUNDING and not keeps_sums(eqn, values):
            values = [round_sum(value, self.compute_dtype, eqn, body) for value in values]
        product = self.find_weight_product(eqn, weights, context) if any(weights) else ""
        if isinstance(product, WeightProduct):
            results = self._write_weight_product(product, eqn, values, body)
        elif eqn.primitive.name == "convert_element_type" and is_castable(eqn):
            results = self._write_conversion(eqn, values, body)
        elif precision in (Precision.INFER, Precision.CLEAR) and is_applied_to_each(eqn):
            results = body.append(eqn, [value.atom for value in values], [value.kind for value in values])
        else:
            results = _WRITERS[precision](self, eqn, values, body)
        made = follow_weights(eqn, weights)
        return [self._mark_place(result, context, bool(own)) for result, own in zip(results, made, strict=True)]

    def find_weight_product(
        self, eqn: JaxprEqn, weights: Sequence[Names], place: EquationPlace, where: str = ""
    ) -> WeightProduct | str:
        """Returns the quantized form of a matmul, given the weights in its operands, or the reason to leave it."""
        rule = self if place.scope is None else self._find_rule_of(place.scope)
        if eqn.primitive.name not in PRODUCTS:
            return "it is not a matmul or convolution"
        if rule.quantization is None:
            return "a rule leaves it out"
        if place.backward:
            return WHY_BACKWARD
        if rule._precisions.find(eqn, (), place) is not Precision.LOW:
            return "it does not run in the compute dtype"
        if all(weights):
            return "both operands are weights"
        position = 0 if weights[0] else 1
        sums = rule._sums if rule._is_cast_in(eqn) else None
        product = describe_weight_product(eqn, position, rule.quantization, sums)
        if isinstance(product, str):
            return product
        return product.reason_left([_shape_of(atom) for atom in eqn.invars], where) or product

    def _is_cast_in(self, eqn: JaxprEqn) -> bool:
        """True if a matmul runs in the compute dtype, unless its author wrote another half-precision dtype."""
        dtypes = [float_dtype(atom) for atom in (*eqn.invars, *eqn.outvars)]
        return _FLOAT32 in dtypes[:2] or all(dtype == self.compute_dtype for dtype in dtypes)

    def _write_weight_product(
        self, product: WeightProduct, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder
    ) -> list[Value]:
        """Writes a quantized matmul, which rounds the weight from its own dtype."""
        is_cast, made = self._is_cast_in(eqn), float_dtype(eqn.outvars[0])
        dtype = self.compute_dtype if is_cast else float_dtype(eqn.invars[1 - product.position])
        atoms = [
            value.atom if i == product.position else self._cast(value, dtype, body, eqn)
            for i, value in enumerate(values)
        ]
        if not is_cast:
            options = (*product.options, ("preferred_element_type", made))
            kind = AbstractValue(made, _FULL if made == _FLOAT32 else _LOW)
            return write_product(dataclasses.replace(product, options=options), eqn, atoms, kind, body)
        kind = AbstractValue(dtype, _LOW) if product.accumulate is None else AbstractValue(product.accumulate, _SUM)
        return write_product(product, eqn, atoms, kind, body)

    def _find_rule_of(self, scope: Scope) -> CastingRule:
        """Returns this rule with the compute and accumulate dtype of a scope."""
        compute: Any = scope.compute_dtype or self.compute_dtype
        accumulate = scope.accumulate_dtype or self.accumulate_dtype
        key = compute, find_sums_dtype(accumulate, compute), scope.quantization
        if key == (self.compute_dtype, self._sums, self.quantization):
            return self
        if key not in self._in_scopes:
            self._in_scopes[key] = dataclasses.replace(
                self, compute_dtype=compute, accumulate_dtype=accumulate, quantization=scope.quantization
            )
            self._in_scopes[key].rewritten = self.rewritten
        return self._in_scopes[key]

    def _compute_dtype_in(self, place: EquationPlace) -> np.dtype:
        return (place.scope and place.scope.compute_dtype) or self.compute_dtype

    def _cast_at_boundary(
        self,
        value: Value,
        precision: Precision,
        eqn: JaxprEqn,
        body: JaxprBuilder,
        place: EquationPlace,
        is_steep: bool,
    ) -> Value:
        """Casts a value that crosses a boundary: of the backward pass, a scope or a narrow function."""
        dtype, state = value.kind
        if dtype not in COMPUTE_DTYPES:
            return value
        if state.backward and not place.backward:  # a gradient, which is averaged, clipped and applied in float32
            return cast_value(value, AbstractValue(_FLOAT32, _FULL), eqn, body)
        output_dtype = None if state.scope is None or place.is_inside(state.scope) else state.scope.output_dtype
        if output_dtype in COMPUTE_DTYPES:
            kind = AbstractValue(output_dtype, _FULL if output_dtype == _FLOAT32 else _LOW)
            return cast_value(value, kind, eqn, body)
        # Outputs of a narrow function are cast down unless this operation needs float32.
        stays = is_steep or place.treatment == "narrow" or precision in (Precision.FULL, Precision.TRACED)
        if state.narrow and not stays:
            return cast_value(value, AbstractValue(self.compute_dtype, _LOW), eqn, body)
        return value

    def _mark_place(self, result: Value, place: EquationPlace, weight: bool = False) -> Value:
        """Adds the place of an output to its state, and whether it is a weight."""
        dtype, state = result.kind
        if dtype is None:
            return result
        narrow = state.level is Level.FULL and place.treatment == "narrow"
        scope = None if place.backward else place.scope
        kind = AbstractValue(dtype, state._replace(narrow=narrow, backward=place.backward, scope=scope, weight=weight))
        return result._replace(kind=kind)

    def _write_low(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        is_product = self._sums is not None and eqn.primitive.name in PRODUCTS
        is_half = not any(dtype == _FLOAT32 for dtype in map(float_dtype, eqn.invars))
        if is_half:  # as its author wrote it
            is_as_here = all(float_dtype(atom) == self.compute_dtype for atom in (*eqn.invars, *eqn.outvars))
            if not is_product or not is_as_here:
                return self._write_traced(eqn, values, body)
        if not is_product:
            return self._write_in(AbstractValue(self.compute_dtype, _LOW), eqn, values, body)
        operands = [v.atom if is_stored(v) else self._cast(v, self.compute_dtype, body, eqn) for v in values]
        product = make_wide_product(eqn, self._sums, self.compute_dtype)
        return write_product(product, eqn, operands, AbstractValue(self._sums, _SUM), body)

    def _write_full(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        return self._write_in(AbstractValue(_FLOAT32, _FULL), eqn, values, body)

    def _write_wide(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        kind = self._follow(eqn, values)
        results = self._write_in(AbstractValue(_FLOAT32, kind.state), eqn, values, body)
        return [
            Value(body.cast(result.atom, kind.dtype, eqn), kind) if result.kind.dtype is not None else result
            for result in results
        ]

    def _write_following(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        return self._write_in(self._follow(eqn, values), eqn, values, body)

    def _write_comparison(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        floats = [value.kind for value in values if value.kind.dtype is not None]
        dtypes = {kind.dtype for kind in floats if not is_exact(kind.state.numbers, self.compute_dtype)}
        return self._write_in(AbstractValue(dtypes.pop() if len(dtypes) == 1 else _FLOAT32, _TRACED), eqn, values, body)

    def _write_traced(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        pairs = zip(values, eqn.invars, strict=True)
        atoms = [self._cast(value, float_dtype(atom), body, eqn) for value, atom in pairs]
        floats = [value.kind for value in values if value.kind.dtype is not None]
        # An output in the author's dtype has the level of that dtype, if an operand has a level.
        has_level = any(kind.state.level is not Level.TRACED for kind in floats)
        low = _LOW if self.compute_dtype != _FLOAT32 else _FULL
        dtypes = [float_dtype(var) for var in eqn.outvars]
        states = [_TRACED if not has_level else low if dtype == self.compute_dtype else _FULL for dtype in dtypes]
        return body.append(eqn, atoms, [*map(AbstractValue, dtypes, states)])

    def _write_conversion(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        """Keeps a cast of the author, unless it only makes a weak type strong."""
        [value], target = values, eqn.params["new_dtype"]
        source, dtype = float_dtype(eqn.invars[0]), float_dtype(eqn.outvars[0])
        if source is None or dtype is None:
            aval: Any = eqn.invars[0].aval
            known = value.kind.state.numbers if source is None and value.kind.state is not None else ()
            numbers = (0.0, 1.0) if aval.dtype == bool else known
            return body.append(eqn, [value.atom], [AbstractValue(dtype, _TRACED._replace(numbers=numbers))])
        if target == source:
            return body.append(eqn, [value.atom], [value.kind]) if value.kind.dtype == target else [value]
        state = _FULL if target == _FLOAT32 else _LOW if target == self.compute_dtype else _TRACED
        return body.append(eqn, [value.atom], [AbstractValue(target, state)])

    def _write_in(self, kind: AbstractValue, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder) -> list[Value]:
        """Writes an equation in the dtype of `kind`, which its floating outputs have."""
        atoms = [self._cast(value, kind.dtype, body, eqn) for value in values]
        kinds = [kind if is_float(var) else AbstractValue(None) for var in eqn.outvars]
        params = self._rewrite_operators(eqn.params, kind)
        preferred = eqn.params.get("preferred_element_type")
        if preferred is not None and preferred != kind.dtype:
            params = {**eqn.params, "preferred_element_type": kind.dtype}
        return body.append(eqn, atoms, kinds, params)

    def _rewrite_operators(self, params: dict[str, Any], kind: AbstractValue) -> dict[str, Any] | None:
        """Rewrites the jaxprs with which reductions, windows and scatters combine two elements."""
        programs = {name: value for name, value in params.items() if isinstance(value, (Jaxpr, ClosedJaxpr))}
        arguments = [var for program in programs.values() for var in body_of(program).invars]
        if not any(is_float(var) and float_dtype(var) != kind.dtype for var in arguments):
            return None
        changed = {}
        for name, program in programs.items():
            body = body_of(program)
            kinds = [kind if is_float(var) else AbstractValue(None) for var in body.invars]
            wanted = [kind.dtype if is_float(atom) else None for atom in body.outvars]
            changed[name] = Rewriter(self).rewrite(program, kinds, EquationPlace(), wanted).program
        return params | changed

    def _cast(self, value: Value, dtype: np.dtype, body: JaxprBuilder, eqn: JaxprEqn) -> Atom:
        atom, source = value.atom, value.kind.dtype
        if source is None or source == dtype:
            return atom
        if (
            dtype == self.compute_dtype
        ):  # masks that are added are clamped to half the maximum, so that sums stay finite
            largest = float(jnp.finfo(dtype).max) / (2 if eqn.primitive.name in ("add", "sub") else 1)
            atom = clamp_masks(atom, value.kind.state.numbers, largest, eqn, body)
        if at_least_float32(source) == source:  # cast down at each use, so that gradients of a weight sum in float32
            return body.cast(atom, dtype, eqn)
        return body.cast_once(atom, dtype, eqn)

    def _follow(self, eqn: JaxprEqn, values: Sequence[Value]) -> AbstractValue:
        """Returns the kind with the highest level of the operands, and its dtype."""
        kinds = [value.kind for value in values if value.kind.dtype is not None]
        state = join_states(kinds)
        if state.level is not Level.TRACED:
            return AbstractValue(self._dtype_of(state.level), state)
        traced = (float_dtype(atom) for atom in (*eqn.outvars, *eqn.invars))
        numbers = find_numbers(eqn, [kind.state.numbers for kind in kinds])
        dtype = next((dtype for dtype in traced if dtype is not None), None)
        return AbstractValue(dtype, state._replace(numbers=numbers))

    def _dtype_of(self, level: Level) -> np.dtype:
        return _FLOAT32 if level in (Level.SUM, Level.FULL) else self.compute_dtype


def make_casting_rule(
    policy: Policy | PolicyMap, root: Policy, rules: AutocastRules, custom_rules: str, modules: Modules | None
) -> CastingRule:
    """Makes the rule for a policy or map, whose root has the policy `root`. Without `modules`, no rule is by scope."""
    scopes = None if modules is None else Scopes(policy, rules.scopes, rules.backward, modules)
    dtype: Any = root.compute_dtype if root.compute_dtype in COMPUTE_DTYPES else _FLOAT32
    return CastingRule(dtype, rules, custom_rules, scopes, root.accumulate_dtype, root.quantization)


_ROUNDING = (Precision.LOW, Precision.INFER, Precision.CLEAR)
"""Precisions of operations that take matmul outputs in the compute dtype, unless `keeps_sums`."""

_WRITERS: dict[Precision, Callable[[CastingRule, JaxprEqn, list[Value], JaxprBuilder], list[Value]]] = {
    Precision.LOW: CastingRule._write_low,
    Precision.FULL: CastingRule._write_full,
    Precision.WIDE: CastingRule._write_wide,
    Precision.INFER: CastingRule._write_following,
    Precision.CLEAR: CastingRule._write_following,
    Precision.COMPARE: CastingRule._write_comparison,
    Precision.TRACED: CastingRule._write_traced,
}

_JAX = os.path.dirname(jax.__file__)


def _shape_of(atom: Atom) -> tuple[int, ...]:
    aval: Any = atom.aval
    return aval.shape
