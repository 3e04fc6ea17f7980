"""Evaluates the program of a model whose matmuls are observed, and makes the calls that were deferred to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]

from .._jaxpr import Program, body_of, evaluate, shape_of
from ..quant import Deferred

Call = Callable[..., list[Any]]


def evaluate_observed(
    program: Program, leaves: Sequence[Any], traced: Program, calls: dict[str, Deferred], products: dict[Any, Deferred]
) -> list[Any]:
    """Evaluates a rewritten program, given the traced one, its deferred calls by name, and products by output."""
    return _Evaluation(traced, calls, products, leaves).run(program, *leaves)


class _Evaluation:
    def __init__(
        self, traced: Program, calls: dict[str, Deferred], products: dict[Any, Deferred], leaves: Sequence[Any]
    ) -> None:
        # JAX keeps the names of functions that it differentiates or batches: these are other functions.
        named: dict[Any, list[JaxprEqn]] = {name: [] for name in calls}
        for eqn in _list_equations(traced):
            named.get(eqn.params.get("name"), []).append(eqn)
        single: dict[Any, JaxprEqn] = {name: own[0] for name, own in named.items() if len(own) == 1}
        self._calls = {name: calls[name] for name, eqn in single.items() if calls[name].fits(eqn.invars, eqn.outvars)}
        self._products = products
        self._is_concrete = not any(isinstance(leaf, Tracer) for leaf in leaves)

    def run(self, program: Program, *operands: Any) -> list[Any]:
        closed = program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())
        return evaluate(closed, *operands, find_call=self._find_call)

    def _find_call(self, eqn: JaxprEqn) -> Call | None:
        if eqn.outvars and eqn.outvars[0] in self._products:
            return self._products[eqn.outvars[0]]
        return self._calls.get(eqn.params.get("name")) or self._enter(eqn)

    def _enter(self, eqn: JaxprEqn) -> Call | None:
        """Returns the function that evaluates a sub-jaxpr with deferred calls, if it can have values."""
        params, bodies = eqn.params, [*jaxprs_in_params(eqn.params)]
        if not self._is_concrete or not any(self._has_call(body) for body in bodies):
            return None
        if eqn.primitive.name == "cond":
            return lambda index, *operands: self.run(params["branches"][int(index)], *operands)
        if eqn.primitive.name == "while" and shape_of(body_of(params["cond_jaxpr"]).outvars[0]) == ():
            return lambda *operands: self._loop(params, operands)
        is_called = eqn.primitive.name in _CALLED and len(bodies) == 1
        return (lambda *operands: self.run(bodies[0], *operands)) if is_called else None

    def _has_call(self, program: Program) -> bool:
        return any(eqn.params.get("name") in self._calls for eqn in _list_equations(program))

    def _loop(self, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
        split, end = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_cond, of_body, carry = operands[:split], operands[split:end], operands[end:]
        while bool(self.run(params["cond_jaxpr"], *of_cond, *carry)[0]):
            carry = self.run(params["body_jaxpr"], *of_body, *carry)
        return [*carry]


_CALLED = ("jit", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
"""Primitives that pass their operands to one sub-jaxpr, in order."""


def _list_equations(program: Program) -> Iterator[JaxprEqn]:
    for eqn in body_of(program).eqns:
        yield eqn
        for body in jaxprs_in_params(eqn.params):
            yield from _list_equations(body)
