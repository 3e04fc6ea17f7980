"""Functions with derivatives of their own: what is inside may be rewritten, and a user's derivative stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend.core import JaxprEqn

from ._body import Body
from ._kind import Kind, Value, float_dtype
from ._rule import Context, Rule

if TYPE_CHECKING:
    from ._rewriter import Rewriter


def custom_jvp(
    rewriter: Rewriter, eqn: JaxprEqn, values: list[Value], body: Body, context: Context
) -> list[Value] | None:
    """Rewrites a `jax.custom_jvp` function with its rule, or only what is inside; `None` if the rule wants neither."""
    params = eqn.params
    if rewriter.rule.opens(eqn, context):
        kinds = tuple(value.kind for value in values)
        inner = rewriter.rewrite(params["call_jaxpr"], kinds, context)
        derivative = _Derivative(rewriter, params["jvp_jaxpr_fun"], kinds[params["num_consts"] :], inner.kinds, context)
        changed = {**params, "call_jaxpr": inner.program, "jvp_jaxpr_fun": derivative}
        return body.append(eqn, [value.atom for value in values], inner.kinds, changed)
    return _inside(rewriter, eqn, values, body, context, {})


def custom_vjp(
    rewriter: Rewriter, eqn: JaxprEqn, values: list[Value], body: Body, context: Context
) -> list[Value] | None:
    """Rewrites what is inside of a `jax.custom_vjp` function, and its forward pass; `None` if the rule does not."""
    forward = _Forward(rewriter, eqn.params["fwd_jaxpr_thunk"], eqn, context)
    return _inside(rewriter, eqn, values, body, context, {"fwd_jaxpr_thunk": forward})


def _inside(
    rewriter: Rewriter, eqn: JaxprEqn, values: list[Value], body: Body, context: Context, changed: dict[str, Any]
) -> list[Value] | None:
    """The arguments and results keep their traced dtypes: the user's derivative was written for those."""
    if not rewriter.rule.opens_inside(eqn, context):
        return None
    kinds = [_pinned(value.kind, atom) for value, atom in zip(values, eqn.invars, strict=True)]
    atoms = [
        value.atom if kind.dtype is None else body.cast(value.atom, kind.dtype, eqn)
        for value, kind in zip(values, kinds, strict=True)
    ]
    inner = rewriter.rewrite(eqn.params["call_jaxpr"], kinds, context, [float_dtype(var) for var in eqn.outvars])
    return body.append(eqn, atoms, inner.kinds, {**eqn.params, "call_jaxpr": inner.program, **changed})


def _pinned(kind: Kind, atom: Any) -> Kind:
    return kind._replace(dtype=float_dtype(atom))


class _Derivative:
    """Stands for the JVP rule of an equation: the one that was traced, rewritten for other dtypes."""

    def __init__(
        self,
        rewriter: Rewriter,
        traced: Any,
        kinds: Sequence[Kind],
        results: Sequence[Kind],
        context: Context,
    ):
        self.debug_info = traced.debug_info
        self._rewriter, self._traced, self._context = rewriter, traced, context
        self._kinds, self._results = kinds, results

    def call_wrapped(self, *zeros: bool) -> tuple[Any, Any, Any]:
        program, consts, out_zeros = self._traced.call_wrapped(*zeros)
        tangents = [kind for kind, zero in zip(self._kinds, zeros, strict=True) if not zero]
        wanted = [kind.dtype for kind in self._results]
        wanted += [kind.dtype for kind, zero in zip(self._results, out_zeros, strict=True) if not zero]
        kinds = [*_of_consts(self._rewriter.rule, program, consts), *self._kinds, *tangents]
        return self._rewriter.rewrite(program, kinds, self._context, wanted).program, consts, out_zeros


class _Forward:
    """Stands for the forward pass of an equation: the one that was traced, rewritten inside."""

    def __init__(self, rewriter: Rewriter, traced: Any, eqn: JaxprEqn, context: Context):
        self.debug_info = traced.debug_info
        self._rewriter, self._traced, self._context = rewriter, traced, context

    def call_wrapped(self, *nonzeros: bool) -> tuple[Any, Any]:
        program, consts = self._traced.call_wrapped(*nonzeros)
        kinds = [self._rewriter.rule.argument(float_dtype(var)) for var in program.invars]
        wanted: list[np.dtype | None] = [float_dtype(atom) for atom in program.outvars]
        return self._rewriter.rewrite(program, kinds, self._context, wanted).program, consts


def _of_consts(rule: Rule, program: Any, consts: Sequence[Any]) -> list[Kind]:
    """The kinds of constants that are passed as leading arguments, as from JAX 0.11 on."""
    detached = program.invars[: len(consts)] if not program.constvars else []
    return [rule.argument(float_dtype(var)) for var in detached]
