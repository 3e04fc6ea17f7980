"""From a function of trees to a program, and back: tracing, and running a program where its function was called."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from .._trees import is_array
from ._program import list_variables


class Traced(NamedTuple):
    """The program of a function for certain arguments.

    Attributes:
      program: it takes the array leaves of the arguments, in order.
      leaves: those leaves.
      out_tree: the structure of what the function returns.

    >>> traced = trace(lambda x, y: {"sum": x + y["a"]}, (1.0, {"a": 2.0}), {})
    >>> len(traced.leaves), traced.out_tree
    (0, PyTreeDef({'sum': *}))
    """

    program: ClosedJaxpr
    leaves: list[Any]
    out_tree: Any


def trace(fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Traced:
    """Traces a function for its arguments; leaves of them that are not arrays are constants.

    >>> trace(lambda x: jnp.sin(x) * 2, (jnp.ones(2),), {}).program.in_avals
    [ShapedArray(float32[2])]
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [is_array(leaf) for leaf in leaves]
    out_tree: Any = None

    def flat(*arrays: Any) -> list[Any]:
        nonlocal out_tree
        given = iter(arrays)
        merged = [next(given) if array else leaf for leaf, array in zip(leaves, dynamic, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, merged)
        out, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        return out

    arrays = [leaf for leaf, array in zip(leaves, dynamic, strict=True) if array]
    program = jax.make_jaxpr(flat)(*arrays)
    return Traced(program, arrays, out_tree)


def run(traced: Traced, program: ClosedJaxpr) -> Any:
    """Runs a program in the place of the one that was traced.

    >>> traced = trace(lambda x: {"twice": 2 * x}, (jnp.float32(3),), {})
    >>> float(run(traced, traced.program)["twice"])
    6.0
    """
    return jax.tree.unflatten(traced.out_tree, evaluate(program, *traced.leaves))


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
        last.update((atom, i) for atom in list_variables([*eqn.outvars, *eqn.invars]))
    for atom in list_variables(body.outvars):
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


def shared_call(eqn: JaxprEqn) -> dict[str, Any] | None:
    """The parameters of a jitted function that is this equation; `None` for one that had better stand for itself."""
    if _stands_for_itself(eqn) or jax.debug_nans.value or jax.debug_infs.value:  # those name the equation
        return None
    operands = tuple((atom.aval, _identity(atom, eqn.invars)) for atom in eqn.invars)
    results = tuple(var.aval for var in eqn.outvars)
    key = eqn.primitive, operands, results, tuple(eqn.params.items()), eqn.ctx
    try:
        found = _CALLS.get(key)
    except TypeError:  # a parameter that cannot be hashed
        return None
    if found is None:
        if len(_CALLS) >= _MOST_CALLS:
            _CALLS.clear()
        found = _CALLS[key] = _jit_params(_program(eqn))
    return found


_CALLS: dict[Any, dict[str, Any]] = {}
_MOST_CALLS = 1 << 14


def _stands_for_itself(eqn: JaxprEqn) -> bool:
    name, params = eqn.primitive.name, eqn.params
    # A jitted function runs where its arguments are, so it cannot move them.
    return bool(eqn.effects) or name == "device_put" or name.startswith("custom_") or _has_functions(params)


def _has_functions(params: dict[str, Any]) -> bool:
    """Whether there are programs or functions: those of a user may be new ones at each call, and would be kept."""
    return any(callable(value) for value in params.values()) or any(jaxprs_in_params(params))


def _identity(atom: Any, invars: Sequence[Any]) -> bytes | int:
    """The bits of a literal, for 0.0 equals -0.0; of a variable, which argument it is, for two may be the same one."""
    if isinstance(atom, Literal):
        return np.asarray(atom.val).tobytes()
    return next(i for i, other in enumerate(invars) if other is atom)


def variables_of(eqn: JaxprEqn) -> list[Any]:
    """What an equation reads, each variable once."""
    return list(dict.fromkeys(atom for atom in eqn.invars if not isinstance(atom, Literal)))


def _program(eqn: JaxprEqn) -> ClosedJaxpr:
    own = eqn.replace(source_info=source_info_util.new_source_info())
    nameless = DebugInfo("jit", eqn.primitive.name, None, None)
    return ClosedJaxpr(Jaxpr((), variables_of(eqn), eqn.outvars, [own], debug_info=nameless), ())


def _jit_params(program: ClosedJaxpr) -> dict[str, Any]:
    ins, outs = len(program.jaxpr.invars), len(program.jaxpr.outvars)
    inline = JIT.params["inline"]
    early = type(inline)["JAX_EARLY"] if isinstance(inline, enum.Enum) else True
    params = {**JIT.params, "jaxpr": program, "inline": early, "name": program.jaxpr.eqns[0].primitive.name}
    for name, count in {"in_shardings": ins, "in_layouts": ins, "donated_invars": ins}.items():
        params[name] = JIT.params[name] * count
    for name in ("out_shardings", "out_layouts"):
        params[name] = JIT.params[name] * outs
    return params


def _jitted() -> JaxprEqn:
    return jax.make_jaxpr(jax.jit(lambda x: x + x))(1.0).eqns[0]


JIT: Any = _jitted()
"""An equation that jit makes, of one argument and one result: the pattern of all others."""


def context_mesh() -> dict[str, Any]:
    """What a jitted function knows of the mesh that `jax.set_mesh` set: its devices are where it runs."""
    if jax.sharding.get_abstract_mesh().empty:
        return {}
    return {"ctx_mesh": _jitted().params["ctx_mesh"]}
