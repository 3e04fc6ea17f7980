"""Rewrites each equation in its precision, given the levels of its operands."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._jaxpr import WRITERS, AbstractValue, Atom, JaxprBuilder, Modules, Value, float_dtype, is_float, shape_of
from ..policy import Policy, PolicyMap, Quantization, list_policies
from ..quant import attention_format_of
from ._dataflow import is_applied_to_each, is_gradient_sum, is_steep_in
from ._place import (
    COMPUTE_DTYPES,
    FLOAT32,
    FLOAT64,
    REGION,
    EquationPlace,
    PlaceFinder,
    Scopes,
    ScopeSettings,
    choose_sums_dtype,
    find_functions,
)
from ._precision import (
    PrecisionFinder,
    as_low,
    cast_value,
    is_castable,
    is_exact,
    keeps_sums,
    note_rounding,
    round_sum,
    write_product,
)
from ._promotion import FULL_LEVEL, LOW_LEVEL, SUM_LEVEL, CastState, count_bias_axes, is_given, is_sum
from ._residuals import KEEPING, SOFTMAX, find_softmax, make_softmax, measure_run, write_again
from ._rules import AutocastRules, list_rule_policies
from ._tables import Precision
from ._weight_products import Product, describe_attention_product, describe_weight_product
from ._weights import A_WEIGHT, NO_WEIGHT, WEIGHT_PRODUCTS, WHY_BACKWARD, Names, follow_weights
from ._writers import FULL, LOW, PRECISION_WRITERS, SUM, TRACED, EquationWriter


@dataclasses.dataclass(unsafe_hash=True)
class CastingRule(EquationWriter):
    """The rule of autocast. Its fields decide how each operation runs."""

    compute_dtype: np.dtype
    rules: AutocastRules
    custom_rules: str
    scopes: Scopes | None = None
    accumulate_dtype: np.dtype | None = None
    quantization: Quantization | None = None
    full_dtype: np.dtype = FLOAT32
    castable: frozenset[np.dtype] = COMPUTE_DTYPES - {FLOAT64}

    def __post_init__(self) -> None:
        wider = {dtype for dtype in self.castable if dtype.itemsize > self.compute_dtype.itemsize}
        self.wide = frozenset({self.full_dtype, *wider})
        self.sums = choose_sums_dtype(self.accumulate_dtype, self.compute_dtype)
        self._precisions = PrecisionFinder(self.rules.primitives, self.compute_dtype, self.castable)
        may_have_sums = self.sums is not None or (self.scopes is not None and self.scopes.accumulates)
        may_attend = attention_format_of(self.quantization) is not None or bool(self.scopes and self.scopes.attends)
        self._places = PlaceFinder(find_functions(self.rules.functions), self.scopes, may_have_sums, may_attend)
        self.rounds_given = self.rules.residuals == "half"
        self._own_functions = {name for name, _ in self.rules.functions}
        self._in_scopes: dict[Any, CastingRule] = {}

    fusing = KEEPING | {"add_any", SOFTMAX[0]}

    def contexts(self, outer: EquationPlace, program: Jaxpr) -> list[EquationPlace]:
        return self._places.find(outer, program)

    def argument(self, dtype: np.dtype | None) -> AbstractValue:
        return AbstractValue(dtype, TRACED)

    def literal(self, literal: Literal) -> AbstractValue:
        is_number = np.ndim(literal.val) == 0 and (is_float(literal) or isinstance(literal.val, int | np.integer))
        numbers = (float(literal.val),) if is_number else ()
        return AbstractValue(float_dtype(literal), TRACED._replace(numbers=numbers))

    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        first = kinds[0]
        if all(kind == first for kind in kinds):
            return first
        if first.dtype not in self.castable:
            return AbstractValue(first.dtype, TRACED)
        states = [kind.state for kind in kinds]
        level = max(state.level for state in states)
        if level and any(self._stays_wide(kind) for kind in kinds):
            level = FULL_LEVEL
        elif level is SUM_LEVEL and any(kind.dtype != FLOAT32 for kind in kinds):
            level = LOW_LEVEL
        marks = max(state.narrow for state in states), any(state.backward for state in states)
        joined = CastState(level, *marks, weight=all(state.weight for state in states))
        low_dtypes = {kind.dtype for kind in kinds if 0 < kind.state.level < SUM_LEVEL}
        if 0 < level < SUM_LEVEL and len(low_dtypes) == 1:  # may be another scope's compute dtype
            return AbstractValue(low_dtypes.pop(), joined)
        dtype = self._widest(kinds) if level is FULL_LEVEL else self._dtype_of(level) if level else first.dtype
        return AbstractValue(dtype, joined)

    def _stays_wide(self, kind: AbstractValue) -> bool:
        """True for given values of a wide dtype, but for constants that the compute dtype represents."""
        is_traced = kind.dtype in self.wide and not kind.state.level
        return is_traced and not is_exact(kind.state.numbers, self.compute_dtype)

    def carried(self, kind: AbstractValue, dtype: np.dtype | None) -> AbstractValue:
        # Rounded in each iteration, a state stalls (512 + 1 is 512 in bfloat16), drifts, or never converges.
        if dtype not in self.wide or is_given(kind, self.wide):
            return kind
        return AbstractValue(dtype, FULL if kind.state.level else TRACED)

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
        if context.treatment not in ("full", "wide", "narrow"):
            return values
        # Cast once, outside the jitted parts of a loss or norm. Casts inside would sum the gradients before the upcast.
        return [self._upcast(value, eqn, body, context) for value in values]

    def _upcast(self, value: Value, eqn: JaxprEqn, body: JaxprBuilder, place: EquationPlace) -> Value:
        dtype, state = value.kind
        wide = self._rule_in(place).full_dtype
        if dtype not in self.castable or dtype.itemsize >= wide.itemsize:
            return value
        full = FULL._replace(backward=state.backward, narrow=self._find_narrow(place, [value]))
        return cast_value(value, AbstractValue(wide, full), eqn, body)

    def fuse(
        self,
        program: Jaxpr,
        start: int,
        read: Callable[[Atom], Value],
        body: JaxprBuilder,
        contexts: Sequence[EquationPlace],
    ) -> tuple[int, list[Value]] | None:
        eqn, place = program.eqns[start], contexts[start]
        # A gradient that leaves the backward pass is summed in the full dtype. Later equations show whether it leaves.
        if eqn.primitive.name == "add_any" and is_gradient_sum(program, start) and self._casts(eqn):
            results = self._rule_in(place)._write_full(eqn, [*map(read, eqn.invars)], body)
            return 1, [self._mark_place(result, place, ()) for result in results]
        # Arithmetic in the full dtype on arrays of the compute dtype is computed again in the backward pass.
        if eqn.primitive.name in KEEPING and self._is_upcast(eqn, [*map(read, eqn.invars)], place):
            count = measure_run(program, start, contexts)
            write = functools.partial(self.equation, context=place)
            read_low = lambda atom: round_sum(read(atom), self.compute_dtype, eqn, body)
            return count, write_again(program.eqns[start : start + count], read_low, body, write)
        is_softmax = eqn.primitive.name == SOFTMAX[0]
        return self._write_softmax(program, start, read(eqn.invars[0]), body, contexts) if is_softmax else None

    def _casts(self, eqn: JaxprEqn) -> bool:
        return is_castable(eqn, self.castable)

    def _is_upcast(self, eqn: JaxprEqn, values: list[Value], place: EquationPlace) -> bool:
        """True if an equation upcasts an operand, and would keep it in the full dtype for the backward pass."""
        if place.backward or place.scope is not None or place.treatment is not None or not self._casts(eqn):
            return False
        kinds = [as_low(value.kind, self.compute_dtype) for value in values]
        pairs = zip(values, kinds, strict=True)
        halves = [shape_of(value.atom) for value, kind in pairs if kind.dtype == self.compute_dtype != self.full_dtype]
        if shape_of(eqn.outvars[0]) not in halves:
            return False
        level = self._follow(eqn, values).state.level
        precision = self._precisions.find(eqn, values, place)
        if precision is Precision.FULL:  # reads sums uncast
            return not any(is_sum(value.kind) for value in values)
        return precision is Precision.INFER and level is FULL_LEVEL

    def _write_softmax(
        self, program: Jaxpr, start: int, logits: Value, body: JaxprBuilder, contexts: Sequence[EquationPlace]
    ) -> tuple[int, list[Value]] | None:
        """Writes the softmax that starts at an equation as one operation, if its output is in half precision."""
        place = contexts[start]
        if is_sum(logits.kind):
            logits = self._cast_at_boundary(logits, Precision.FULL, program.eqns[start], body, place)
        kind = as_low(logits.kind, self._compute_dtype_in(place))
        if kind.dtype is None or kind.dtype.itemsize >= 4 or not self._casts(program.eqns[start]):
            return None
        if self._rule_in(place).full_dtype != FLOAT32:
            return None
        if place.function is None or place.function.name != "jax.nn.softmax" or place.treatment not in _NARROW:
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
        return len(eqns), [self._mark_place(result, place, [logits]) for result in results]

    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: EquationPlace) -> list[Value]:
        # Whose rule: a scope may have other dtypes, and another matmul precision.
        scope, rule = context.scope, self._rule_in(context)
        if rule is not self:
            return rule.equation(eqn, values, body, context)
        eqn = eqn if scope is None else scope.set_precision(eqn)
        # Read: the precision of the operation, and what is known of its operands.
        precision = self._precisions.find(eqn, values, context)
        is_crossing = has_sums = has_weights = False
        for _, (dtype, state) in values:
            if dtype is not None:
                is_crossing |= bool(state.narrow) or state.backward or state.scope is not None
                has_sums |= state.level is SUM_LEVEL
                has_weights |= state.weight
        # Decide: the quantized form of a matmul, or the reason to leave it.
        product: Any = ""
        weights = list[Names]()
        if has_weights:
            weights = [A_WEIGHT if value.kind.dtype and value.kind.state.weight else NO_WEIGHT for value in values]
            product = self.find_weight_product(eqn, weights, context)
        elif context.attends and precision is Precision.LOW:
            is_open = not context.backward and self._is_cast_in(eqn)
            format = attention_format_of(self.quantization) if is_open else None
            product = describe_attention_product(eqn, format, self.sums)
        # Cast operands at boundaries of scopes and passes; round the float32 sums that this operation does not keep.
        if is_crossing:
            values = [self._cast_at_boundary(v, precision, eqn, body, context, i) for i, v in enumerate(values)]
        if has_sums and precision in _ROUNDING and not keeps_sums(eqn, values):
            values = [round_sum(value, self.compute_dtype, eqn, body) for value in values]
        # Write the operation, then mark its results: where they were made, and which of them are weights still.
        if not isinstance(product, str):
            results = self._write_weight_product(product, eqn, values, body)
        elif eqn.primitive.name == "convert_element_type" and self._casts(eqn):
            results = self._write_conversion(eqn, values, body)
        elif is_applied_to_each(eqn) and precision in (Precision.INFER, Precision.CLEAR):
            results = body.append(eqn, [value.atom for value in values], [value.kind for value in values])
        else:
            results = PRECISION_WRITERS[precision](self, eqn, values, body)
        if not has_weights:
            return [self._mark_place(result, context, values) for result in results]
        made = follow_weights(eqn, weights)
        if eqn.primitive.name == "convert_element_type" and any(made):
            body.uncast[results[0].atom] = values[0].atom
        return [self._mark_place(result, context, values, bool(own)) for result, own in zip(results, made, strict=True)]

    def find_weight_product(self, eqn: JaxprEqn, weights: Sequence[Names], place: EquationPlace) -> Product | str:
        """Returns the quantized form of a matmul, given the weights in its operands, or the reason to leave it."""
        rule = self._rule_in(place)
        if eqn.primitive.name not in WEIGHT_PRODUCTS:
            return "it is not a matmul or convolution"
        if rule.quantization is None:
            return "a rule leaves it out"
        if place.backward:
            return WHY_BACKWARD
        if rule._precisions.find(eqn, (), place) is not Precision.LOW:
            return "it does not run in the compute dtype"
        if all(weights[:2]):
            return "both operands are weights"
        position = 0 if weights[0] else 1
        sums = rule.sums if rule._is_cast_in(eqn) else None
        product = describe_weight_product(eqn, position, rule.quantization, sums)
        if isinstance(product, str):
            return product
        return product.reason_left([shape_of(atom) for atom in eqn.invars]) or product

    def _is_cast_in(self, eqn: JaxprEqn) -> bool:
        """True if a matmul runs in the compute dtype, unless its author wrote another narrow dtype."""
        dtypes = [float_dtype(atom) for atom in (*eqn.invars[:2], *eqn.outvars)]
        return not self.wide.isdisjoint(dtypes[:2]) or all(dtype == self.compute_dtype for dtype in dtypes)

    def _write_weight_product(
        self, product: Product, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder
    ) -> list[Value]:
        """Writes a quantized matmul, which rounds the weight from its own dtype, before a cast of the author."""
        is_cast, made = self._is_cast_in(eqn), float_dtype(eqn.outvars[0])
        dtype = self.compute_dtype if is_cast else float_dtype(eqn.invars[1 - product.position])
        atoms = [
            body.uncast.get(value.atom, value.atom) if i == product.position else self._cast(value, dtype, body, eqn)
            for i, value in enumerate(values)
        ]
        if not is_cast:
            options = (*product.options, ("preferred_element_type", made))
            kind = AbstractValue(made, FULL if made == self.full_dtype else LOW)
            return write_product(dataclasses.replace(product, options=options), eqn, atoms, kind, body)
        made, state = (dtype, LOW) if product.accumulate is None else (product.accumulate, SUM)
        kind = AbstractValue(made, state._replace(bias_axes=count_bias_axes(eqn, values, self.wide)))
        return write_product(product, eqn, atoms, kind, body)

    def _rule_in(self, place: EquationPlace) -> CastingRule:
        """Returns this rule with the dtypes and format of the scope of a place."""
        is_wide = place.function is REGION and FLOAT64 in self.castable  # `force_full_precision` narrows nothing
        if place.scope is None and not is_wide:
            return self
        scope = place.scope or ScopeSettings(quantization=self.quantization)
        compute: Any = scope.compute_dtype or self.compute_dtype
        full = FLOAT64 if is_wide else scope.full_dtype or self.full_dtype
        accumulate = scope.accumulate_dtype or self.accumulate_dtype
        key = compute, full, choose_sums_dtype(accumulate, compute), scope.quantization
        if key == (self.compute_dtype, self.full_dtype, self.sums, self.quantization):
            return self
        if key not in self._in_scopes:
            changed = {"compute_dtype": compute, "full_dtype": full, "accumulate_dtype": accumulate}
            rule = dataclasses.replace(self, **changed, quantization=scope.quantization)
            rule.rewritten = self.rewritten
            self._in_scopes[key] = rule
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
        position: int = 0,
    ) -> Value:
        """Casts a value that crosses a boundary: of the backward pass, a scope or a narrow function."""
        dtype, state = value.kind
        if dtype not in self.castable:
            return value
        if state.backward and not place.backward:  # a gradient, which is averaged, clipped and applied wide
            return cast_value(value, AbstractValue(self.full_dtype, FULL), eqn, body)
        output_dtype = None if state.scope is None or place.is_inside(state.scope) else state.scope.output_dtype
        if output_dtype in self.castable:
            kind = AbstractValue(output_dtype, FULL if output_dtype in self.wide else LOW)
            return cast_value(value, kind, eqn, body)
        # Outputs of a narrow function are cast down unless this operation needs the full dtype.
        is_steep = bool(place.steep) or is_steep_in(eqn, position)
        stays = is_steep or place.treatment in _NARROW or precision in (Precision.FULL, Precision.TRACED)
        if state.narrow and not stays:
            eqn = note_rounding(eqn) if state.narrow == "rule" else eqn
            return cast_value(value, AbstractValue(self.compute_dtype, LOW), eqn, body)
        return value

    def _mark_place(self, result: Value, place: EquationPlace, values: Sequence[Value], weight: bool = False) -> Value:
        """Adds the place of an output to its state, and whether it is a weight."""
        dtype, state = result.kind
        if dtype is None:
            return result
        narrow = self._find_narrow(place, values) if state.level is FULL_LEVEL else ""
        scope = None if place.backward else place.scope
        if (narrow, place.backward, scope, weight) == (state.narrow, state.backward, state.scope, state.weight):
            return result
        marked = state._replace(narrow=narrow, backward=place.backward, scope=scope, weight=weight)
        return Value(result.atom, AbstractValue(dtype, marked))

    def _find_narrow(self, place: EquationPlace, values: Sequence[Value]) -> str:
        """Says why the next operation casts a full output of a function down: a low input, or a rule."""
        if place.treatment not in _NARROW:
            return ""
        if place.treatment == "wide":
            states = [kind.state for _, kind in values if kind.dtype is not None]
            return "table" if any(state.narrow or 0 < state.level < FULL_LEVEL for state in states) else ""
        is_ours = place.function is not None and place.function.name not in self._own_functions
        return "table" if is_ours else "rule"


def make_casting_rule(
    policy: Policy | PolicyMap, root: Policy, rules: AutocastRules, custom_rules: str, modules: Modules | None
) -> CastingRule:
    """Makes the rule for a policy or map, whose root has the policy `root`. Without `modules`, no rule is by scope."""
    scopes = None if modules is None else Scopes(policy, rules.scopes, rules.backward, modules)
    dtype: Any = root.compute_dtype if root.compute_dtype in COMPUTE_DTYPES else FLOAT32
    full_dtypes = {each.full_dtype for each in (root, *list_policies(policy), *list_rule_policies(rules))}
    castable = COMPUTE_DTYPES - ({FLOAT64} - full_dtypes)
    options = scopes, root.accumulate_dtype, root.quantization, root.full_dtype, castable
    return CastingRule(dtype, rules, custom_rules, *options)


_NARROW = ("wide", "narrow")

_ROUNDING = (Precision.LOW, Precision.INFER, Precision.CLEAR)
"""Precisions of operations that take matmul outputs in the compute dtype, unless `keeps_sums`."""

_JAX = os.path.dirname(jax.__file__)
