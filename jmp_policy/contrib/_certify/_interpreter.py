"""Evaluates a jaxpr through control flow, and finds faults on arrays that may break it."""

import functools
from collections.abc import Container, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._base import is_floating_dtype
from ..._jaxpr import CALLED, CUSTOM, SubJaxpr, list_live, scan_parts, sub_jaxprs
from ._bounds import MOVING, is_followed
from ._faults import CANCELLATION, DIVISION, INVALID, OVERFLOW, Around, Fault, Place, has_pole, locate, make_fault
from ._intervals import Interval, is_real

MOST_ITERATIONS = 256
"""Maximum number of iterations to follow while the bounds of a loop still change."""


class Interpreter:
    """Evaluates a jaxpr on arrays, one equation at a time. A subclass may evaluate it on other values."""

    CALLS = CUSTOM.union(CALLED)

    def run(self, program: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], around: Around = ()) -> list[Any]:
        """Returns the outputs of a jaxpr."""
        values = dict(zip(program.constvars, map(self.read, consts), strict=True))
        values.update(zip(program.invars, inputs, strict=True))

        def find(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return self.read(np.asarray(atom.val).astype(atom.aval.dtype))  # pyright: ignore[reportAttributeAccessIssue]
            return values[atom]

        for eqn in list_live(program):
            results = self._run_equation(eqn, list(map(find, eqn.invars)), around)
            values.update(zip(eqn.outvars, results, strict=True))
        outputs = list(map(find, program.outvars))
        if not around:
            self.settle(outputs)
        return outputs

    def _run_equation(self, eqn: JaxprEqn, operands: list[Any], around: Around) -> Sequence[Any]:
        name, results = eqn.primitive.name, None
        if name in ("scan", "while", "cond") or not eqn.outvars:
            self.settle(operands[:1] if name == "cond" else operands)
        if not eqn.outvars:  # such as a debug callback
            return []
        if name == "scan":
            results = self._scan(eqn, operands, around)
        elif name == "while":
            results = self._loop(eqn, operands, around)
        elif name == "cond":
            branches = sub_jaxprs(eqn)
            chosen = [branches[i] for i in self.choose(operands[0], len(branches)) if branches[i].trips]
            outputs = [self._enter(eqn, branch, operands[1:], around) for branch in chosen]
            results = [self.join(values) for values in zip(*outputs, strict=True)] if chosen else None
        elif name in self.CALLS:
            [body] = sub_jaxprs(eqn)
            results = self._enter(eqn, body, operands[len(operands) - len(body.program.invars) :], around)
        return self.apply(eqn, operands, around) if results is None else results

    def _enter(self, eqn: JaxprEqn, body: SubJaxpr, inputs: Sequence[Any], around: Around) -> list[Any]:
        results = self.run(body.program, body.consts, inputs, (*around, (eqn, body.program)))
        if eqn.primitive.name not in self.CALLS:
            self.settle(results)
        return results

    def _scan(self, eqn: JaxprEqn, operands: list[Any], around: Around) -> list[Any] | None:
        """Returns the results of a scan, or None if it is too long."""
        [body] = sub_jaxprs(eqn)
        (fixed, carried), length, is_reversed = scan_parts(eqn), eqn.params["length"], eqn.params["reverse"]
        carry, rows = self.begin_iteration(operands[fixed : fixed + carried]), list[Sequence[Any]]()
        for i in range(length)[::-1] if is_reversed else range(length):
            if len(rows) == MOST_ITERATIONS:
                return None
            inputs = [self.take(one, i) for one in operands[fixed + carried :]]
            results = self._enter(eqn, body, [*operands[:fixed], *carry, *inputs], around)
            rows.append(results[carried:])
            if self.contains(carry, results[:carried]):
                break
            carry = self.begin_iteration(results[:carried])
        columns = zip(*(rows[::-1] if is_reversed else rows), strict=True)
        shapes = [getattr(var.aval, "shape", ()) for var in eqn.outvars[carried:]]
        stacked = [self.stack(column, shape) for column, shape in zip(columns, shapes, strict=True)] if rows else []
        return [*carry, *stacked] if rows else None

    def _loop(self, eqn: JaxprEqn, operands: list[Any], around: Around) -> list[Any] | None:
        """Returns the results of a `while`, or None if it is too long."""
        test, body = sub_jaxprs(eqn)
        first, start = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        carry = self.begin_iteration(operands[start:])
        for _ in range(MOST_ITERATIONS):
            outcomes = self.choose(self._enter(eqn, test, [*operands[:first], *carry], around)[0], 2)
            if 1 not in outcomes:
                return carry
            results = self._enter(eqn, body, [*operands[first:start], *carry], around)
            if self.contains(carry, results):
                return carry
            may_end = 0 in outcomes
            joined = [self.join(pair) for pair in zip(carry, results, strict=True)] if may_end else results
            carry = self.begin_iteration(joined)
        return None

    def read(self, value: Any) -> Any:
        """Returns the value of a constant."""
        return value

    def apply(self, eqn: JaxprEqn, operands: list[Any], around: Around) -> Sequence[Any]:
        """Returns the results of an equation that is not entered."""
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        return results if eqn.primitive.multiple_results else [results]

    def settle(self, values: Sequence[Any]) -> None:
        """Makes the faults of these values final: no later `select_n` can discard them."""

    def choose(self, which: Any, count: int) -> list[int]:
        """Returns the numbers below `count` that an index may be."""
        return [min(max(int(which), 0), count - 1)]

    def join(self, values: Sequence[Any]) -> Any:
        """Returns the value of a result that is one of these."""
        return values[-1]

    def begin_iteration(self, carry: Sequence[Any]) -> list[Any]:
        """Returns the carry of a loop without facts about one iteration."""
        return list(carry)

    def contains(self, old: Sequence[Any], new: Sequence[Any]) -> bool:
        """True at the fixed point of a loop: `new` lies within `old`."""
        return False

    def take(self, value: Any, i: int) -> Any:
        """Returns an element along the first axis."""
        return value[i]

    def stack(self, values: Sequence[Any], shape: tuple[int, ...]) -> Any:
        """Stacks the results of iterations."""
        return jnp.stack(values)


class FaultSearch(Interpreter):
    """Evaluates a jaxpr on arrays, and notes the first fault in an element that no `select_n` discards."""

    CALLS = Interpreter.CALLS - {"shard_map"}

    def __init__(self, nonzero: Container[Place]) -> None:
        self.fault: Fault | None = None
        self._nonzero = nonzero  # places of differences that are never zero in exact arithmetic
        self._found: list[Fault] = []
        # id(array) -> (array, marks). The marks are the number of the fault that an element has, or was computed
        # from, or 0. Holding the array keeps its id valid.
        self._marks: dict[int, tuple[Any, Any]] = {}

    def settle(self, values: Sequence[Any]) -> None:
        numbers = [int(jnp.max(marks, initial=0)) for marks in map(self._marks_of, values) if marks is not None]
        if self.fault is None and any(numbers):
            self.fault = self._found[max(numbers) - 1]

    def _marks_of(self, value: Any) -> Any:
        return self._marks.get(id(value), (None, None))[1]

    def apply(self, eqn: JaxprEqn, operands: list[Any], around: Around) -> Sequence[Any]:
        results = super().apply(eqn, operands, around)
        if not is_followed(eqn):
            self.settle(operands)
        if self.fault is None:
            self._mark(eqn, operands, results, around)
        return results

    def _spread(self, eqn: JaxprEqn, operands: list[Any]) -> Any:
        """Returns the marks that the only result of an equation has from its operands, or None."""
        name, marks = eqn.primitive.name, list(map(self._marks_of, operands))
        if not is_followed(eqn) or all(one is None for one in marks):
            return None
        marks = [jnp.zeros(x.shape, jnp.int32) if one is None else one for x, one in zip(operands, marks, strict=True)]
        if name in MOVING:
            return super().apply(eqn, marks, ())[0]
        if name == "select_n":
            return jnp.maximum(marks[0], lax.select_n(operands[0], *marks[1:]))
        return functools.reduce(jnp.maximum, marks)

    def _mark(self, eqn: JaxprEqn, operands: list[Any], results: Sequence[Any], around: Around) -> None:
        """Marks the elements of results that have a fault, or were computed from one."""
        spread = self._spread(eqn, operands)
        read = [_replace_marked(x, self._marks_of(x)) for x in operands]
        made = [_replace_marked(x, spread) for x in results]
        if kind := self._find_fault(eqn, read, made, around):
            ranges = [Interval(float(jnp.min(x)), float(jnp.max(x))) for x in operands if x.size and is_real(x.dtype)]
            self._found.append(make_fault(kind, eqn, around, ranges))
        for old, new in zip(results, made, strict=True):
            marks = jnp.zeros(old.shape, jnp.int32) if spread is None else spread
            if kind:
                marks = jnp.where(_is_faulty(kind, read[0], new), len(self._found), marks)
            if kind or spread is not None:
                self._marks[id(old)] = old, marks

    def _loop(self, eqn: JaxprEqn, operands: list[Any], around: Around) -> list[Any] | None:
        test = sub_jaxprs(eqn)[0].program.outvars[0]
        is_mapped = getattr(test.aval, "shape", ()) != ()  # by `vmap`; such a loop ends for each element by itself
        return None if is_mapped else super()._loop(eqn, operands, around)

    def _find_fault(self, eqn: JaxprEqn, operands: list[Any], results: Sequence[Any], around: Around) -> str:
        name, read, made = eqn.primitive.name, list(filter(_is_float, operands)), list(filter(_is_float, results))
        by_zero = name in ("div", "rem") and bool((operands[1] == 0).any())
        if _have_any(jnp.isnan, made) and not _have_any(jnp.isnan, read):
            return DIVISION if by_zero else INVALID
        if _have_any(jnp.isinf, made) and not _have_any(jnp.isinf, read):
            exponent = (
                eqn.params["y"] if name == "integer_pow" else -1 if name == "pow" and (operands[0] == 0).any() else 1
            )
            return DIVISION if by_zero or has_pole(name, exponent) else OVERFLOW
        if by_zero and not made:
            return DIVISION
        is_lost = locate(eqn, around) in self._nonzero and bool(((results[0] == 0) & (operands[0] != 0)).any())
        return CANCELLATION if is_lost else ""


def _replace_marked(x: Any, marks: Any) -> Any:
    return x if marks is None else jnp.where(marks > 0, jnp.ones_like(x), x)


def _is_faulty(kind: str, x: Any, result: Any) -> Any:
    """Finds the elements of a result that have a fault."""
    if kind == CANCELLATION:
        return (result == 0) & (x != 0)
    if not _is_float(result):
        return jnp.ones(result.shape, bool)
    return jnp.isnan(result) if _have_any(jnp.isnan, [result]) else jnp.isinf(result)


def _is_float(value: Any) -> bool:
    return is_floating_dtype(value.dtype)


def _have_any(test: Any, arrays: Sequence[Any]) -> bool:
    return any(bool(test(array).any()) for array in arrays)
