"""Runs of arithmetic on half-precision values in float32, as norms by hand have them: what is kept of them is half.

An operation that multiplies keeps its operands for the backward pass. One that is cast to float32 for it alone is twice
as large as what it was cast from, and the next operation keeps the product. A run that is computed again keeps what it
reads.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import DebugInfo, Jaxpr, JaxprEqn, Literal, Var

from ..interpreter import Body, Value

KEEPING = frozenset(("mul", "div", "square", "integer_pow"))
"""What keeps its operands; as cheap to compute again as to read."""

_PASSING = KEEPING | {"add", "sub", "neg", "broadcast_in_dim"}
_LONGEST = 8

_LAST_USES: weakref.WeakKeyDictionary[Jaxpr, dict[Any, int]] = weakref.WeakKeyDictionary()


def length_of_run(program: Jaxpr, start: int, contexts: Sequence[Any]) -> int:
    """How many equations, from one on, are arithmetic in one place, of which the last result alone is used later."""
    last_uses, length = _last_uses(program), 1
    for end in range(start + 1, min(start + _LONGEST, len(program.eqns))):
        if program.eqns[end].primitive.name not in _PASSING or contexts[end] != contexts[start]:
            break
        inside = [var for eqn in program.eqns[start:end] for var in eqn.outvars]
        if all(last_uses.get(var, end) <= end for var in inside):
            length = end + 1 - start
    return length


def write_again(
    eqns: Sequence[JaxprEqn],
    read: Callable[[Any], Value],
    body: Body,
    write: Callable[[JaxprEqn, list[Value], Body], list[Value]],
) -> list[Value]:
    """Writes equations as one that is computed again in the backward pass, and returns the results of the last.

    Args:
      eqns: the equations.
      read: what stands for the values that they read.
      body: where the one goes.
      write: writes one of them.
    """
    made = {var for eqn in eqns for var in eqn.outvars}
    atoms = dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, Literal))
    outer = {atom: read(atom) for atom in atoms if atom not in made}
    inner = {atom: Value(Var(value.atom.aval), value.kind) for atom, value in outer.items()}
    environment, again, results = dict(inner), Body(), []
    for eqn in eqns:
        values = [read(atom) if isinstance(atom, Literal) else environment[atom] for atom in eqn.invars]
        results = write(eqn, values, again)
        environment.update(zip(eqn.outvars, results, strict=True))
    call = _call(eqns[-1], [value.atom for value in inner.values()], again, [value.atom for value in results])
    return body.append(call, [value.atom for value in outer.values()], [value.kind for value in results], call.params)


def _call(last: JaxprEqn, invars: list[Any], body: Body, outvars: list[Any]) -> JaxprEqn:
    """An equation that computes a body again in the backward pass, in the place of the last that it was written for."""
    program = Jaxpr((), invars, outvars, body.equations, debug_info=DebugInfo("checkpoint", "autocast", None, None))
    pattern = _pattern()
    params = {**pattern.params, "jaxpr": program}
    return pattern.replace(
        invars=invars, outvars=last.outvars, params=params, source_info=last.source_info, ctx=last.ctx
    )


def _last_uses(program: Jaxpr) -> dict[Any, int]:
    """The number of the last equation that reads each value; what the program returns is read after all of them."""
    if program not in _LAST_USES:
        reads = [(atom, i) for i, eqn in enumerate(program.eqns) for atom in eqn.invars]
        reads += [(atom, len(program.eqns)) for atom in program.outvars]
        _LAST_USES[program] = {atom: i for atom, i in reads if not isinstance(atom, Literal)}
    return _LAST_USES[program]


@functools.cache
def _pattern() -> JaxprEqn:
    """An equation that is computed again in the backward pass, as JAX would trace it."""
    return jax.make_jaxpr(jax.checkpoint(lambda x: x * x, prevent_cse=False))(1.0).eqns[0]
