"""A program made ready to run a second time beside the first: nothing that is heard outside, and no derivatives."""

import functools
import weakref
from collections.abc import Container
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ._program import Program, body_of, is_float, replace_variables
from ._walk import walk

_HEARD = frozenset(("debug_callback", "debug_print"))
_REFERENCES = ("get", "swap", "addupdate", "ref_get", "ref_swap", "ref_addupdate")

_READY: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_ENTERED = ("jit", "closed_call", "eval_jaxpr", "remat2", "scan", "while", "cond", "shard_map")


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

    Functions with derivatives of their own become ordinary ones, so that a rule or a recorder enters them, and a choice
    among several values is made of each of them apart, so that what was not chosen does not count.

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
    made_of_numbers = [eqn for eqn in old.eqns if all(isinstance(atom, Literal) for atom in eqn.invars)]
    constants = {var for eqn in made_of_numbers for var in eqn.outvars}
    for eqn in old.eqns:
        if eqn.primitive.name in _HEARD and not eqn.outvars:
            silenced |= eqn.effects
        elif _chooses(eqn, constants):
            equations.append(_call(eqn, _make_choice_apart(*[atom.aval for atom in (*eqn.outvars, *eqn.invars)])))
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
        return _call(eqn, body_of(prepare_replay(params["call_jaxpr"])))
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


def _call(eqn: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    """An equation that runs a body: a remat, which changes nothing; a jitted function would know of meshes."""
    return eqn.replace(primitive=_CALL.primitive, params={**_CALL.params, "jaxpr": body}, effects=body.effects)


def _chooses(eqn: JaxprEqn, constants: Container[Any]) -> bool:
    """Whether an equation chooses among floating values of which two or more are computed."""
    if eqn.primitive.name != "select_n" or not is_float(eqn.outvars[0]):
        return False
    return sum(not isinstance(case, Literal) and case not in constants for case in eqn.invars[1:]) > 1


@functools.lru_cache(maxsize=1024)
def _make_choice_apart(result: Any, *operands: Any) -> Jaxpr:
    """Makes the same choice in two steps: first each case, with zeros where it is not chosen.

    An infinity that is not chosen is gone after the first step, and cannot be mistaken for one that was.

    Args:
      result: the type of the result.
      operands: the types of the operands.
    """

    def select_apart(which: jax.Array, *cases: jax.Array) -> jax.Array:
        zeros = lax.convert_element_type(lax.lt(cases[0], cases[0]), cases[0].dtype)
        parts = [
            lax.select_n(which, *(case if j == i else zeros for j in range(len(cases)))) for i, case in enumerate(cases)
        ]
        return lax.select_n(which, *parts)

    # Traced without a mesh and then given types: all values but `which` have the shape and sharding of the result.
    traced = jax.make_jaxpr(select_apart)(*[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in operands]).jaxpr
    typed: dict[Any, Any] = dict(zip(traced.invars, map(Var, operands), strict=True))
    equations = []
    for eqn in traced.eqns:
        typed |= {var: Var(result.update(dtype=var.aval.dtype)) for var in eqn.outvars}  # type: ignore[attr-defined]
        invars, outvars = ([typed[var] for var in variables] for variables in (eqn.invars, eqn.outvars))
        equations.append(eqn.replace(invars=invars, outvars=outvars))
    invars, outvars = ([typed[var] for var in variables] for variables in (traced.invars, traced.outvars))
    return body_of(replace_variables(traced, invars, equations, outvars))


_CALL = jax.make_jaxpr(jax.checkpoint(lambda x: x + x, prevent_cse=False))(1.0).eqns[0]
