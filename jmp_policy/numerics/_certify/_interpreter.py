"""Evaluates a jaxpr through control flow, and finds faults on arrays that may break it."""

from collections.abc import Container, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._base import is_floating_dtype
from ..._jaxpr import CALLED, SubJaxpr, list_live, scan_parts, sub_jaxprs
from ._faults import CANCELLATION, DIVISION, INVALID, OVERFLOW, Around, Fault, Place, has_pole, locate, make_fault
from ._intervals import Interval, is_real

MOST_ITERATIONS = 256
"""Maximum number of iterations to follow while the bounds of a loop still change."""


class Interpreter:
    """Evaluates a jaxpr on arrays, one equation at a time. A subclass may evaluate it on other values."""

    CALLS = frozenset((*CALLED, "custom_jvp_call", "custom_vjp_call"))

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
        return list(map(find, program.outvars))

    def _run_equation(self, eqn: JaxprEqn, operands: list[Any], around: Around) -> Sequence[Any]:
        name, results = eqn.primitive.name, None
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
        return self.run(body.program, body.consts, inputs, (*around, (eqn, body.program)))

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
        """True if no iteration of a loop that carries `new` after `old` has other results."""
        return False

    def take(self, value: Any, i: int) -> Any:
        """Returns an element along the first axis."""
        return value[i]

    def stack(self, values: Sequence[Any], shape: tuple[int, ...]) -> Any:
        """Stacks the results of iterations."""
        return jnp.stack(values)


class Trial(Interpreter):
    """Evaluates a jaxpr on arrays, and notes the first fault."""

    CALLS = Interpreter.CALLS - {"shard_map"}

    def __init__(self, nonzero: Container[Place]) -> None:
        self.fault: Fault | None = None
        self._nonzero = nonzero  # places of differences that are never zero in exact arithmetic

    def apply(self, eqn: JaxprEqn, operands: list[Any], around: Around) -> Sequence[Any]:
        results = super().apply(eqn, operands, around)
        if self.fault is None and (kind := self._find_fault(eqn, operands, results, around)):
            ranges = [Interval(float(jnp.min(x)), float(jnp.max(x))) for x in operands if _is_number(x)]
            self.fault = make_fault(kind, eqn, around, ranges)
        return results

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


def _is_float(value: Any) -> bool:
    return is_floating_dtype(value.dtype)


def _is_number(value: Any) -> bool:
    return value.size > 0 and is_real(value.dtype)


def _have_any(test: Any, arrays: Sequence[Any]) -> bool:
    return any(bool(test(array).any()) for array in arrays)
