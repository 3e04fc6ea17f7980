"""Rewrites a jaxpr by a rule, equation by equation, through control flow and custom derivatives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import DebugInfo, Jaxpr, JaxprEqn, Literal, Var

from ._program import Atom, Program, body_of, float_dtype, list_variables, replace_body, scan_parts, without_mesh
from ._rule import AbstractValue, Context, JaxprBuilder, RewritesBodies, Rewritten, Rule, Value, Writer


def write_custom_jvp(
    rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context
) -> list[Value] | None:
    """Rewrites a `jax.custom_jvp` function with its derivative, or all but that; `None` if the rule wants neither."""
    params = eqn.params
    if rewriter.rule.rewrites_custom_rule(eqn, context):
        kinds = tuple(value.kind for value in values)
        inner = rewriter.rewrite(params["call_jaxpr"], kinds, context)
        derivative = _WholeJvp(rewriter, params["jvp_jaxpr_fun"], kinds[params["num_consts"] :], inner.kinds, context)
        changed = {**params, "call_jaxpr": inner.program, "jvp_jaxpr_fun": derivative}
        return body.append(eqn, [value.atom for value in values], inner.kinds, changed)
    return _write_inside(rewriter, eqn, values, body, context, {"jvp_jaxpr_fun": _JvpInside(rewriter, eqn, context)})


def write_custom_vjp(
    rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context
) -> list[Value] | None:
    """Rewrites what is inside of a `jax.custom_vjp` function, and its forward pass; `None` if the rule does not."""
    changed = {"fwd_jaxpr_thunk": _ForwardInside(rewriter, eqn, context)}
    return _write_inside(rewriter, eqn, values, body, context, changed)


def _write_inside(
    rewriter: RewritesBodies,
    eqn: JaxprEqn,
    values: list[Value],
    body: JaxprBuilder,
    context: Context,
    changed: dict[str, Any],
) -> list[Value] | None:
    """The arguments and results keep their traced dtypes: the user's derivative was written for those."""
    if not rewriter.rule.rewrites_primal_only(eqn, context):
        return None
    kinds = [_pin(value.kind, atom) for value, atom in zip(values, eqn.invars, strict=True)]
    atoms = body.cast_values(values, kinds, eqn)
    inner = rewriter.rewrite(eqn.params["call_jaxpr"], kinds, context, [float_dtype(var) for var in eqn.outvars])
    return body.append(eqn, atoms, inner.kinds, {**eqn.params, "call_jaxpr": inner.program, **changed})


def _pin(kind: AbstractValue, atom: Atom) -> AbstractValue:
    """The kind of a value in the dtype that it was traced in."""
    return kind._replace(dtype=float_dtype(atom))


