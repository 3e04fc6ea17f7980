"""The one place that goes through a program: a rule says what becomes of each equation, body by body."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var

from ._control_flow import CONTROL_FLOW
from ._custom_rules import write_custom_jvp, write_custom_vjp
from ._program import Atom, Program, body_of, float_dtype, replace_body, without_mesh
from ._rule import Body, Context, Kind, Rewritten, Rule, Value

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
    ...         return body.append(eqn, [v.atom for v in values], [Kind(float_dtype(var)) for var in eqn.outvars])
    ...     def argument(self, dtype): return Kind(dtype)
    ...     def literal(self, literal): return Kind(float_dtype(literal))
    ...     def join(self, kinds): return kinds[0]
    ...     def accumulated(self, kind): return kind
    ...     def opens(self, eqn, context): return True
    ...     def opens_inside(self, eqn, context): return True
    >>> program = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) * 2))(1.0)
    >>> rewritten = Rewriter(Cosine()).rewrite(program, [Kind(np.dtype("float32"))], None)
    >>> [eqn.primitive.name for eqn in rewritten.program.eqns[0].params["jaxpr"].eqns]
    ['cos', 'mul']
    """

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
        self, program: Program, kinds: Sequence[Kind], context: Context, out_dtypes: tuple[np.dtype | None, ...] | None
    ) -> Rewritten:
        old = body_of(program)
        rule, body = self.rule, Body()

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
            several = rule.together(old, i, read_atom, body, contexts)
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

    def _write(self, eqn: JaxprEqn, values: list[Value], body: Body, context: Context) -> list[Value]:
        write = WRITERS.get(eqn.primitive.name)
        results = None
        if write is not None:
            results = write(self, eqn, self.rule.entering(eqn, values, body, context), body, context)
        return self.rule.equation(eqn, values, body, context) if results is None else results


with without_mesh():  # a user may import this file in one
    _NOWHERE = jax.make_jaxpr(lambda x: x + x)(1.0).eqns[0].replace(source_info=source_info_util.new_source_info())
"""An equation in whose place casts of results are written where a program has none."""


def _make_argument(var: Var, kind: Kind) -> Value:
    aval: Any = var.aval
    if kind.dtype is None or aval.dtype == kind.dtype:
        return Value(var, kind)
    return Value(type(var)(aval.update(dtype=kind.dtype)), kind)


def _cast_result(value: Value, dtype: np.dtype | None, body: Body, eqn: JaxprEqn) -> Value:
    if dtype is None or value.kind.dtype is None or value.kind.dtype == dtype:
        return value
    return Value(body.cast(value.atom, dtype, eqn), value.kind._replace(dtype=dtype))
