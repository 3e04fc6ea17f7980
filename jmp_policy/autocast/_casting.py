"""The casting rules: which dtype each operation runs in, by the colours of the values that reach it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._dtypes import at_least_float32
from ..interpreter import Body, Kind, Rule, Value, float_dtype, is_float, multiplies_only
from ..interpreter._program import Atom
from ._colour import Colour, Mark, joined
from ._constants import is_exact, is_lost, numbers_of, within
from ._gradient_sums import is_gradient_sum
from ._operators import with_operators
from ._place import Place, Places
from ._rules import AutocastRules, functions, table
from ._runs import KEEPING, length_of_run, write_again
from ._scope import COMPUTE_DTYPES
from ._scopes import Scopes
from ._softmax import PATTERN, softmax_at, softmax_in
from ._steep import is_steep_in
from ._tables import SATURATING, Precision


class Casting(NamedTuple):
    """All that decides about an operation."""

    compute_dtype: np.dtype
    rules: AutocastRules
    custom_rules: str
    scopes: Scopes | None = None


class CastingRule(Rule):
    """Autocast as a rule of the interpreter."""

    def __init__(self, casting: Casting):
        self._casting = casting
        self._compute = casting.compute_dtype
        self._table = table(casting.rules, casting.compute_dtype)
        self._places = Places(functions(casting.rules), casting.scopes)
        self._in_other_dtypes: dict[np.dtype, CastingRule] = {}
        self._largest = float(jnp.finfo(self._compute).max)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CastingRule) and self._casting == other._casting

    def __hash__(self) -> int:
        return hash(self._casting)

    def contexts(self, outer: Any, program: Jaxpr) -> list[Place]:
        return self._places.of(outer, program)

    def argument(self, dtype: np.dtype | None) -> Kind:
        return Kind(dtype, _TRACED)

    def literal(self, literal: Literal) -> Kind:
        is_number = np.ndim(literal.val) == 0 and (is_float(literal) or isinstance(literal.val, int | np.integer))
        return Kind(float_dtype(literal), _TRACED._replace(numbers=(float(literal.val),)) if is_number else _TRACED)

    def join(self, kinds: Sequence[Kind]) -> Kind:
        first = kinds[0]
        if all(kind == first for kind in kinds):
            return first
        if first.dtype not in _CASTABLE:
            return Kind(first.dtype, _TRACED)
        mark = joined(kinds)
        low_dtypes = {kind.dtype for kind in kinds if kind.mark.colour is Colour.LOW}
        if mark.colour is Colour.LOW and len(low_dtypes) == 1:  # of a scope, maybe, with another compute dtype
            return Kind(low_dtypes.pop(), mark)
        return Kind(first.dtype if mark.colour is Colour.TRACED else self._dtype(mark.colour), mark)

    def accumulated(self, kind: Kind) -> Kind:
        return Kind(_FLOAT32, _FULL) if kind.dtype in _CASTABLE else kind

    def opens(self, eqn: JaxprEqn, context: Any) -> bool:
        return _is_of_jax(eqn)

    def opens_inside(self, eqn: JaxprEqn, context: Any) -> bool:
        return self._casting.custom_rules == "inside"

    def together(
        self, program: Jaxpr, start: int, read: Callable[[Any], Value], body: Body, contexts: Any
    ) -> tuple[int, list[Value]] | None:
        eqn, place = program.eqns[start], contexts[start]
        if is_gradient_sum(program, start) and _is_castable(eqn):
            return 1, [self._placed(result, place) for result in self._full(eqn, [*map(read, eqn.invars)], body)]
        if eqn.primitive.name in KEEPING and self._is_widened(eqn, [*map(read, eqn.invars)], place):
            count = length_of_run(program, start, contexts)
            write = functools.partial(self.equation, context=place)
            return count, write_again(program.eqns[start : start + count], read, body, write)
        is_softmax = eqn.primitive.name == PATTERN[0]
        return self._softmax(program, start, read(eqn.invars[0]), body, contexts) if is_softmax else None

    def _is_widened(self, eqn: JaxprEqn, values: list[Value], place: Place) -> bool:
        """Whether an equation by itself runs in float32 on an array in half, and keeps it for the backward pass."""
        if place.backward or place.scope is not None or place.treatment is not None or not _is_castable(eqn):
            return False
        made: Any = eqn.outvars[0].aval
        halves = [_shape_of(value.atom) for value in values if value.kind.dtype == self._compute != _FLOAT32]
        if made.shape not in halves:
            return False
        colour = self._followed(eqn, values).mark.colour
        precision = self._precision(eqn, values, place)
        return precision is Precision.FULL or (precision is Precision.INFER and colour is Colour.FULL)

    def _softmax(
        self, program: Jaxpr, start: int, logits: Value, body: Body, contexts: Any
    ) -> tuple[int, list[Value]] | None:
        place = contexts[start]
        if logits.kind.dtype == _FLOAT32 or not _is_castable(program.eqns[start]):
            return None
        if place.function is None or place.function.name != "jax.nn.softmax" or place.treatment != "narrow":
            return None
        eqns = softmax_at(program, start)
        if eqns is not None and contexts[start + len(eqns) - 1].steep:
            return None
        softmax = None if eqns is None else softmax_in(logits.kind.dtype, eqns)
        if eqns is None or softmax is None:
            return None
        here = softmax.replace(
            outvars=[Var(softmax.outvars[0].aval)], source_info=eqns[-1].source_info, ctx=eqns[-1].ctx
        )
        results = body.append(here, [logits.atom], [logits.kind])
        return len(eqns), [self._placed(result, place) for result in results]

    def entering(self, eqn: JaxprEqn, values: list[Value], body: Body, context: Any) -> list[Value]:
        if context.treatment not in ("full", "narrow"):
            return values
        # Once, around the jitted parts of a loss or norm: cast inside of each, its gradients would be summed in half.
        return [self._widened(value, eqn, body) if value.kind.dtype in _CASTABLE else value for value in values]

    def _widened(self, value: Value, eqn: JaxprEqn, body: Body) -> Value:
        dtype, mark = value.kind
        if dtype == _FLOAT32:
            return value
        return Value(body.cast_once(value.atom, _FLOAT32, eqn), Kind(_FLOAT32, mark._replace(colour=Colour.FULL)))

    def equation(self, eqn: JaxprEqn, values: list[Value], body: Body, context: Any) -> list[Value]:
        place: Place = context
        if place.scope is not None and place.scope.compute_dtype not in (None, self._compute):
            return self._with_compute_dtype(place.scope.compute_dtype).equation(eqn, values, body, place)
        eqn = eqn if place.scope is None else place.scope.with_precision(eqn)
        precision = self._precision(eqn, values, place)
        values = [
            self._arriving(value, precision, eqn, body, place, place.steep or is_steep_in(eqn, i))
            for i, value in enumerate(values)
        ]
        if eqn.primitive.name == "convert_element_type" and _is_castable(eqn):
            results = self._conversion(eqn, values, body)
        elif precision in (Precision.INFER, Precision.CLEAR) and _is_of_each(eqn):
            results = body.append(eqn, [value.atom for value in values], [value.kind for value in values])
        else:
            results = getattr(self, f"_{precision.name.lower()}")(eqn, values, body)
        return [self._placed(result, place) for result in results]

    def _precision(self, eqn: JaxprEqn, values: Sequence[Value], place: Place) -> Precision:
        """What the tables, the place and the constants of an equation say."""
        if not _is_castable(eqn):
            return Precision.TRACED
        precision = self._table.get(_operation(eqn), Precision.TRACED)
        if precision is Precision.LOW and multiplies_only(eqn):
            precision = Precision.INFER
        if place.treatment is not None:
            precision = _INSIDE[place.treatment].get(precision, precision)
        if precision in (Precision.INFER, Precision.CLEAR) and self._is_too_fine(eqn, values, place):
            return Precision.FULL
        return precision

    def _with_compute_dtype(self, dtype: Any) -> CastingRule:
        """This rule in a scope that computes in another dtype."""
        if dtype not in self._in_other_dtypes:
            self._in_other_dtypes[dtype] = CastingRule(self._casting._replace(compute_dtype=dtype))
            self._in_other_dtypes[dtype].rewritten = self.rewritten
        return self._in_other_dtypes[dtype]

    def _arriving(
        self, value: Value, precision: Precision, eqn: JaxprEqn, body: Body, place: Place, is_steep: Any
    ) -> Value:
        """A value as it is used in `place`, which may be another one than that where it was made."""
        dtype, mark = value.kind
        if dtype not in _CASTABLE:
            return value
        if mark.backward and not place.backward:  # a gradient: what averages, clips and applies it does so in float32
            return Value(body.cast_once(value.atom, _FLOAT32, eqn), Kind(_FLOAT32, _FULL))
        output_dtype = None if mark.scope is None or place.is_inside(mark.scope) else mark.scope.output_dtype
        if output_dtype in _CASTABLE:
            left_as = Kind(output_dtype, _FULL if output_dtype == _FLOAT32 else _LOW)
            return Value(body.cast_once(value.atom, left_as.dtype, eqn), left_as)
        stays = is_steep or place.treatment == "narrow" or precision in (Precision.FULL, Precision.TRACED)
        if mark.narrow and not stays:
            return Value(body.cast_once(value.atom, self._compute, eqn), Kind(self._compute, _LOW))
        return value

    def _placed(self, result: Value, place: Place) -> Value:
        """A result that remembers where it was made."""
        dtype, mark = result.kind
        if dtype is None:
            return result
        narrow = mark.colour is Colour.FULL and place.treatment == "narrow"
        scope = None if place.backward else place.scope
        return result._replace(kind=Kind(dtype, mark._replace(narrow=narrow, backward=place.backward, scope=scope)))

    def _low(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        if not any(dtype == _FLOAT32 for dtype in map(float_dtype, eqn.invars)):  # its author wrote it in half
            return self._traced(eqn, values, body)
        return self._run(eqn, values, body, Kind(self._compute, _LOW))

    def _full(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        return self._run(eqn, values, body, Kind(_FLOAT32, _FULL))

    def _wide(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        kind = self._followed(eqn, values)
        results = self._run(eqn, values, body, Kind(_FLOAT32, kind.mark))
        return [
            Value(body.cast(result.atom, kind.dtype, eqn), kind) if result.kind.dtype is not None else result
            for result in results
        ]

    def _infer(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        return self._run(eqn, values, body, self._followed(eqn, values))

    _clear = _infer

    def _compare(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        floats = [value.kind for value in values if value.kind.dtype is not None]
        dtypes = {kind.dtype for kind in floats if not is_exact(kind.mark.numbers, self._compute)}
        return self._run(eqn, values, body, Kind(dtypes.pop() if len(dtypes) == 1 else _FLOAT32, _TRACED))

    def _traced(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        atoms = [
            value.atom if value.kind.dtype is None else self._cast(value, float_dtype(atom), body, eqn)
            for value, atom in zip(values, eqn.invars, strict=True)
        ]
        floats = [value.kind for value in values if value.kind.dtype is not None]
        followed = any(kind.mark.colour is not Colour.TRACED for kind in floats)
        kinds = [Kind(float_dtype(var), self._mark_of(float_dtype(var), followed)) for var in eqn.outvars]
        return body.append(eqn, atoms, kinds)

    def _mark_of(self, dtype: Any, followed: bool) -> Mark:
        """That of a result whose dtype is its author's."""
        if not followed:
            return _TRACED
        return _LOW if dtype == self._compute != _FLOAT32 else _FULL

    def _conversion(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        """A cast that the author wrote is respected; one that only makes a weak type strong is none."""
        [value], target = values, eqn.params["new_dtype"]
        source, dtype = float_dtype(eqn.invars[0]), float_dtype(eqn.outvars[0])
        if source is None or dtype is None:
            aval: Any = eqn.invars[0].aval
            known = value.kind.mark.numbers if source is None and value.kind.mark is not None else ()
            numbers = (0.0, 1.0) if aval.dtype == bool else known
            return body.append(eqn, [value.atom], [Kind(dtype, _TRACED._replace(numbers=numbers))])
        if target == source:
            return body.append(eqn, [value.atom], [value.kind]) if value.kind.dtype == target else [value]
        mark = _FULL if target == _FLOAT32 else _LOW if target == self._compute else _TRACED
        return body.append(eqn, [value.atom], [Kind(target, mark)])

    def _run(self, eqn: JaxprEqn, values: list[Value], body: Body, kind: Kind) -> list[Value]:
        """Runs an equation in the dtype of `kind`; its floating results are of that kind."""
        atoms = [
            value.atom if value.kind.dtype is None else self._cast(value, kind.dtype, body, eqn) for value in values
        ]
        kinds = [kind if is_float(var) else Kind(None) for var in eqn.outvars]
        params = with_operators(eqn.params, kind, self, Place())
        if eqn.params.get("preferred_element_type") not in (None, kind.dtype):
            params = {**eqn.params, "preferred_element_type": kind.dtype}
        return body.append(eqn, atoms, kinds, params)

    def _cast(self, value: Value, dtype: Any, body: Body, eqn: JaxprEqn) -> Any:
        atom, source = value.atom, value.kind.dtype
        if source == dtype:
            return atom
        if dtype == self._compute:  # of a mask that is added, half of it: with what it is added to, it overflows
            largest = self._largest / 2 if eqn.primitive.name in ("add", "sub") else self._largest
            atom = within(atom, value.kind.mark.numbers, largest, eqn, body)
        if at_least_float32(source) == source:  # narrowing, at each use: the gradients of a weight are summed wide
            return body.cast(atom, dtype, eqn)
        return body.cast_once(atom, dtype, eqn)

    def _followed(self, eqn: JaxprEqn, values: Sequence[Value]) -> Kind:
        """The kind that follows of several: the greatest colour, and its dtype."""
        kinds = [value.kind for value in values if value.kind.dtype is not None]
        mark = joined(kinds)
        if mark.colour is not Colour.TRACED:
            return Kind(self._dtype(mark.colour), mark)
        traced = (float_dtype(atom) for atom in (*eqn.outvars, *eqn.invars))
        numbers = numbers_of(eqn, [kind.mark.numbers for kind in kinds])
        return Kind(next((dtype for dtype in traced if dtype is not None), None), mark._replace(numbers=numbers))

    def _dtype(self, colour: Colour) -> np.dtype:
        return _FLOAT32 if colour is Colour.FULL else self._compute

    def _is_too_fine(self, eqn: JaxprEqn, values: Sequence[Value], place: Place) -> bool:
        """Whether an equation that would follow its inputs makes a difference that the compute dtype has not."""
        if place.steep and eqn.primitive.name in SATURATING:
            return any(value.kind.dtype == self._compute for value in values)
        marks = [(i, value.kind.mark) for i, value in enumerate(values) if value.kind.dtype is not None]
        constants = [(i, mark.numbers) for i, mark in marks if mark.numbers]
        if not constants or _is_of_each(eqn) or all(mark.colour is Colour.TRACED for _, mark in marks):
            return False
        return any(is_lost(numbers, eqn, i, self._compute) for i, numbers in constants)


_FLOAT32 = np.dtype(np.float32)
_CASTABLE = COMPUTE_DTYPES
_TRACED, _LOW, _FULL = (Mark(colour) for colour in Colour)

_ALL_FULL = dict.fromkeys(
    (Precision.LOW, Precision.FULL, Precision.WIDE, Precision.INFER, Precision.CLEAR), Precision.FULL
)
_INSIDE = {
    "full": _ALL_FULL,
    "narrow": _ALL_FULL,
    "infer": {Precision.FULL: Precision.INFER},
    "low": dict.fromkeys((Precision.FULL, Precision.INFER), Precision.LOW),
    "traced": dict.fromkeys(Precision, Precision.TRACED),
}
"""What the classes become inside of a function that is treated as one operation."""

_JAX = os.path.dirname(jax.__file__)


def _is_of_jax(eqn: JaxprEqn) -> bool:
    """Whether JAX wrote the custom derivative: those rules are good for any dtype."""
    return f" at {_JAX}{os.sep}" in eqn.params["call_jaxpr"].jaxpr.debug_info.func_src_info


def _operation(eqn: JaxprEqn) -> str:
    """The row of the tables that an equation has: a product of a value with itself is its square."""
    is_square = eqn.primitive.name == "mul" and eqn.invars[0] is eqn.invars[1]
    return "square" if is_square else eqn.primitive.name


def _is_of_each(eqn: JaxprEqn) -> bool:
    """Whether it does the same to each of several arrays, as barriers, sorts and collectives do."""
    return eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars) > 1


def _shape_of(atom: Atom) -> tuple[int, ...]:
    aval: Any = atom.aval
    return aval.shape


def _is_castable(eqn: JaxprEqn) -> bool:
    """Whether there are floating arrays, and none that autocast leaves alone: float64, float8."""
    dtypes = {float_dtype(atom) for atom in (*eqn.invars, *eqn.outvars)} - {None}
    return bool(dtypes) and dtypes <= _CASTABLE