class _WholeJvp:
    """Stands for the JVP rule of an equation: the traced one, rewritten for other dtypes."""

    def __init__(
        self,
        rewriter: RewritesBodies,
        traced: Any,
        kinds: Sequence[AbstractValue],
        results: Sequence[AbstractValue],
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


def _find_const_kinds(rule: Rule, program: Jaxpr, consts: Sequence[Any]) -> list[AbstractValue]:
    """The kinds of constants that are passed as leading arguments, as from JAX 0.11 on."""
    detached = program.invars[: len(consts)] if not program.constvars else []
    return [rule.argument(float_dtype(var)) for var in detached]


def _make_call_writer(parameter: str) -> Writer:
    """Writes an equation that runs the body in a parameter once, with the equation's values as arguments."""

    def write_call(
        rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context
    ) -> list[Value]:
        inner = rewriter.rewrite(eqn.params[parameter], _list_kinds(values), context)
        return body.append(eqn, _list_atoms(values), inner.kinds, {**eqn.params, parameter: inner.program})

    return write_call


def _write_scan(
    rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context
) -> list[Value]:
    program = eqn.params["jaxpr"]
    consts, carried = scan_parts(eqn, values)
    kinds = _list_kinds(values)
    end = consts + carried
    others = [None] * (len(eqn.outvars) - carried)

    # The carry first: one turn for a guess of its kinds tells what comes back, until that is what went in.
    def turn(carry: Sequence[AbstractValue]) -> Sequence[AbstractValue]:
        arguments = [*kinds[:consts], *carry, *kinds[end:]]
        return rewriter.rewrite(program, arguments, context, [*_list_dtypes(carry), *others]).made

    kinds[consts:end] = _settle_carry(rewriter, program, kinds[consts:end], consts, turn)
    # Then the body once more, with a carry that comes back in the dtypes that it goes in.
    inner = rewriter.rewrite(program, kinds, context, [*_list_dtypes(kinds[consts:end]), *others])
    stacked = tuple(rewriter.rule.stacked(eqn, inner.kinds[carried:], context))
    if stacked != inner.kinds[carried:]:
        inner = rewriter.rewrite(program, kinds, context, _list_dtypes([*kinds[consts:end], *stacked]))
    results = (*kinds[consts:end], *stacked)
    return body.append(eqn, body.cast_values(values, kinds, eqn), results, {**eqn.params, "jaxpr": inner.program})


def _write_while(
    rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context
) -> list[Value]:
    params, program = eqn.params, eqn.params["body_jaxpr"]
    first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    kinds = _list_kinds(values)

    def turn(carry: Sequence[AbstractValue]) -> Sequence[AbstractValue]:
        return rewriter.rewrite(program, [*kinds[first:start], *carry], context, _list_dtypes(carry)).made

    kinds[start:] = _settle_carry(rewriter, program, kinds[start:], start - first, turn)
    inner = rewriter.rewrite(program, kinds[first:], context, _list_dtypes(kinds[start:]))
    test = rewriter.rewrite(params["cond_jaxpr"], [*kinds[:first], *kinds[start:]], context)
    changed = {**params, "body_jaxpr": inner.program, "cond_jaxpr": test.program}
    return body.append(eqn, body.cast_values(values, kinds, eqn), kinds[start:], changed)


def _write_cond(
    rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context
) -> list[Value]:
    branches, kinds = eqn.params["branches"], _list_kinds(values)[1:]
    # Each branch by itself tells what it makes; then all of them make what that is together.
    taken = [rewriter.rewrite(branch, kinds, context).kinds for branch in branches]
    joined = [rewriter.rule.join(kinds) for kinds in zip(*taken, strict=True)]
    inner = [rewriter.rewrite(branch, kinds, context, _list_dtypes(joined)).program for branch in branches]
    return body.append(eqn, _list_atoms(values), joined, {**eqn.params, "branches": tuple(inner)})


def _settle_carry(
    rewriter: RewritesBodies,
    program: Program,
    kinds: Sequence[AbstractValue],
    consts: int,
    turn: Callable[[Sequence[AbstractValue]], Sequence[AbstractValue]],
) -> list[AbstractValue]:
    """Finds the kinds of a carry that come back as they went in.

    Args:
      rewriter: it has the rule.
      program: the body of the loop.
      kinds: the kinds of what the loop starts with.
      consts: how many arguments of the body stand before the carry.
      turn: gives the kinds after one turn of the loop, for those before it.
    """
    accumulators = rewriter.rule.accumulators(body_of(program), range(consts, consts + len(kinds)))
    carry = [rewriter.rule.accumulated(kind) if i in accumulators else kind for i, kind in enumerate(kinds)]
    while True:
        after = turn(carry)[: len(carry)]
        joined = [rewriter.rule.join(pair) for pair in zip(carry, after, strict=True)]
        if joined == carry:
            return carry
        carry = joined


def _list_kinds(values: Sequence[Value]) -> list[AbstractValue]:
    return [value.kind for value in values]


def _list_atoms(values: Sequence[Value]) -> list[Atom]:
    return [value.atom for value in values]


def _list_dtypes(kinds: Sequence[AbstractValue]) -> list[np.dtype | None]:
    return [kind.dtype for kind in kinds]


CONTROL_FLOW: Mapping[str, Writer] = {
    "jit": _make_call_writer("jaxpr"),
    "closed_call": _make_call_writer("call_jaxpr"),
    "eval_jaxpr": _make_call_writer("call_jaxpr"),  # as `closed_call` is named from JAX 0.12 on
    "remat2": _make_call_writer("jaxpr"),
    "shard_map": _make_call_writer("jaxpr"),
    "scan": _write_scan,
    "while": _write_while,
    "cond": _write_cond,
}
"""How each equation with programs of its own is written."""


WRITERS = {**CONTROL_FLOW, "custom_jvp_call": write_custom_jvp, "custom_vjp_call": write_custom_vjp}
"""How the equations are written that run programs: what the rule says of these is asked for inside."""


class Rewriter:
    """Rewrites programs by a rule.

    Args:
      rule: says what becomes of each equation. `Rule` names what one must have.

    >>> import jax.numpy as jnp
    >>> class Cosine(Rule):  # puts a cosine where a sine was, and copies all else
    ...     cosine = jax.make_jaxpr(jnp.cos)(1.0).eqns[0]
    ...     def contexts(self, outer, program):
    ...         return [outer] * len(program.eqns)
    ...     def equation(self, eqn, values, body, context):
    ...         if eqn.primitive.name == "sin":
    ...             eqn = eqn.replace(primitive=self.cosine.primitive, params=self.cosine.params)
    ...         return body.append(eqn, [v.atom for v in values], [*map(self.argument, map(float_dtype, eqn.outvars))])
    ...     def argument(self, dtype): return AbstractValue(dtype)
    ...     def literal(self, literal): return AbstractValue(float_dtype(literal))
    ...     def join(self, kinds): return kinds[0]
    ...     def accumulated(self, kind): return kind
    ...     def rewrites_custom_rule(self, eqn, context): return True
    ...     def rewrites_primal_only(self, eqn, context): return True
    >>> program = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) * 2))(1.0)
    >>> rewritten = Rewriter(Cosine()).rewrite(program, [AbstractValue(np.dtype("float32"))], None)
    >>> [eqn.primitive.name for eqn in rewritten.program.eqns[0].params["jaxpr"].eqns]
    ['cos', 'mul']
    """

    def __init__(self, rule: Rule):
        self.rule = rule

    def rewrite(
        self,
        program: Program,
        kinds: Sequence[AbstractValue],
        context: Context,
        out_dtypes: Sequence[np.dtype | None] | None = None,
    ) -> Rewritten:
        """Rewrites a program for arguments of the given kinds.

        Args:
          program: a `Jaxpr` or `ClosedJaxpr`.
          kinds: one for each of its arguments.
          context: the context of the equation that runs it.
          out_dtypes: the dtypes that its results must have; `None` where they may be what they become.

        Returns:
          The program and the kinds of its results. The same object for the same arguments, so that JAX, too, traces
          and compiles one body once.
        """
        wanted = None if out_dtypes is None else tuple(out_dtypes)
        key = (self.rule, tuple(kinds), context, wanted)
        found = self.rule.rewritten.setdefault(program, {})
        if key not in found:
            found[key] = self._rewrite(program, kinds, context, wanted)
        return found[key]

    def _rewrite(
        self,
        program: Program,
        kinds: Sequence[AbstractValue],
        context: Context,
        out_dtypes: tuple[np.dtype | None, ...] | None,
    ) -> Rewritten:
        old = body_of(program)
        rule, body = self.rule, JaxprBuilder()

        # What stands for each variable of the old program, first its arguments and the constants.
        arguments = [_make_argument(var, kind) for var, kind in zip(old.invars, kinds, strict=True)]
        environment: dict[Atom, Value] = dict(zip(old.invars, arguments, strict=True))
        for var in old.constvars:
            environment[var] = Value(var, rule.argument(float_dtype(var)))

        def read_atom(atom: Atom) -> Value:
            return Value(atom, rule.literal(atom)) if isinstance(atom, Literal) else environment[atom]

        # Then each equation in order, or several at once where the rule knows what they are together.
        done, contexts = 0, rule.contexts(context, old)
        for i, eqn in enumerate(old.eqns):
            if i < done:
                continue
            several = rule.fuse(old, i, read_atom, body, contexts)
            count, results = several or (1, self._write(eqn, [*map(read_atom, eqn.invars)], body, contexts[i]))
            done = i + count
            environment.update(zip(old.eqns[done - 1].outvars, results, strict=True))

        # Results leave in the dtypes that were asked for: a loop needs its carry back as it was.
        results = made = [read_atom(atom) for atom in old.outvars]
        if out_dtypes is not None:
            end = old.eqns[-1] if old.eqns else _NOWHERE
            results = [
                _cast_result(result, dtype, body, end) for result, dtype in zip(results, out_dtypes, strict=True)
            ]
        invars, outvars = [argument.atom for argument in arguments], [result.atom for result in results]
        new = replace_body(program, invars, body.equations, outvars)
        return Rewritten(new, tuple(result.kind for result in results), tuple(result.kind for result in made))

    def _write(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        write = WRITERS.get(eqn.primitive.name)
        results = None
        if write is not None:
            results = write(self, eqn, self.rule.cast_operands(eqn, values, body, context), body, context)
        return self.rule.equation(eqn, values, body, context) if results is None else results


with without_mesh():  # a user may import this file in one
    _NOWHERE = jax.make_jaxpr(lambda x: x + x)(1.0).eqns[0].replace(source_info=source_info_util.new_source_info())
"""An equation in whose place casts of results are written where a program has none."""


def _make_argument(var: Var, kind: AbstractValue) -> Value:
    aval: Any = var.aval
    if kind.dtype is None or aval.dtype == kind.dtype:
        return Value(var, kind)
    return Value(type(var)(aval.update(dtype=kind.dtype)), kind)


def _cast_result(value: Value, dtype: np.dtype | None, body: JaxprBuilder, eqn: JaxprEqn) -> Value:
    if dtype is None or value.kind.dtype is None or value.kind.dtype == dtype:
        return value
    return Value(body.cast(value.atom, dtype, eqn), value.kind._replace(dtype=dtype))
