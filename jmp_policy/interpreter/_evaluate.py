"""Running a program, equation by equation, where its function was called."""

import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, jaxprs_in_params


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
    outer, mesh = source_info_util.current_name_stack(), _context_mesh()
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
    shared = _shared(eqn)
    if shared is not None:
        variables = dict.fromkeys(atom for atom in eqn.invars if not isinstance(atom, Literal))
        return _JIT.primitive.bind(*map(read, variables), **shared | mesh)
    results = eqn.primitive.bind(*map(read, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def _shared(eqn: JaxprEqn) -> dict[str, Any] | None:
    """The parameters of a jitted function that is this equation; `None` for one that had better stand for itself."""
    if eqn.effects or eqn.primitive.name.startswith("custom_") or any(jaxprs_in_params(eqn.params)):
        return None
    operands = tuple((atom.aval, _identity(atom, eqn.invars)) for atom in eqn.invars)
    key = eqn.primitive, operands, tuple(eqn.params.items()), eqn.ctx
    try:
        found = _SHARED.get(key)
    except TypeError:  # a parameter that cannot be hashed
        return None
    if found is None:
        found = _SHARED[key] = _jit_params(_program(eqn))
    return found


_SHARED: dict[Any, dict[str, Any]] = {}


def _identity(atom: Any, invars: Sequence[Any]) -> bytes | int:
    """The bits of a literal, for 0.0 equals -0.0; of a variable, which argument it is, for two may be the same one."""
    if isinstance(atom, Literal):
        return np.asarray(atom.val).tobytes()
    return next(i for i, other in enumerate(invars) if other is atom)


def _program(eqn: JaxprEqn) -> ClosedJaxpr:
    invars = dict.fromkeys(atom for atom in eqn.invars if not isinstance(atom, Literal))
    own = eqn.replace(source_info=source_info_util.new_source_info())
    nameless = DebugInfo("jit", eqn.primitive.name, None, None)
    return ClosedJaxpr(Jaxpr((), list(invars), eqn.outvars, [own], debug_info=nameless), ())


def _jit_params(program: ClosedJaxpr) -> dict[str, Any]:
    ins, outs = len(program.jaxpr.invars), len(program.jaxpr.outvars)
    inline = _JIT.params["inline"]
    early = type(inline)["JAX_EARLY"] if isinstance(inline, enum.Enum) else True
    params = {**_JIT.params, "jaxpr": program, "inline": early, "name": program.jaxpr.eqns[0].primitive.name}
    for name, count in {"in_shardings": ins, "in_layouts": ins, "donated_invars": ins}.items():
        params[name] = _JIT.params[name] * count
    for name in ("out_shardings", "out_layouts"):
        params[name] = _JIT.params[name] * outs
    return params


def _jitted() -> JaxprEqn:
    return jax.make_jaxpr(jax.jit(lambda x: x + x))(1.0).eqns[0]


_JIT: Any = _jitted()
"""An equation that jit makes, of one argument and one result: the pattern of all others."""


def _context_mesh() -> dict[str, Any]:
    """What a jitted function knows of the mesh that `jax.set_mesh` set: its devices are where it runs."""
    if jax.sharding.get_abstract_mesh().empty:
        return {}
    return {"ctx_mesh": _jitted().params["ctx_mesh"]}
