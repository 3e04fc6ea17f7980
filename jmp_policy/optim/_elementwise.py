"""Checks from its jaxpr that an optimizer is elementwise."""

import math
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._jaxpr import Fact, find_calling_line, having, shape_of, sub_jaxprs

_ELEMENTWISE = having(Fact.ELEMENTWISE)


def find_mixing(program: Jaxpr) -> tuple[JaxprEqn, ...]:
    """Finds the first equation that is not elementwise, after the equations that call it; empty if there is none.

    An elementwise jaxpr gives the same results on parts of its arrays.

    >>> import jax, jax.numpy as jnp
    >>> find_mixing(jax.make_jaxpr(lambda m, g: jnp.where(g > 0, 0.9 * m + g, m))(jnp.ones(3), jnp.ones(3)).jaxpr)
    ()
    >>> [eqn.primitive.name for eqn in find_mixing(jax.make_jaxpr(jnp.linalg.norm)(jnp.ones(3)).jaxpr)]
    ['jit', 'reduce_sum']
    """
    for eqn in program.eqns:
        if all(map(_is_scalar, (*eqn.invars, *eqn.outvars))):
            continue
        bodies = sub_jaxprs(eqn)
        if bodies:
            found = next(filter(None, (find_mixing(body.program) for body in bodies)), ())
            if found or not _keeps_places(eqn):
                return eqn, *found
        elif not _is_elementwise(eqn):
            return (eqn,)
    return ()


def find_constants(program: Jaxpr) -> list[float | None]:
    """Returns for each output the constant that fills it, or None if the jaxpr does not tell.

    >>> import jax, jax.numpy as jnp
    >>> find_constants(jax.make_jaxpr(lambda x: (x, jnp.zeros_like(x), jnp.full(3, 0.5)))(jnp.ones(2)).jaxpr)
    [None, 0.0, 0.5]
    """
    filled = [eqn for eqn in program.eqns if eqn.primitive.name == "broadcast_in_dim"]
    numbers = [(eqn.outvars[0], eqn.invars[0]) for eqn in filled]
    constants = {var: float(x.val) for var, x in numbers if isinstance(x, Literal) and np.ndim(x.val) == 0}
    return [constants.get(var) if isinstance(var, Var) else None for var in program.outvars]


def describe_mixing(eqns: tuple[JaxprEqn, ...]) -> str:
    """Returns the op that `find_mixing` found, with its line in a library or the user's code.

    >>> import jax, jax.numpy as jnp
    >>> describe_mixing(find_mixing(jax.make_jaxpr(jnp.cumsum)(jnp.ones(3)).jaxpr)).split(" at ")[0]
    'cumsum'
    """
    line = next(filter(None, map(find_calling_line, reversed(eqns))), "")
    return f"{eqns[-1].primitive.name} at {line}" if line else eqns[-1].primitive.name


def _is_scalar(atom: Any) -> bool:
    return math.prod(shape_of(atom)) <= 1


def _is_elementwise(eqn: JaxprEqn) -> bool:
    arrays = [atom for atom in eqn.invars if not _is_scalar(atom)]
    if not arrays:  # only scalars
        return eqn.primitive.name == "broadcast_in_dim"
    shapes = {shape_of(atom) for atom in (*arrays, *eqn.outvars)}
    return eqn.primitive.name in _ELEMENTWISE and len(shapes) == 1


def _keeps_places(eqn: JaxprEqn) -> bool:
    """True if sub-jaxprs read the arrays of the equation itself, not slices as in a scan."""
    return eqn.primitive.name not in ("scan", "while") or all(
        isinstance(atom, Literal) or _is_scalar(atom) for atom in eqn.invars
    )
