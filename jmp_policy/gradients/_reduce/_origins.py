"""What values are made of: a product with what only parameters make is no sum over the batch."""

import enum
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ..._jaxpr import Inside, bodies_of


class Origin(enum.IntEnum):
    """What a value is made of; of several origins, the greatest counts."""

    CONSTANT = 0
    PARAMETER = 1
    DATA = 2


def find_origins(program: Jaxpr, arguments: Sequence[Origin]) -> dict[Var, Origin]:
    """Finds what the values of a body are made of.

    Arrays that a program closes over count as data: a loss function may close over its batch.

    Args:
      program: the body; the programs inside are looked into, and not listed.
      arguments: what its arguments are made of.

    >>> import jax
    >>> body = jax.make_jaxpr(lambda w, x: (w * 2, w * x))(1.0, 1.0).jaxpr
    >>> origins = find_origins(body, [Origin.PARAMETER, Origin.DATA])
    >>> [origins[var].name for var in body.outvars]
    ['PARAMETER', 'DATA']
    """
    known, key = _KNOWN.setdefault(program, {}), tuple(arguments)
    if key not in known:
        known[key] = _find(program, key)
    return known[key]


_KNOWN: weakref.WeakKeyDictionary[Any, dict[tuple[Origin, ...], dict[Var, Origin]]] = weakref.WeakKeyDictionary()


def list_argument_origins(body: Inside, origins: dict[Var, Origin]) -> tuple[Origin, ...]:
    """What the arguments of a body are made of, in all turns of a loop.

    Args:
      body: the body.
      origins: those of the values around it.
    """
    arguments = [read_origin(outer, origins) for outer, _ in body.entering]
    while body.carry and body.leaving:
        inside = find_origins(body.program, arguments)
        after = list(arguments)
        for i in body.carry:
            after[i] = max(after[i], read_origin(body.program.outvars[i - body.carry.start], inside))
        if after == arguments:
            break
        arguments = after
    return tuple(arguments)


def read_origin(atom: Var | Literal, origins: dict[Var, Origin]) -> Origin:
    """What a value is made of, in the body whose origins these are."""
    return Origin.CONSTANT if isinstance(atom, Literal) else origins[atom]


def _find(program: Jaxpr, arguments: tuple[Origin, ...]) -> dict[Var, Origin]:
    origins = dict(zip(program.invars, arguments, strict=True)) | dict.fromkeys(program.constvars, Origin.DATA)
    for eqn in program.eqns:
        origins |= _find_results(eqn, origins)
    return origins


def _find_results(eqn: JaxprEqn, origins: dict[Var, Origin]) -> dict[Var, Origin]:
    bodies = [body for body in bodies_of(eqn) if body.leaving]
    if not bodies:
        return dict.fromkeys(eqn.outvars, _join(read_origin(atom, origins) for atom in eqn.invars))
    # A result of several bodies, as of the branches of a cond, may be that of any of them.
    results = dict.fromkeys(eqn.outvars, Origin.CONSTANT)
    if eqn.primitive.name == "cond":
        results = dict.fromkeys(eqn.outvars, read_origin(eqn.invars[0], origins))
    for body in bodies:
        inside = find_origins(body.program, list_argument_origins(body, origins))
        for inner, outer in body.leaving:
            results[outer] = max(results[outer], read_origin(inner, inside))  # type: ignore[index]
    return results


def _join(origins: Iterable[Origin]) -> Origin:
    return max(origins, default=Origin.CONSTANT)
