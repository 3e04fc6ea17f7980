"""The casting rules: which dtype each operation runs in, by the colours of the values that reach it."""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from .._dtypes import at_least_float32
from ..interpreter import Body, Kind, Rule, Value, float_dtype, is_float
from ._functions import Function
from ._rules import AutocastRules
from ._tables import Precision


class Colour(enum.IntEnum):
    """Why a value has its dtype; the greater wins where two meet."""

    TRACED = 0  # it came so: an argument, a parameter, a constant
    LOW = 1  # a low operation made it, or one that followed
    FULL = 2  # a full operation made it, or one that followed


class Mark(NamedTuple):
    """What autocast knows of a value.

    Attributes:
      colour: its colour.
      constant: the number that it is everywhere, if that is known.
    """

    colour: Colour
    constant: float | None = None


class Place(NamedTuple):
    """Where an equation stands.

    Attributes:
      backward: whether it belongs to a backward pass.
      function: the function of the tables that it belongs to, and how that one is treated.
    """

    backward: bool
    function: Function | None


class Casting(NamedTuple):
    """Everything that decides about an operation."""

    compute_dtype: np.dtype
    rules: AutocastRules
    custom_rules: str


_CASTABLE = frozenset(map(np.dtype, ("float32", "float16", jnp.bfloat16)))
_FLOAT32 = np.dtype(np.float32)
_TRACED, _LOW, _FULL = (Mark(colour) for colour in Colour)


