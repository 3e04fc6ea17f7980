"""Functions with derivatives of their own: what is inside may be rewritten, and a user's derivative stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import DebugInfo, Jaxpr, JaxprEqn, Literal

from ._body import Body
from ._kind import Kind, Value, float_dtype
from ._rule import Context, Rule

if TYPE_CHECKING:
    from ._rewriter import Rewriter


def custom_jvp(
    rewriter: Rewriter, eqn: JaxprEqn, values: list[Value], body: Body, context: Context
) -> list[Value] | None:
    """Rewrites a `jax.custom_jvp` function with its derivative, or all but that; `None` if the rule wants neither."""
    params = eqn.params
    if rewriter.rule.opens(eqn, context):
        kinds = tuple(value.kind for value in values)
        inner = rewriter.rewrite(params["call_jaxpr"], kinds, context)
        derivative = _Derivative(rewriter, params["jvp_jaxpr_fun"], kinds[params["num_consts"] :], inner.kinds, context)
        changed = {**params, "call_jaxpr": inner.program, "jvp_jaxpr_fun": derivative}
        return body.append(eqn, [value.atom for value in values], inner.kinds, changed)
    return _inside(rewriter, eqn, values, body, context, {"jvp_jaxpr_fun": _Primals(rewriter, eqn, context)})


def custom_vjp(
    rewriter: Rewriter, eqn: JaxprEqn, values: list[Value], body: Body, context: Context
) -> list[Value] | None:
    """Rewrites what is inside of a `jax.custom_vjp` function, and its forward pass; `None` if the rule does not."""
    return _inside(rewriter, eqn, values, body, context, {"fwd_jaxpr_thunk": _Forward(rewriter, eqn, context)})


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

    def __init__(self, rewriter: Rewriter, eqn: JaxprEqn, context: Context):
        self._rewriter, self._traced, self._context = rewriter, eqn.params["fwd_jaxpr_thunk"], context
        self.debug_info = self._traced.debug_info

    def call_wrapped(self, *nonzeros: bool) -> tuple[Any, Any]:
        program, consts = self._traced.call_wrapped(*nonzeros)
        return _rewritten_inside(self._rewriter, program, self._context), consts


class _Primals:
    """Stands for the JVP rule of an equation: the one that was traced, but what no tangent enters rewritten inside."""

    def __init__(self, rewriter: Rewriter, eqn: JaxprEqn, context: Context):
        self._rewriter, self._traced, self._context = rewriter, eqn.params["jvp_jaxpr_fun"], context
        self.debug_info = self._traced.debug_info

    def call_wrapped(self, *zeros: bool) -> tuple[Any, Any, Any]:
        program, consts, out_zeros = self._traced.call_wrapped(*zeros)
        tangents = program.invars[len(program.invars) - zeros.count(False) :]
        primals, linear = _without(program, tangents)
        new = _rewritten_inside(self._rewriter, primals, self._context)
        return _continued(new, primals.outvars, linear, program), consts, out_zeros


def _rewritten_inside(rewriter: Rewriter, program: Jaxpr, context: Context) -> Jaxpr:
    """Arguments and results keep their dtypes."""
    kinds = [rewriter.rule.argument(float_dtype(var)) for var in program.invars]
    return rewriter.rewrite(program, kinds, context, [float_dtype(atom) for atom in program.outvars]).program


def _without(program: Jaxpr, variables: Sequence[Any]) -> tuple[Jaxpr, list[JaxprEqn]]:
    """The equations that do not depend on certain variables, as a program that makes what the others need of them."""
    reached, apart, others, made = set(variables), [], [], set()
    for eqn in program.eqns:
        if reached.isdisjoint(_variables(eqn.invars)):
            apart.append(eqn)
            made.update(eqn.outvars)
        else:
            others.append(eqn)
            reached.update(eqn.outvars)
    needed = _variables([*(atom for eqn in others for atom in eqn.invars), *program.outvars])
    nameless = DebugInfo("custom_jvp", program.debug_info.func_src_info, None, None)
    outvars = [var for var in dict.fromkeys(needed) if var in made]
    return program.replace(eqns=apart, outvars=outvars, debug_info=nameless), others


def _continued(first: Jaxpr, outvars: Sequence[Any], equations: Sequence[JaxprEqn], whole: Jaxpr) -> Jaxpr:
    """A program and then equations that read its results as `outvars`; arguments and results are those of `whole`."""
    made = dict(zip(outvars, first.outvars, strict=True))

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else made.get(atom, atom) for atom in atoms]

    rest = [eqn.replace(invars=renamed(eqn.invars)) for eqn in equations]
    return whole.replace(eqns=[*first.eqns, *rest], outvars=renamed(whole.outvars), debug_info=whole.debug_info)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _of_consts(rule: Rule, program: Any, consts: Sequence[Any]) -> list[Kind]:
    """The kinds of constants that are passed as leading arguments, as from JAX 0.11 on."""
    detached = program.invars[: len(consts)] if not program.constvars else []
    return [rule.argument(float_dtype(var)) for var in detached]
