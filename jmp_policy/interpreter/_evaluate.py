"""Running a program, equation by equation, where its function was called."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ._shared import JIT, context_mesh, shared_call, variables_of


def evaluate(program: ClosedJaxpr, *args: Any) -> list[Any]:
    """Runs a program on its arguments; the equations keep their names and source lines.

    Each goes in as a jitted function that is inlined, and equal equations as the same one, as the functions of
    jax.numpy do: what JAX derives of it, its derivative above all, is then found in JAX's caches. Bound one by one
    instead, differentiating the program takes two to three times as long as differentiating the original function.
    """
    body = program.jaxpr
    environment: dict[Any, Any] = dict(zip(body.constvars, program.consts, strict=True))
    environment.update(zip(body.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else environment[atom]

    last_use = _last_uses(body)
    outer, mesh = source_info_util.current_name_stack(), context_mesh()
    for i, eqn in enumerate(body.eqns):
        source = eqn.source_info
        with source_info_util.user_context(source.traceback, name_stack=outer + source.name_stack), eqn.ctx.manager:
            results = _bind(eqn, read, mesh)
        environment.update(zip(eqn.outvars, results, strict=True))
        for var in last_use.get(i, ()):
            del environment[var]
    return [_constant(atom) if isinstance(atom, Literal) else environment[atom] for atom in body.outvars]


def _constant(literal: Any) -> jax.Array:
    """A result that is a number in the program, as the array that it is to JAX."""
    return jnp.asarray(literal.val, literal.aval.dtype)


def _last_uses(body: Jaxpr) -> dict[int, list[Any]]:
    """Which values are done with after which equation: eagerly, their memory can go."""
    last: dict[Any, int] = {}
    for i, eqn in enumerate(body.eqns):
        last.update((atom, i) for atom in (*eqn.outvars, *eqn.invars) if not isinstance(atom, Literal))
    for atom in body.outvars:
        if not isinstance(atom, Literal):
            last.pop(atom, None)
    done: dict[int, list[Any]] = {}
    for var, i in last.items():
        done.setdefault(i, []).append(var)
    return done


def _bind(eqn: JaxprEqn, read: Any, mesh: dict[str, Any]) -> list[Any]:
    shared = shared_call(eqn)
    if shared is not None:
        return JIT.primitive.bind(*map(read, variables_of(eqn)), **shared | mesh)
    results = eqn.primitive.bind(*map(read, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]
