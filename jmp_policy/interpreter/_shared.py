"""An equation as a jitted function that is inlined, and equal equations as the same one."""

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, jaxprs_in_params


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