class CastingRule(Rule):
    """Autocast as a rule of the interpreter."""

    def __init__(self, casting: Casting):
        self._casting = casting
        self._compute = casting.compute_dtype
        self._table = casting.rules.table(casting.compute_dtype)
        self._functions = casting.rules.functions()
        finfo = jnp.finfo(self._compute)
        self._largest, self._smallest = float(finfo.max), float(finfo.smallest_normal)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CastingRule) and self._casting == other._casting

    def __hash__(self) -> int:
        return hash(self._casting)

    def context(self, outer: Any, eqn: JaxprEqn) -> Place:
        stack = str(eqn.source_info.name_stack)
        backward = outer.backward or "transpose(" in stack
        if outer.function is not None:
            return outer if backward == outer.backward else outer._replace(backward=backward)
        if "force_full_precision" in stack:
            return Place(backward, Function("force_full_precision", "full"))
        return Place(backward, self._functions.find(eqn))

    def literal(self, literal: Literal) -> Kind:
        if not is_float(literal):
            return Kind(None)
        return Kind(float_dtype(literal), Mark(Colour.TRACED, float(literal.val) if np.ndim(literal.val) == 0 else None))

    def argument(self, dtype: np.dtype | None) -> Kind:
        return Kind(dtype, _TRACED)

    def arriving(self, value: Value, eqn: JaxprEqn, body: Body, context: Any) -> Value:
        origin = value.origin
        if origin is None or origin == context or value.kind.dtype not in _CASTABLE:
            return value
        if origin.backward and not context.backward:  # a gradient: what averages, clips and applies it is full
            return Value(body.cast_once(value.atom, _FLOAT32, eqn), Kind(_FLOAT32, _FULL))
        if origin.function is not None and origin.function.treatment == "narrow" and not self._is_low(value):
            return Value(body.cast_once(value.atom, self._compute, eqn), Kind(self._compute, _LOW))
        return value

    def _is_low(self, value: Value) -> bool:
        return value.kind.mark.colour is Colour.LOW

    def equation(self, eqn: JaxprEqn, values: list[Value], body: Body, context: Any) -> list[Value]:
        name = eqn.primitive.name
        if name == "convert_element_type":
            return self._conversion(eqn, values, body)
        precision = self._table.get(name, Precision.TRACED)
        if not _has_floats(eqn):
            return body.append(eqn, [value.atom for value in values], _as_traced(eqn, _TRACED))
        if precision is Precision.TRACED or not _is_castable(eqn):
            return self._as_traced(eqn, values, body)
        if context.function is not None:
            precision = _INSIDE[context.function.treatment].get(precision, precision)
        return getattr(self, f"_{precision.name.lower()}")(eqn, values, body)

    def _low(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        params = eqn.params
        if params.get("preferred_element_type") is not None:
            params = {**params, "preferred_element_type": self._compute}
        return self._run(eqn, values, body, Kind(self._compute, _LOW), params)

    def _full(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        return self._run(eqn, values, body, Kind(_FLOAT32, _FULL))

    def _wide(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        kind = self._followed(eqn, values)
        results = self._run(eqn, values, body, Kind(_FLOAT32, kind.mark))
        return [
            result
            if result.kind.dtype is None
            else Value(body.cast(result.atom, kind.dtype, eqn), Kind(kind.dtype, kind.mark))
            for result in results
        ]

    def _infer(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        kind = self._followed(eqn, values)
        if kind.mark.colour is Colour.LOW and any(self._underflows(value) for value in values):
            kind = Kind(_FLOAT32, _FULL)
        return self._run(eqn, values, body, kind)

    def _clear(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        kind = self._followed(eqn, values)
        floats = [value for value in values if value.kind.dtype is not None]
        if len(floats) == 1 and kind.mark.colour is Colour.TRACED:
            kind = kind._replace(mark=floats[0].kind.mark)
        return self._run(eqn, values, body, kind)

    def _compare(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        floats = [value.kind for value in values if value.kind.dtype is not None]
        dtypes = {kind.dtype for kind in floats if kind.mark.constant is None}
        dtype = dtypes.pop() if len(dtypes) == 1 else _FLOAT32
        return self._run(eqn, values, body, Kind(dtype, _TRACED))

    def _conversion(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        value, target = values[0], eqn.params["new_dtype"]
        source = float_dtype(eqn.invars[0])
        if source is None or not is_float(eqn.outvars[0]):
            return body.append(eqn, [value.atom], _as_traced(eqn, _TRACED))
        if target not in _CASTABLE or source not in _CASTABLE:
            return self._as_traced(eqn, values, body)
        if target == source:  # of the type only in name: weak or not
            if value.kind.dtype == target:
                return body.append(eqn, [value.atom], [value.kind])
            return [value]
        if target == _FLOAT32:
            return body.append(eqn, [value.atom], [Kind(_FLOAT32, _FULL)])
        mark = _LOW if target == self._compute else _TRACED
        return body.append(eqn, [self._cast(value, value.kind.dtype, body, eqn)], [Kind(target, mark)])

    def _as_traced(self, eqn: JaxprEqn, values: list[Value], body: Body) -> list[Value]:
        atoms = [
            value.atom if value.kind.dtype is None else self._cast(value, float_dtype(atom), body, eqn)
            for value, atom in zip(values, eqn.invars, strict=True)
        ]
        followed = any(v.kind.dtype is not None and v.kind.mark.colour is not Colour.TRACED for v in values)
        return body.append(eqn, atoms, _as_traced(eqn, _FULL if followed else _TRACED))

    def _run(
        self, eqn: JaxprEqn, values: list[Value], body: Body, kind: Kind, params: dict[str, Any] | None = None
    ) -> list[Value]:
        """Runs an equation in the dtype of `kind`; its floating results are of that kind."""
        atoms = [
            value.atom if value.kind.dtype is None else self._cast(value, kind.dtype, body, eqn) for value in values
        ]
        kinds = [kind if is_float(var) else Kind(None) for var in eqn.outvars]
        if params == eqn.params:
            params = None
        return body.append(eqn, atoms, kinds, params)

    def _cast(self, value: Value, dtype: Any, body: Body, eqn: JaxprEqn) -> Any:
        atom, source = value.atom, value.kind.dtype
        if source == dtype:
            return atom
        constant = value.kind.mark.constant
        if constant is not None and dtype == self._compute and self._largest < abs(constant) < np.inf:
            atom = self._clamped(atom, constant, body, eqn)
        if at_least_float32(source) == source:  # narrowing, at each use: its gradients are summed wide
            return body.cast(atom, dtype, eqn)
        return body.cast_once(atom, dtype, eqn)

    def _clamped(self, atom: Any, constant: float, body: Body, eqn: JaxprEqn) -> Any:
        """A constant that is too large for the compute dtype, such as that of a mask, as the largest that is not."""
        largest = np.float32(self._largest if constant > 0 else -self._largest)
        if isinstance(atom, Literal):
            return Literal(largest, atom.aval)
        bound = _bound(constant > 0)
        clamp = eqn.replace(
            primitive=bound.primitive, params=bound.params, effects=bound.effects, outvars=[type(atom)(atom.aval)]
        )
        [clamped] = body.append(clamp, [atom, Literal(largest, bound.invars[1].aval)], [Kind(None)])
        return clamped.atom

    def _followed(self, eqn: JaxprEqn, values: Sequence[Value]) -> Kind:
        """The kind that follows of several: the greatest colour, and its dtype."""
        kinds = [value.kind for value in values if value.kind.dtype is not None]
        colour = max((kind.mark.colour for kind in kinds), default=Colour.TRACED)
        return Kind(self._dtype_of(colour, kinds, eqn), Mark(colour))

    def _dtype_of(self, colour: Colour, kinds: Sequence[Kind], eqn: JaxprEqn) -> Any:
        if colour is Colour.FULL:
            return _FLOAT32
        if colour is Colour.LOW:
            return self._compute
        return next(float_dtype(atom) for atom in (*eqn.outvars, *eqn.invars) if is_float(atom))

    def _underflows(self, value: Value) -> bool:
        constant = None if value.kind.dtype is None else value.kind.mark.constant
        return constant is not None and 0 < abs(constant) < self._smallest

    def join(self, kinds: Sequence[Kind]) -> Kind:
        first = kinds[0]
        if first.dtype is None or all(kind == first for kind in kinds):
            return first
        if first.dtype not in _CASTABLE:
            return Kind(first.dtype, _TRACED)
        colour = max(kind.mark.colour for kind in kinds)
        if colour is Colour.TRACED:
            return Kind(first.dtype, _TRACED)
        return Kind(_FLOAT32 if colour is Colour.FULL else self._compute, Mark(colour))

    def accumulated(self, kind: Kind) -> Kind:
        return Kind(_FLOAT32, _FULL) if kind.dtype in _CASTABLE else kind

    def opens(self, eqn: JaxprEqn, context: Any) -> bool:
        return _is_of_jax(eqn)

    def opens_inside(self, eqn: JaxprEqn, context: Any) -> bool:
        return self._casting.custom_rules == "inside"


_ALL_FULL = dict.fromkeys(
    (Precision.LOW, Precision.FULL, Precision.WIDE, Precision.INFER, Precision.CLEAR), Precision.FULL
)
_INSIDE = {"full": _ALL_FULL, "narrow": _ALL_FULL, "infer": {Precision.FULL: Precision.INFER}}
"""What the classes become inside of a function that is treated as one operation."""


def _is_of_jax(eqn: JaxprEqn) -> bool:
    return f" at {_JAX}{os.sep}" in eqn.params["call_jaxpr"].jaxpr.debug_info.func_src_info


_JAX = os.path.dirname(jax.__file__)


def _has_floats(eqn: JaxprEqn) -> bool:
    return any(is_float(atom) for atom in eqn.invars) or any(is_float(var) for var in eqn.outvars)


def _is_castable(eqn: JaxprEqn) -> bool:
    dtypes = {float_dtype(atom) for atom in (*eqn.invars, *eqn.outvars)}
    return dtypes - {None} <= _CASTABLE


def _as_traced(eqn: JaxprEqn, mark: Mark) -> list[Kind]:
    return [Kind(float_dtype(var), mark) if is_float(var) else Kind(None) for var in eqn.outvars]


@functools.cache
def _bound(upper: bool) -> JaxprEqn:
    """An equation that bounds float32 numbers, as JAX would trace it."""
    operation = lax.min if upper else lax.max
    return jax.make_jaxpr(lambda x: operation(x, np.float32(1)))(np.float32(0)).eqns[0]
