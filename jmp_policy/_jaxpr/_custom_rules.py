"""Functions with derivatives of their own: what is inside may be rewritten, and a user's derivative stays.

A derivative is traced when JAX asks for it. What stands for it here rewrites what the traced one returns.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import DebugInfo, Jaxpr, JaxprEqn, Literal, Var

from ._program import Atom, float_dtype, list_variables
from ._rule import Body, Context, Kind, RewritesBodies, Rule, Value


def write_custom_jvp(
    rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: Body, context: Context
) -> list[Value] | None:
    """Rewrites a `jax.custom_jvp` function with its derivative, or all but that; `None` if the rule wants neither."""
    params = eqn.params
    if rewriter.rule.opens(eqn, context):
        kinds = tuple(value.kind for value in values)
        inner = rewriter.rewrite(params["call_jaxpr"], kinds, context)
        derivative = _WholeJvp(rewriter, params["jvp_jaxpr_fun"], kinds[params["num_consts"] :], inner.kinds, context)
        changed = {**params, "call_jaxpr": inner.program, "jvp_jaxpr_fun": derivative}
        return body.append(eqn, [value.atom for value in values], inner.kinds, changed)
    return _write_inside(rewriter, eqn, values, body, context, {"jvp_jaxpr_fun": _JvpInside(rewriter, eqn, context)})


def write_custom_vjp(
    rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: Body, context: Context
) -> list[Value] | None:
    """Rewrites what is inside of a `jax.custom_vjp` function, and its forward pass; `None` if the rule does not."""
    changed = {"fwd_jaxpr_thunk": _ForwardInside(rewriter, eqn, context)}
    return _write_inside(rewriter, eqn, values, body, context, changed)


def _write_inside(
    rewriter: RewritesBodies,
    eqn: JaxprEqn,
    values: list[Value],
    body: Body,
    context: Context,
    changed: dict[str, Any],
) -> list[Value] | None:
    """The arguments and results keep their traced dtypes: the user's derivative was written for those."""
    if not rewriter.rule.opens_inside(eqn, context):
        return None
    kinds = [_pin(value.kind, atom) for value, atom in zip(values, eqn.invars, strict=True)]
    atoms = body.cast_values(values, kinds, eqn)
    inner = rewriter.rewrite(eqn.params["call_jaxpr"], kinds, context, [float_dtype(var) for var in eqn.outvars])
    return body.append(eqn, atoms, inner.kinds, {**eqn.params, "call_jaxpr": inner.program, **changed})


def _pin(kind: Kind, atom: Atom) -> Kind:
    """The kind of a value in the dtype that it was traced in."""
    return kind._replace(dtype=float_dtype(atom))


class _WholeJvp:
    """Stands for the JVP rule of an equation: the traced one, rewritten for other dtypes."""

    def __init__(
        self,
        rewriter: RewritesBodies,
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
        # A tangent has the kind of its primal, and enters only where it is not zero.
        tangents = [kind for kind, zero in zip(self._kinds, zeros, strict=True) if not zero]
        wanted = [kind.dtype for kind in self._results]
        wanted += [kind.dtype for kind, zero in zip(self._results, out_zeros, strict=True) if not zero]
        kinds = [*_find_const_kinds(self._rewriter.rule, program, consts), *self._kinds, *tangents]
        return self._rewriter.rewrite(program, kinds, self._context, wanted).program, consts, out_zeros


class _ForwardInside:
    """Stands for the forward pass of an equation: the traced one, rewritten inside."""

    def __init__(self, rewriter: RewritesBodies, eqn: JaxprEqn, context: Context):
        self._rewriter, self._traced, self._context = rewriter, eqn.params["fwd_jaxpr_thunk"], context
        self.debug_info = self._traced.debug_info

    def call_wrapped(self, *nonzeros: bool) -> tuple[Any, Any]:
        program, consts = self._traced.call_wrapped(*nonzeros)
        return _rewrite_inside(self._rewriter, program, self._context), consts


class _JvpInside:
    """Stands for the JVP rule of an equation: the traced one, with what no tangent enters rewritten inside."""

    def __init__(self, rewriter: RewritesBodies, eqn: JaxprEqn, context: Context):
        self._rewriter, self._traced, self._context = rewriter, eqn.params["jvp_jaxpr_fun"], context
        self.debug_info = self._traced.debug_info

    def call_wrapped(self, *zeros: bool) -> tuple[Any, Any, Any]:
        program, consts, out_zeros = self._traced.call_wrapped(*zeros)
        tangents = program.invars[len(program.invars) - zeros.count(False) :]
        primals, linear = _split_dependent(program, tangents)
        new = _rewrite_inside(self._rewriter, primals, self._context)
        return _append_equations(new, primals.outvars, linear, program), consts, out_zeros


def _rewrite_inside(rewriter: RewritesBodies, program: Jaxpr, context: Context) -> Any:
    """Rewrites a program whose arguments and results keep their dtypes."""
    kinds = [rewriter.rule.argument(float_dtype(var)) for var in program.invars]
    return rewriter.rewrite(program, kinds, context, [float_dtype(atom) for atom in program.outvars]).program


def _split_dependent(program: Jaxpr, variables: Sequence[Var]) -> tuple[Jaxpr, list[JaxprEqn]]:
    """Splits off the equations that depend on certain variables.

    Returns:
      A program of the other equations, which makes what these need, and the equations that depend on the variables.
    """
    reached, apart, others, made = set(variables), [], [], set()
    for eqn in program.eqns:
        if reached.isdisjoint(list_variables(eqn.invars)):
            apart.append(eqn)
            made.update(eqn.outvars)
        else:
            others.append(eqn)
            reached.update(eqn.outvars)
    needed = list_variables([*(atom for eqn in others for atom in eqn.invars), *program.outvars])
    nameless = DebugInfo("custom_jvp", program.debug_info.func_src_info, None, None)
    outvars = [var for var in dict.fromkeys(needed) if var in made]
    return program.replace(eqns=apart, outvars=outvars, debug_info=nameless), others


def _append_equations(first: Jaxpr, outvars: Sequence[Atom], equations: Sequence[JaxprEqn], whole: Jaxpr) -> Jaxpr:
    """A program and then equations that read its results as `outvars`; arguments and results are as in `whole`."""
    made = dict(zip(outvars, first.outvars, strict=True))

    def rename(atoms: Sequence[Atom]) -> list[Atom]:
        return [atom if isinstance(atom, Literal) else made.get(atom, atom) for atom in atoms]

    rest = [eqn.replace(invars=rename(eqn.invars)) for eqn in equations]
    return whole.replace(eqns=[*first.eqns, *rest], outvars=rename(whole.outvars), debug_info=whole.debug_info)


def _find_const_kinds(rule: Rule, program: Jaxpr, consts: Sequence[Any]) -> list[Kind]:
    """The kinds of constants that are passed as leading arguments, as from JAX 0.11 on."""
    detached = program.invars[: len(consts)] if not program.constvars else []
    return [rule.argument(float_dtype(var)) for var in detached]
