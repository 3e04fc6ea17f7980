"""Evaluates a jaxpr on bounds of its values, and lists the faults that its equations may have."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ..._base import is_floating_dtype
from ._bounds import (
    Bounds,
    FaultOrigin,
    Layout,
    Test,
    compose,
    describe,
    find_alias,
    find_layout,
    find_lost,
    is_followed,
    join,
    keep_one_peak,
    move_tests,
    refine,
    relate_operands,
)
from ._faults import (
    CANCELLATION,
    INVALID,
    OVERFLOW,
    Around,
    Fault,
    Place,
    find_invalid,
    is_cancelled,
    locate,
    make_fault,
)
from ._interpreter import MOST_ITERATIONS, Interpreter
from ._intervals import INF, OPEN_LIMITS, RULES, Interval, bound_dtype, find_eps, hull, is_real, round_interval

_MOST_REFINED = 128
"""Maximum number of operations before a `select_n` that are bounded again for the elements that it selects."""


class Analysis(Interpreter):
    """Interval analysis of a jaxpr."""

    def __init__(self) -> None:
        self.nonzero: dict[Place, bool] = {}  # True for a difference that is never zero in exact arithmetic
        self._terms: dict[Any, int] = {}
        self._found: dict[int, Fault] = {}  # of one equation
        self._faults: dict[int, Fault] = {}
        self._settled: dict[int, FaultOrigin] = {}

    @property
    def faults(self) -> list[Fault]:
        """Lists the possible faults, in order, of elements that no `select_n` discards."""
        return [fault for _, fault in sorted(self._faults.items())]

    def find_faults(self, program: Jaxpr, consts: Sequence[Any], inputs: Sequence[Bounds]) -> list[Fault]:
        """Runs a jaxpr, and lists the faults that it may have."""
        results = self.run(program, consts, inputs)
        self._count_lost(results)
        self._faults.update((self._new_term(), Fault(INVALID)) for one in results if math.isnan(one.computed.low))
        return self.faults

    def _count_lost(self, values: Sequence[Bounds]) -> None:
        self._faults.update((self._new_term(), one.lost) for one in values if one.lost)

    def settle(self, values: Sequence[Bounds]) -> None:
        origins = [one.origin for one in values]
        while origins:
            origin = origins.pop()
            if origin and id(origin) not in self._settled:
                self._settled[id(origin)] = origin
                self._faults.update(origin.faults)
                origins += [one.origin for one in origin.operands]

    def bound(self, interval: Interval, shape: tuple[int, ...]) -> Bounds:
        """Bounds an array by an interval alone."""
        return Bounds(interval, interval, self._new_term(), shape)

    def read(self, value: Any) -> Bounds:
        dtype, shape = value.dtype, value.shape
        if not is_real(dtype) or not value.size:
            return self.bound(Interval(0.0, 1.0), shape)
        array = np.asarray(value).astype(np.float64)
        interval = Interval(float(array.min()), float(array.max()))
        return Bounds(interval, interval, self._number((str(dtype), shape, array.tobytes())), shape)

    def apply(self, eqn: JaxprEqn, operands: list[Bounds], around: Around) -> list[Bounds]:
        name, alias = eqn.primitive.name, find_alias(eqn, operands)
        if alias is not None and len(eqn.outvars) > 1:
            return operands
        if alias is not None or not is_followed(eqn):
            self.settle(operands[:1] if name == "select_n" else [one for one in operands if one is not alias])
        if alias is not None:
            return [alias]
        operands = self._refine_cases(eqn, operands, around) if name == "select_n" else operands
        self._found = {}
        results = self._bound_results(eqn, operands, around)
        origin = FaultOrigin(eqn, operands if is_followed(eqn) else (), around, self._found)
        return [one._replace(origin=origin) for one in results]

    def _refine_cases(self, eqn: JaxprEqn, operands: list[Bounds], around: Around) -> list[Bounds]:
        """Bounds the cases of a `select_n` for the elements that are selected."""
        (which, *cases), shape = operands, _shape_of(eqn.outvars[0])
        if len(cases) != 2:
            return operands
        places = tuple(range(len(shape)))
        for i, tests in enumerate(move_tests(which.tests, find_layout(eqn, which, shape))):
            excluded = next((test for test in tests if test.name == "ne"), None)
            sides = [[excluded._replace(name=name)] for name in ("lt", "gt")] if excluded else [[]]
            refined = [self._refine(cases[i], [*tests, *side], places, {}) for side in sides]
            cases[i] = refined[0]
            if refined[0] is not refined[-1]:  # below and above a value that is excluded
                origin = FaultOrigin(eqn, [self.bound(Interval(0.0, 1.0), shape), *refined], around, {})
                cases[i] = join(refined, refined[0].term, shape)._replace(origin=origin)
        return [which, *cases]

    def _refine(
        self, value: Bounds, tests: Sequence[Test], places: Layout, seen: dict[tuple[int, Layout], Bounds]
    ) -> Bounds:
        """Bounds an array again for the elements that pass tests. `places`: the axes of the tests in the array."""
        key, origin, result = (id(value), places), value.origin, value
        if key in seen or not tests or len(seen) == _MOST_REFINED:
            return seen.get(key, value)
        seen[key] = value
        if origin:
            layouts = [find_layout(origin.eqn, one, value.shape) for one in origin.operands]
            refined = [
                one if layout is None else self._refine(one, tests, compose(layout, places), seen)
                for one, layout in zip(origin.operands, layouts, strict=True)
            ]
            if any(new is not old for new, old in zip(refined, origin.operands, strict=True)):
                [result] = self.apply(origin.eqn, [one.drop_peak() for one in refined], origin.around)
        seen[key] = refine(result, tests, places)
        return seen[key]

    def _bound_results(self, eqn: JaxprEqn, operands: list[Bounds], around: Around) -> list[Bounds]:
        name = eqn.primitive.name
        if name in ("sort", "top_k"):
            return self._reorder(eqn, operands)
        if name not in RULES or not all(map(_is_number, (*eqn.invars, *eqn.outvars))):
            return self._give_up(eqn, operands, around)
        if any(math.isnan(one.computed.low) for one in operands):
            is_moved = name in ("broadcast_in_dim", "convert_element_type")
            return [self.bound(operands[0].computed, _shape_of(eqn.outvars[0]))] if is_moved else self._fail(
                INVALID, eqn, operands, around
            )  # fmt: skip
        if name in ("log", "log2", "sqrt", "rsqrt", "cbrt", "pow", "div") and (
            lost := find_lost(operands[name == "div" :])
        ):
            self._found[self._new_term()] = lost
        operands = keep_one_peak(eqn, operands)
        if kind := find_invalid(eqn, [one.computed for one in operands]):
            return self._fail(kind, eqn, operands, around)
        result = self._compute(eqn, operands, around)
        numbered = [(self._number((result.term, i)), _shape_of(var)) for i, var in enumerate(eqn.outvars)]
        return [result._replace(term=term, shape=shape) for term, shape in numbered]

    def _reorder(self, eqn: JaxprEqn, operands: Sequence[Bounds]) -> list[Bounds]:
        """Bounds the results of a `sort` or `top_k`, which has the largest element of each slice and its position."""
        kept = [self._forget(one)._replace(lost=one.lost) for one in operands]
        if eqn.primitive.name == "sort":
            return kept
        [x], shape, axis = operands, _shape_of(eqn.outvars[0]), eqn.params["axis"]
        if x.axes == {axis}:
            kept = [kept[0]._replace(computed=x.computed, exact=x.exact, axes=x.axes)]
        return [kept[0]._replace(shape=shape), self.bound(Interval(0.0, x.shape[axis] - 1.0), shape)]

    def _compute(self, eqn: JaxprEqn, operands: list[Bounds], around: Around) -> Bounds:
        """Bounds the result of an equation that has a rule; notes an overflow."""
        name, aval = eqn.primitive.name, eqn.outvars[0].aval
        dtype: Any = getattr(aval, "dtype", None)
        rule, related = RULES[name], relate_operands(eqn, operands)
        if related is not None and related.peak > -INF:  # of other slices than the peaks of the operands
            operands = [one.drop_peak() for one in operands]
        limits = [bound_dtype(getattr(atom.aval, "dtype", np.bool_)) for atom in eqn.invars]
        finite = [_clip(one.computed, limit) for one, limit in zip(operands, limits, strict=True)]
        largest = max(operands[0].computed.low, operands[0].computed.peak) if name == "reduce_sum" else -INF
        computed, overflows = round_interval(eqn, dtype, _meet(rule(eqn, *finite), related), largest)
        if overflows:
            self._note(OVERFLOW, eqn, operands, around)
        if any(INF in map(abs, one.computed[:2]) for one in operands):  # of a mask
            computed = hull(computed, _meet(rule(eqn, *(one.computed for one in operands)), related))
        exact = computed
        if is_floating_dtype(dtype):
            limit = Interval(*OPEN_LIMITS.get(name, (-INF, INF)))
            exact = _clip(_widen(_meet(rule(eqn, *(one.exact for one in operands)), related)), limit)
        key = name, _freeze(eqn.params), tuple(one.term for one in operands)
        bounds = Bounds(computed, exact, self._number(key), _shape_of(eqn.outvars[0]))
        result = describe(eqn, operands, bounds, find_eps(dtype, computed.low))
        is_difference = name in ("add", "add_any", "sub") and is_floating_dtype(dtype)
        return self._check_difference(eqn, operands, result, around) if is_difference else result

    def _check_difference(self, eqn: JaxprEqn, operands: list[Bounds], result: Bounds, around: Around) -> Bounds:
        """Marks a difference that may be zero though it is not in exact arithmetic."""
        place, (x, y) = locate(eqn, around), (one.computed for one in operands)
        is_nonzero = not result.exact.low <= 0 <= result.exact.high
        self.nonzero[place] = is_nonzero and self.nonzero.get(place, True)
        may_be_zero = result.computed.low <= 0 <= result.computed.high and is_cancelled(eqn, x, y)
        return result._replace(
            lost=make_fault(CANCELLATION, eqn, around, (x, y)) if is_nonzero and may_be_zero else None
        )

    def _fail(self, kind: str, eqn: JaxprEqn, operands: Sequence[Bounds], around: Around) -> list[Bounds]:
        """Notes a fault, and bounds the results by their dtypes."""
        if kind:
            self._note(kind, eqn, operands, around)
        dtypes = [getattr(var.aval, "dtype", np.bool_) for var in eqn.outvars]
        return [self.bound(bound_dtype(dtype), _shape_of(var)) for dtype, var in zip(dtypes, eqn.outvars, strict=True)]

    def _give_up(self, eqn: JaxprEqn, operands: Sequence[Bounds], around: Around) -> list[Bounds]:
        """Notes an equation without a rule. Integers are always valid, but floating values may not be finite."""
        dtypes = [getattr(var.aval, "dtype", np.bool_) for var in eqn.outvars]
        is_valid = not any(is_floating_dtype(dtype) or jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
        is_loop = eqn.primitive.name in ("scan", "while")
        why = f"its bounds still grow after {MOST_ITERATIONS} iterations" if is_loop else "it has no rule"
        return self._fail("" if is_valid else why, eqn, operands, around)

    def _note(self, kind: str, eqn: JaxprEqn, operands: Sequence[Bounds], around: Around) -> None:
        self._found[self._new_term()] = make_fault(kind, eqn, around, [one.computed for one in operands])

    def _new_term(self) -> int:
        return self._number(object())

    def _number(self, key: Any) -> int:
        return self._terms.setdefault(key, len(self._terms))

    def choose(self, which: Bounds, count: int) -> list[int]:
        return [i for i in range(count) if min(which.computed.low, count - 1) <= i <= max(which.computed.high, 0)]

    def join(self, values: Sequence[Bounds]) -> Bounds:
        return values[0] if len(values) == 1 else join(values, self._new_term(), values[0].shape)

    def begin_iteration(self, carry: Sequence[Bounds]) -> list[Bounds]:
        self._count_lost(carry)
        return list(map(self._forget, carry))

    def _forget(self, value: Bounds) -> Bounds:
        return join([value._replace(lost=None)], self._new_term(), value.shape)

    def contains(self, old: Sequence[Bounds], new: Sequence[Bounds]) -> bool:
        pairs = [pair for one, other in zip(old, new, strict=True) for pair in zip(one[:2], other[:2], strict=True)]
        return all(one.low <= other.low and other.high <= one.high for one, other in pairs)

    def take(self, value: Bounds, i: int) -> Bounds:
        return join([value], self._new_term(), value.shape[1:])

    def stack(self, values: Sequence[Bounds], shape: tuple[int, ...]) -> Bounds:
        return join(values, self._new_term(), shape)


def _shape_of(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _is_number(atom: Any) -> bool:
    return is_real(getattr(atom.aval, "dtype", np.complex64))


def _clip(interval: Interval, limit: Interval) -> Interval:
    low, high = (min(max(bound, limit.low), limit.high) for bound in interval[:2])
    return Interval(low, high, interval.peak)


def _meet(interval: Interval, related: Interval | None) -> Interval:
    """Intersects an interval, in which a nan is an unknown bound, with another one."""
    low, high, peak = interval
    low, high = -INF if math.isnan(low) else low, INF if math.isnan(high) else high
    other = related or Interval(-INF, INF)
    return Interval(max(low, other.low), min(high, other.high), max(peak, other.peak))


def _widen(interval: Interval) -> Interval:
    """Covers the rounding of float64, in which bounds are computed. Zero is exact."""
    low, high, peak = (
        bound and math.nextafter(bound, side) for bound, side in zip(interval, (-INF, INF, -INF), strict=True)
    )
    return Interval(low, high, peak)


def _freeze(params: dict[str, Any]) -> Any:
    """Returns a hashable key for parameters, equal for equal ones if they are hashable."""
    key = tuple(sorted(params.items()))
    try:
        hash(key)
    except TypeError:
        return object()
    return key
