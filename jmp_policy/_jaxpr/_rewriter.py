"""Rewrites a jaxpr by a rule for each equation."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import DebugInfo, Jaxpr, JaxprEqn, Literal, Var

from ._primitives import CALLED
from ._program import (
    AbstractValue,
    Atom,
    JaxprBuilder,
    Program,
    Value,
    body_of,
    change_dtype,
    float_dtype,
    list_variables,
    replace_variables,
    scan_parts,
    without_mesh,
)

Context = Any
"""A rule's description of the place of an equation; hashable."""


_REWRITTEN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Rule(abc.ABC):
    """Decides how each equation is rewritten. Rules are hashable, and equal rules share rewritten jaxprs."""

    # The rewritten jaxprs by original jaxpr. A rule that refers to objects that must be freed before the jaxprs needs
    # a mapping of its own.
    rewritten: MutableMapping[Any, dict[Any, Any]] = _REWRITTEN

    fusing: frozenset[str] = frozenset()  # the primitives at which `fuse` may begin

    @abc.abstractmethod
    def contexts(self, outer: Context, program: Jaxpr) -> Sequence[Context]:
        """Returns the context of each equation of a jaxpr that is run by an equation with the context `outer`."""

    @abc.abstractmethod
    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        """Writes an equation that has no sub-jaxpr, and returns its outputs."""

    def fuse(
        self, program: Jaxpr, start: int, read: Callable[[Atom], Value], body: JaxprBuilder, contexts: Sequence[Context]
    ) -> tuple[int, list[Value]] | None:
        """Writes the equations from number `start` on as one equation, if the rule has one for them.

        `read` returns the new value of an atom of `program`. Returns the number of equations and the outputs of the
        last one. No later equation may use another output of them.
        """
        return None

    def cast_operands(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        """Returns the operands of an equation with sub-jaxprs, or casts of them."""
        return values

    def argument(self, dtype: np.dtype | None) -> AbstractValue:
        """Returns the kind of an argument or constant in the dtype that it was traced in."""
        return AbstractValue(dtype)

    def of_derivative(self, kind: AbstractValue, dtype: np.dtype | None) -> AbstractValue:
        """Returns the kind of an argument of a custom derivative, traced in `dtype`; in the function it is `kind`."""
        return self.argument(dtype)

    def literal(self, literal: Literal) -> AbstractValue:
        """Returns the kind of a literal."""
        return AbstractValue(float_dtype(literal))

    @abc.abstractmethod
    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        """Returns the kind of a value that may have any of some kinds: of several branches, or around a loop."""

    def carried(self, kind: AbstractValue, dtype: np.dtype | None) -> AbstractValue:
        """Returns the kind in which a loop that was traced with a `dtype` carries an initial value of a kind."""
        return kind

    def stacked(self, eqn: JaxprEqn, kinds: Sequence[AbstractValue], context: Context) -> Sequence[AbstractValue]:
        """Returns the kinds in which a scan stacks its outputs, given those that its sub-jaxpr computes."""
        return kinds

    def rewrites_custom_rule(self, eqn: JaxprEqn, context: Context) -> bool:
        """True if a custom-derivative function and its derivative are both rewritten."""
        return False

    def rewrites_primal_only(self, eqn: JaxprEqn, context: Context) -> bool:
        """True if a custom-derivative function is rewritten, but not its derivative."""
        return False


class Rewritten(NamedTuple):
    program: Any  # the new jaxpr, of the class of the old one
    kinds: tuple[AbstractValue, ...]  # the kinds of its outputs
    made: tuple[AbstractValue, ...]  # the kinds of its outputs before the casts to the requested dtypes


class Rewriter:
    def __init__(self, rule: Rule):
        self.rule = rule

    def rewrite(
        self,
        program: Program,
        kinds: Sequence[AbstractValue],
        context: Context,
        out_dtypes: Sequence[np.dtype | None] | None = None,
    ) -> Rewritten:
        """Rewrites a jaxpr for arguments of some kinds; equal arguments give the same jaxpr, which JAX traces once."""
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
        old, rule, body = body_of(program), self.rule, JaxprBuilder()
        arguments = [change_dtype(var, kind) for var, kind in zip(old.invars, kinds, strict=True)]
        environment: dict[Atom, Value] = dict(zip(old.invars, arguments, strict=True))
        for var in old.constvars:
            environment[var] = Value(var, rule.argument(float_dtype(var)))

        def read_atom(atom: Atom) -> Value:
            return Value(atom, rule.literal(atom)) if isinstance(atom, Literal) else environment[atom]

        done, contexts = 0, rule.contexts(context, old)
        for i, eqn in enumerate(old.eqns):
            if i < done:
                continue
            fused = self._fuse(old, i, read_atom, body, contexts) if eqn.primitive.name in rule.fusing else None
            if fused is None:
                values = [read_atom(atom) if type(atom) is Literal else environment[atom] for atom in eqn.invars]
                results = self._write(eqn, values, body, contexts[i])
            else:
                count, results = fused
                done = i + count
                eqn = old.eqns[done - 1]
            for var, result in zip(eqn.outvars, results, strict=True):
                environment[var] = result

        results = made = [read_atom(atom) for atom in old.outvars]
        if out_dtypes is not None:
            end = old.eqns[-1] if old.eqns else _NOWHERE
            results = [_cast_result(value, to, body, end) for value, to in zip(results, out_dtypes, strict=True)]
        invars, outvars = [argument.atom for argument in arguments], [result.atom for result in results]
        new = replace_variables(program, invars, body.equations, outvars, old.debug_info)
        return Rewritten(new, tuple(result.kind for result in results), tuple(result.kind for result in made))

    def _fuse(
        self, program: Jaxpr, start: int, read: Callable[[Atom], Value], body: JaxprBuilder, contexts: Sequence[Context]
    ) -> tuple[int, list[Value]] | None:
        return self.rule.fuse(program, start, read, body, contexts)

    def _write(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        results = None
        if eqn.primitive.name in WRITERS:
            operands = self.rule.cast_operands(eqn, values, body, context)
            results = WRITERS[eqn.primitive.name](self, eqn, operands, body, context)
        return self.rule.equation(eqn, values, body, context) if results is None else results

    def _write_call(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        parameter = CALLED[eqn.primitive.name]
        inner = self.rewrite(eqn.params[parameter], [value.kind for value in values], context)
        return body.append(eqn, [value.atom for value in values], inner.kinds, {**eqn.params, parameter: inner.program})

    def _write_scan(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        program, (consts, carried) = eqn.params["jaxpr"], scan_parts(eqn)
        carry = slice(consts, consts + carried)
        kinds, inner = self._settle_carry(program, [value.kind for value in values], carry, context)
        stacked = tuple(self.rule.stacked(eqn, inner.kinds[carried:], context))
        results = (*kinds[carry], *stacked)
        if stacked != inner.kinds[carried:]:
            inner = self.rewrite(program, kinds, context, _list_dtypes(results))
        return body.append(eqn, body.cast_values(values, kinds, eqn), results, {**eqn.params, "jaxpr": inner.program})

    def _write_while(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        params, program = eqn.params, eqn.params["body_jaxpr"]
        first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        kinds = [value.kind for value in values]
        kinds[first:], inner = self._settle_carry(program, kinds[first:], slice(start - first, None), context)
        test = self.rewrite(params["cond_jaxpr"], [*kinds[:first], *kinds[start:]], context)
        changed = {**params, "body_jaxpr": inner.program, "cond_jaxpr": test.program}
        return body.append(eqn, body.cast_values(values, kinds, eqn), kinds[start:], changed)

    def _settle_carry(
        self, program: Program, kinds: list[AbstractValue], carry: slice, context: Context
    ) -> tuple[list[AbstractValue], Rewritten]:
        """Rewrites one iteration of a loop for kinds of the carry that it returns unchanged; returns all kinds."""
        rule, body = self.rule, body_of(program)
        pairs = zip(kinds[carry], body.invars[carry], strict=True)
        carried = [rule.carried(kind, float_dtype(var)) for kind, var in pairs]
        others = [None] * (len(body.outvars) - len(carried))  # a scan stacks these
        while True:
            kinds[carry] = carried
            inner = self.rewrite(program, kinds, context, [*_list_dtypes(carried), *others])
            carried = [rule.join(pair) for pair in zip(carried, inner.made, strict=False)]
            if carried == kinds[carry]:
                return kinds, inner

    def _write_cond(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        branches, kinds = eqn.params["branches"], [value.kind for value in values[1:]]
        # Each branch on its own shows the kinds of its outputs. Then all of them return the joined kinds.
        taken = [self.rewrite(branch, kinds, context).kinds for branch in branches]
        joined = [self.rule.join(kinds) for kinds in zip(*taken, strict=True)]
        inner = [self.rewrite(branch, kinds, context, _list_dtypes(joined)).program for branch in branches]
        return body.append(eqn, [value.atom for value in values], joined, {**eqn.params, "branches": tuple(inner)})

    def _write_custom_jvp(
        self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context
    ) -> list[Value] | None:
        params, traced = eqn.params, eqn.params["jvp_jaxpr_fun"]
        kinds = [value.kind for value in values]
        primals = kinds[params["num_consts"] :]
        if self.rule.rewrites_custom_rule(eqn, context):
            inner = self.rewrite(params["call_jaxpr"], kinds, context)
            call = functools.partial(self._rewrite_jvp, context, traced, primals, inner.kinds)
            changed = {**params, "call_jaxpr": inner.program, "jvp_jaxpr_fun": _Derivative(traced, call)}
            return body.append(eqn, [value.atom for value in values], inner.kinds, changed)
        call = functools.partial(self._rewrite_primal_of_jvp, context, traced, primals)
        return self._write_primal(eqn, values, body, context, {"jvp_jaxpr_fun": _Derivative(traced, call)})

    def _write_custom_vjp(
        self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context
    ) -> list[Value] | None:
        traced = eqn.params["fwd_jaxpr_thunk"]

        def call_forward(*nonzeros: bool) -> tuple[Any, Any]:
            program, consts = traced.call_wrapped(*nonzeros)
            return self._rewrite_as_traced(program, context, [value.kind for value in values]), consts

        changed = {"fwd_jaxpr_thunk": _Derivative(traced, call_forward)}
        return self._write_primal(eqn, values, body, context, changed)

    def _write_primal(
        self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context, changed: dict[str, Any]
    ) -> list[Value] | None:
        """Rewrites a custom-derivative function. Inputs and outputs keep the dtypes of its derivative."""
        if not self.rule.rewrites_primal_only(eqn, context):
            return None
        kinds = [value.kind._replace(dtype=float_dtype(atom)) for value, atom in zip(values, eqn.invars, strict=True)]
        atoms = body.cast_values(values, kinds, eqn)
        inner = self.rewrite(eqn.params["call_jaxpr"], kinds, context, [float_dtype(var) for var in eqn.outvars])
        return body.append(eqn, atoms, inner.kinds, {**eqn.params, "call_jaxpr": inner.program, **changed})

    def _rewrite_jvp(
        self, context: Context, traced: Any, kinds: Sequence[AbstractValue], made: Sequence[AbstractValue], *zeros: bool
    ) -> tuple[Any, Any, Any]:
        """Rewrites a JVP rule for inputs and outputs of other kinds. A nonzero tangent has the kind of its primal."""
        program, consts, out_zeros = traced.call_wrapped(*zeros)
        tangents = [kind for kind, zero in zip(kinds, zeros, strict=True) if not zero]
        wanted = [kind.dtype for kind in made]
        wanted += [kind.dtype for kind, zero in zip(made, out_zeros, strict=True) if not zero]
        # From JAX 0.11 on, constants are leading arguments.
        detached = program.invars[: len(consts)] if not program.constvars else []
        detached_kinds = [self.rule.argument(float_dtype(var)) for var in detached]
        return self.rewrite(program, [*detached_kinds, *kinds, *tangents], context, wanted).program, consts, out_zeros

    def _rewrite_primal_of_jvp(
        self, context: Context, traced: Any, kinds: Sequence[AbstractValue], *zeros: bool
    ) -> tuple[Any, Any, Any]:
        """Rewrites the equations of a JVP rule that do not depend on a tangent."""
        program, consts, out_zeros = traced.call_wrapped(*zeros)
        tangents = program.invars[len(program.invars) - zeros.count(False) :]
        primals, linear = _split_dependent(program, tangents)
        new = self._rewrite_as_traced(primals, context, kinds, len(tangents))
        return _append_equations(new, primals.outvars, linear, program), consts, out_zeros

    def _rewrite_as_traced(
        self, program: Jaxpr, context: Context, primals: Sequence[AbstractValue], tangents: int = 0
    ) -> Any:
        """Rewrites a jaxpr whose inputs and outputs keep their dtypes; `primals` are the kinds before the tangents."""
        kinds = [self.rule.argument(float_dtype(var)) for var in program.invars]
        start = len(kinds) - tangents - len(primals)
        for i, primal in enumerate(primals, start):
            kinds[i] = self.rule.of_derivative(primal, kinds[i].dtype)
        return self.rewrite(program, kinds, context, [float_dtype(atom) for atom in program.outvars]).program


with without_mesh():  # a user may import this file inside a mesh
    _NOWHERE = jax.make_jaxpr(lambda x: x + x)(1.0).eqns[0].replace(source_info=source_info_util.new_source_info())
"""Gives casts of outputs their source line in a jaxpr without equations."""


def _cast_result(value: Value, dtype: np.dtype | None, body: JaxprBuilder, eqn: JaxprEqn) -> Value:
    if dtype is None or value.kind.dtype is None or value.kind.dtype == dtype:
        return value
    return Value(body.cast(value.atom, dtype, eqn), value.kind._replace(dtype=dtype))


def _list_dtypes(kinds: Sequence[AbstractValue]) -> list[np.dtype | None]:
    return [kind.dtype for kind in kinds]


class _Derivative:
    """Stands in for a traced derivative, the object that JAX keeps in the parameters of a custom rule."""

    def __init__(self, traced: Any, call_wrapped: Callable[..., Any]):
        self.debug_info, self.call_wrapped = traced.debug_info, call_wrapped


def _split_dependent(program: Jaxpr, variables: Sequence[Var]) -> tuple[Jaxpr, list[JaxprEqn]]:
    """Splits off the equations that depend on `variables`. The remaining jaxpr returns the values they read."""
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
    """Appends equations that read the outputs of `first` as `outvars`, with the inputs and outputs of `whole`."""
    made = dict(zip(outvars, first.outvars, strict=True))

    def rename(atoms: Sequence[Atom]) -> list[Atom]:
        return [atom if isinstance(atom, Literal) else made.get(atom, atom) for atom in atoms]

    rest = [eqn.replace(invars=rename(eqn.invars)) for eqn in equations]
    return whole.replace(eqns=[*first.eqns, *rest], outvars=rename(whole.outvars), debug_info=whole.debug_info)


WRITERS: Mapping[str, Callable[..., list[Value] | None]] = {
    **dict.fromkeys(CALLED, Rewriter._write_call),
    "scan": Rewriter._write_scan,
    "while": Rewriter._write_while,
    "cond": Rewriter._write_cond,
    "custom_jvp_call": Rewriter._write_custom_jvp,
    "custom_vjp_call": Rewriter._write_custom_vjp,
}
"""How each equation with sub-jaxprs is written. A writer that returns None leaves the equation to the rule."""
