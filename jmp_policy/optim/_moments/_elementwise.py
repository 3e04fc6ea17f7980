"""Whether an optimizer treats each number of a parameter by itself, which its program tells."""

import math
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ..._jaxpr import Fact, find_calling_line, having, sub_jaxprs

_ELEMENTWISE = having(Fact.ELEMENTWISE)


def find_mixing(program: Jaxpr) -> tuple[JaxprEqn, ...]:
    """The first equation in which numbers of an array meet, or which makes an array whose numbers differ.

    A program without one does to each part of its arrays what it does to the whole.

    Returns:
      The equation, innermost, with those that call it before it; empty if there is none.

    >>> import jax, jax.numpy as jnp
    >>> find_mixing(jax.make_jaxpr(lambda m, g: jnp.where(g > 0, 0.9 * m + g, m))(jnp.ones(3), jnp.ones(3)).jaxpr)
    ()
    >>> [eqn.primitive.name for eqn in find_mixing(jax.make_jaxpr(jnp.linalg.norm)(jnp.ones(3)).jaxpr)]
    ['jit', 'reduce_sum']
    """
    for eqn in program.eqns:
        if all(map(_is_number, (*eqn.invars, *eqn.outvars))):
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
    """For each result of a program the number that all of its elements are; `None` where the program does not say.

    >>> import jax, jax.numpy as jnp
    >>> find_constants(jax.make_jaxpr(lambda x: (x, jnp.zeros_like(x), jnp.full(3, 0.5)))(jnp.ones(2)).jaxpr)
    [None, 0.0, 0.5]
    """
    makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}
    return [_find_constant(makers.get(var)) if isinstance(var, Var) else None for var in program.outvars]


def _find_constant(eqn: JaxprEqn | None) -> float | None:
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return None
    number = eqn.invars[0]
    return float(number.val) if isinstance(number, Literal) and np.ndim(number.val) == 0 else None


def describe_mixing(eqns: tuple[JaxprEqn, ...]) -> str:
    """What `find_mixing` found: the operation, and the line of a library or the user's that it comes from.

    >>> import jax, jax.numpy as jnp
    >>> describe_mixing(find_mixing(jax.make_jaxpr(jnp.cumsum)(jnp.ones(3)).jaxpr)).split(" at ")[0]
    'cumsum'
    """
    line = next(filter(None, map(find_calling_line, reversed(eqns))), "")
    return f"{eqns[-1].primitive.name} at {line}" if line else eqns[-1].primitive.name


def _is_number(atom: Any) -> bool:
    return math.prod(_shape(atom)) <= 1


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _is_elementwise(eqn: JaxprEqn) -> bool:
    arrays = [atom for atom in eqn.invars if not _is_number(atom)]
    if not arrays:  # an array of numbers: of one number alone
        return eqn.primitive.name == "broadcast_in_dim"
    shapes = {_shape(atom) for atom in (*arrays, *eqn.outvars)}
    return eqn.primitive.name in _ELEMENTWISE and len(shapes) == 1


def _keeps_places(eqn: JaxprEqn) -> bool:
    """Whether the arrays that bodies of an equation read are those that it reads itself: no slices, as of a scan."""
    return eqn.primitive.name not in ("scan", "while") or all(
        isinstance(atom, Literal) or _is_number(atom) for atom in eqn.invars
    )
