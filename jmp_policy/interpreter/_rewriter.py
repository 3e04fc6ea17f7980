"""The one place that walks a program: a rule says what becomes of each equation, bodies are rewritten in turn."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from ._body import Body
from ._control_flow import CONTROL_FLOW
from ._custom_rules import custom_jvp, custom_vjp
from ._jaxpr import Program, with_body
from ._kind import Kind, Value, float_dtype
from ._rule import Context, Rule


class Rewritten(NamedTuple):
    """A program that was rewritten.

    Attributes:
      program: it.
      kinds: those of its results.
      made: what the kinds of its results were before they were cast to the dtypes that were asked for.
    """

    program: Program
    kinds: tuple[Kind, ...]
    made: tuple[Kind, ...]


class Rewriter:
    """Rewrites programs by a rule."""

    def __init__(self, rule: Rule):
        self.rule = rule

    def rewrite(
        self,
        program: Program,
        kinds: Sequence[Kind],
        context: Context,
        out_dtypes: Sequence[np.dtype | None] | None = None,
    ) -> Rewritten:
        """Rewrites a program for arguments of the given kinds.

        Args:
          program: a `Jaxpr` or `ClosedJaxpr`.
          kinds: one for each of its arguments.
          context: that of the equation it belongs to.
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
        self, program: Program, kinds: Sequence[Kind], context: Context, out_dtypes: tuple[np.dtype | None, ...] | None
    ) -> Rewritten:
        old = program.jaxpr if isinstance(program, ClosedJaxpr) else program
        rule, body = self.rule, Body()
        arguments = [_argument(var, kind) for var, kind in zip(old.invars, kinds, strict=True)]
        environment: dict[Any, Value] = dict(zip(old.invars, arguments, strict=True))
        for var in old.constvars:
            environment[var] = Value(var, rule.argument(float_dtype(var)))

        def read(atom: Any) -> Value:
            return Value(atom, rule.literal(atom)) if isinstance(atom, Literal) else environment[atom]

        done, places = 0, rule.contexts(context, old)
        for i, eqn in enumerate(old.eqns):
            if i < done:
                continue
            several = rule.together(old, i, read, body, places)
            count, results = several or (1, self._write(eqn, [read(atom) for atom in eqn.invars], body, places[i]))
            done = i + count
            environment.update(zip(old.eqns[done - 1].outvars, results, strict=True))

        results = made = [read(atom) for atom in old.outvars]
        if out_dtypes is not None:
            end = _end_of(old)
            results = [_in(result, dtype, body, end) for result, dtype in zip(results, out_dtypes, strict=True)]
        invars, outvars = [argument.atom for argument in arguments], [result.atom for result in results]
        new = with_body(program, invars, body.equations, outvars)
        return Rewritten(new, tuple(result.kind for result in results), tuple(result.kind for result in made))

    def _write(self, eqn: JaxprEqn, values: list[Value], body: Body, place: Context) -> list[Value]:
        write = WRITERS.get(eqn.primitive.name)
        results = None
        if write is not None:
            results = write(self, eqn, self.rule.entering(eqn, values, body, place), body, place)
        return self.rule.equation(eqn, values, body, place) if results is None else results


WRITERS = CONTROL_FLOW | {"custom_jvp_call": custom_jvp, "custom_vjp_call": custom_vjp}


def _end_of(body: Any) -> JaxprEqn:
    """An equation in whose place casts of results are written; a body may have none."""
    return body.eqns[-1] if body.eqns else _NOWHERE


_NOWHERE = jax.make_jaxpr(lambda x: x + x)(1.0).eqns[0].replace(source_info=source_info_util.new_source_info())


def _argument(var: Any, kind: Kind) -> Value:
    if kind.dtype is None or var.aval.dtype == kind.dtype:
        return Value(var, kind)
    return Value(type(var)(var.aval.update(dtype=kind.dtype)), kind)


def _in(value: Value, dtype: np.dtype | None, body: Body, eqn: JaxprEqn) -> Value:
    if dtype is None or value.kind.dtype is None or value.kind.dtype == dtype:
        return value
    return Value(body.cast(value.atom, dtype, eqn), value.kind._replace(dtype=dtype))
