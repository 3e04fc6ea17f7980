"""A program made ready to run a second time beside the first: nothing that is heard outside, and no derivatives."""

import weakref
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ._program import Program, body_of
from ._walk import walk

_HEARD = frozenset(("debug_callback", "debug_print"))
_REFERENCES = ("get", "swap", "addupdate", "ref_get", "ref_swap", "ref_addupdate")

_READY: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_ENTERED = ("jit", "closed_call", "remat2", "scan", "while", "cond", "shard_map")


def find_unrepeatable(program: Jaxpr) -> JaxprEqn | None:
    """Finds an equation that may not run twice, because it talks to the host or writes to memory.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from jax.experimental import io_callback
    >>> def fun(x):
    ...     return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    >>> find_unrepeatable(jax.make_jaxpr(fun)(jnp.ones(2)).jaxpr).primitive.name
    'io_callback'
    """
    steps = (step.eqn for step in walk(program) if step.name == step.eqn.primitive.name)
    return next((eqn for eqn in steps if eqn.primitive.name in ("io_callback", *_REFERENCES)), None)


def prepare_replay(program: Program) -> Program:
    """Makes a program that can run beside the one that it is of: without debug callbacks.

    Functions with derivatives of their own become ordinary ones, so that a rule or a recorder enters them.

    >>> import jax, jax.numpy as jnp
    >>> def fun(x):
    ...     jax.debug.print("{}", x)
    ...     return jax.nn.relu(x)
    >>> program = prepare_replay(jax.make_jaxpr(fun)(1.0))
    >>> [eqn.primitive.name for eqn in program.eqns], program.effects
    (['remat2'], set())
    """
    if program not in _READY:
        _READY[program] = _prepare(program)
    return _READY[program]


def _prepare(program: Program) -> Program:
    old = body_of(program)
    equations, silenced = [], set[Any]()
    for eqn in old.eqns:
        if eqn.primitive.name in _HEARD and not eqn.outvars:
            silenced |= eqn.effects
        else:
            equations.append(_prepare_equation(eqn))
            silenced |= eqn.effects - equations[-1].effects
    if all(new is eqn for new, eqn in zip(equations, old.eqns, strict=False)) and len(equations) == len(old.eqns):
        return program
    new = old.replace(eqns=equations, effects=old.effects - silenced, debug_info=old.debug_info)
    return program.replace(jaxpr=new) if old is not program else new


def _prepare_equation(eqn: JaxprEqn) -> JaxprEqn:
    name, params = eqn.primitive.name, eqn.params
    if name in _CUSTOM and not body_of(params["call_jaxpr"]).constvars:
        # As a remat that changes nothing: unlike a jitted function, that knows no mesh and no shardings.
        body = body_of(prepare_replay(params["call_jaxpr"]))
        return eqn.replace(primitive=_CALL.primitive, params={**_CALL.params, "jaxpr": body}, effects=body.effects)
    if name not in _ENTERED:
        return eqn
    changed, silenced = {}, set[Any]()
    for key, value in params.items():
        old = value if isinstance(value, tuple) else (value,)
        new = tuple(prepare_replay(item) if isinstance(item, Jaxpr | ClosedJaxpr) else item for item in old)
        if any(one is not other for one, other in zip(old, new, strict=True)):
            changed[key] = new if isinstance(value, tuple) else new[0]
            for one, other in zip(old, new, strict=True):
                silenced |= getattr(one, "effects", set()) - getattr(other, "effects", set())
    return eqn.replace(params={**params, **changed}, effects=eqn.effects - silenced) if changed else eqn


_CALL = jax.make_jaxpr(jax.checkpoint(lambda x: x + x, prevent_cse=False))(1.0).eqns[0]
