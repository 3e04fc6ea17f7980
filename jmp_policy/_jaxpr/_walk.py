"""Reading a program to its bottom: every equation in order, whatever it is nested in."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from ._program import bodies_of, list_variables, name_stack


class Step(NamedTuple):
    """One thing that happens in a program.

    Attributes:
      name: the name of the primitive; `"link"` for a value that gets into a body or out of it, `"carry"` for one that
        gets into the first turn of a loop, `"constant"` for an array that a body closes over.
      operands: what is read.
      results: what is made.
      eqn: the equation; for a link and a constant, the one that the body belongs to.
      scope: the name stacks around and of the equation, outermost first, joined by `/`.
      around: the equations around it, outermost first, each with the body of it that the step is in.
      trips: how often it runs.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(jax.named_scope("net")(jnp.sin))(1.0)
    >>> [(step.name, step.scope) for step in walk(program.jaxpr)]
    [('sin', 'net')]
    """

    name: str
    operands: Sequence[Any]
    results: Sequence[Any]
    eqn: JaxprEqn
    scope: str
    around: tuple[tuple[JaxprEqn, Jaxpr], ...] = ()
    trips: int = 1


def walk(
    program: Jaxpr, scope: str = "", around: tuple = (), trips: int = 1, *, live_only: bool = False
) -> Iterator[Step]:
    """The steps of a program in order, also in the bodies of jit, scan, cond, remat and custom rules.

    A body stands for itself once, where it is called, and its values are joined to those around it by links, each of
    one result. A value that goes around a loop is not followed to the next turn.

    Args:
      program: the program; its values are told apart by identity, so keep it alive.
      scope: the scopes around the program.
      around: the equations around it, as in a `Step`.
      trips: how often it runs.
      live_only: whether equations are passed over whose results nothing uses, as the compiler does.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) * 2))(1.0)
    >>> [step.name for step in walk(program.jaxpr)]
    ['link', 'sin', 'mul', 'link']
    """
    for eqn in list_live(program) if live_only else program.eqns:
        stack = name_stack(eqn)
        here = f"{scope}/{stack}" if scope and stack else scope or stack
        bodies = bodies_of(eqn)
        if not bodies:
            yield Step(eqn.primitive.name, eqn.invars, eqn.outvars, eqn, here, around, trips)
            continue
        for body in bodies:
            for constant, var in zip(body.consts, body.program.constvars, strict=False):
                yield Step("constant", [constant], [var], eqn, here, around, trips)
            inside = (*around, (eqn, body.program))
            for i, (outer, inner) in enumerate(body.entering):
                yield Step("carry" if i in body.carry else "link", [outer], [inner], eqn, here, inside, trips)
            yield from walk(body.program, here, inside, trips * body.trips, live_only=live_only)
        # One link for each result of the equation: from each body that may have made it, as each branch of a cond.
        leaving = [{id(outer): inner for inner, outer in body.leaving} for body in bodies]
        for var in eqn.outvars:
            sources = [results[id(var)] for results in leaving if id(var) in results]
            yield Step("link", sources, [var], eqn, here, around, trips)


def list_live(program: Jaxpr) -> list[JaxprEqn]:
    """The equations that have effects, or results that lead to one that the program returns."""
    used = set(list_variables(program.outvars))
    found = []
    for eqn in reversed(program.eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            used.update(list_variables(eqn.invars))
            found.append(eqn)
    return found[::-1]
