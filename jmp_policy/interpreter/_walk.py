"""Reading a program to its bottom: every equation in order, whatever it is nested in, and how values get in and out."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ._jaxpr import Program, scan_parts

Pair = tuple[Any, Any]
"""A value, and the variable that is the same value on the other side of the edge of a body."""


class Inside(NamedTuple):
    """A program that an equation runs.

    Attributes:
      program: its equations.
      consts: the arrays that it closes over, in the order of `program.constvars`.
      entering: the values that the equation reads, each with the argument of the program that it becomes.
      leaving: the results of the program, each with the variable that the equation makes of it.
      carry: which of its arguments are its own results of the turn before, from the second turn of a loop on.
      trips: how often it runs each time that the equation does; 1 where only running it would tell.
    """

    program: Jaxpr
    consts: Sequence[Any]
    entering: list[Pair]
    leaving: list[Pair]
    carry: range = range(0)
    trips: int = 1


class Step(NamedTuple):
    """One thing that happens in a program.

    Attributes:
      name: that of the primitive; `"link"` for a value that gets into a body or out of it, `"carry"` for one that gets
        into the first turn of a loop, `"constant"` for an array that a body closes over.
      operands: what is read.
      results: what is made.
      eqn: the equation; for a link and a constant, the one that the body belongs to.
      scope: the name stacks around and of the equation, outermost first, joined by `/`.
      around: the equations around it, outermost first, each with the body of it that the step is in.
      trips: how often it runs.
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
    """The steps of a program in order, those of the bodies of jit, scan, cond, remat and custom rules among them.

    A body stands for itself once, where it is called, and its values are joined to those around it by links, each of
    one result. A value that goes around a loop is not followed to the next turn.

    Args:
      program: the program; its values are told apart by identity, so keep it alive.
      scope: the scopes around the program.
      around: the equations around it, as in a `Step`.
      trips: how often it runs.
      live_only: whether equations are passed over whose results nothing uses, as the compiler does.

    >>> program = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) * 2))(1.0)
    >>> [step.name for step in walk(program.jaxpr)]
    ['link', 'sin', 'mul', 'link']
    """
    for eqn in _live(program) if live_only else program.eqns:
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
        leaving = [{id(outer): inner for inner, outer in body.leaving} for body in bodies]
        for var in eqn.outvars:
            sources = [results[id(var)] for results in leaving if id(var) in results]
            yield Step("link", sources, [var], eqn, here, around, trips)


def name_stack(eqn: JaxprEqn) -> str:
    """The name stack of an equation; the backward pass of a remat carries that of the forward pass as well: once.

    >>> fun = jax.named_scope("net")(jax.grad(jax.checkpoint(jnp.sin)))
    >>> remat = jax.make_jaxpr(fun)(1.0).eqns[-1]
    >>> str(remat.source_info.name_stack), name_stack(remat)
    ('net/transpose(jvp(net))/jvp()', 'transpose(net)')
    """
    stack = str(eqn.source_info.name_stack)
    if eqn.primitive.name not in ("checkpoint", "remat2") or "transpose(" not in stack:
        return stack
    names = [name for name in re.sub(r"\w+\(|\)", "", stack).split("/") if name]
    once = names[: len(names) // 2]
    return f"transpose({'/'.join(once)})" if once + once == names else stack


def _live(program: Jaxpr) -> list[JaxprEqn]:
    """The equations that have effects, or of whose results the program returns something."""
    used = {atom for atom in program.outvars if not isinstance(atom, Literal)}
    found = []
    for eqn in reversed(program.eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            used.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
            found.append(eqn)
    return found[::-1]


def bodies_of(eqn: JaxprEqn) -> list[Inside]:
    """The programs that an equation runs; none for one whose programs are the business of its primitive alone."""
    params, name = eqn.params, eqn.primitive.name
    if name in _OPAQUE:
        return []
    if name == "scan":
        consts, carried = scan_parts(eqn, eqn.invars)
        return [_inside(eqn, params["jaxpr"], eqn.invars, range(consts, consts + carried), params["length"])]
    if name == "while":
        return _of_while(eqn)
    if name == "cond":
        return [_inside(eqn, branch, eqn.invars[1:]) for branch in params["branches"]]
    if name == "custom_linear_solve":
        return [_last(eqn, params["jaxprs"].solve)]
    return [_last(eqn, item) for value in params.values() for item in _items(value) if _is_body(item, eqn)]


_OPAQUE = frozenset({
    "pallas_call", "reduce", "reduce_window", "select_and_scatter", "scatter", "scatter_add", "scatter-add",
    "scatter_mul", "scatter-mul", "scatter_min", "scatter-min", "scatter_max", "scatter-max", "scatter_sub",
    "scatter-sub",
})  # fmt: skip
"""These hold programs that say how to combine two numbers, or that write to memory: they are operations themselves."""


def _of_while(eqn: JaxprEqn) -> list[Inside]:
    params = eqn.params
    first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    values, count = eqn.invars, len(eqn.invars)
    test = _inside(eqn, params["cond_jaxpr"], [*values[:first], *values[start:]], range(first, first + count - start))
    turn = _inside(eqn, params["body_jaxpr"], values[first:], range(start - first, count - first))
    return [test._replace(leaving=[]), turn]


def _last(eqn: JaxprEqn, program: Program) -> Inside:
    """A body that is called with the last values that its equation reads: all of them, for almost all equations."""
    count = len(_jaxpr(program).invars)
    return _inside(eqn, program, eqn.invars[len(eqn.invars) - count :], trips=_devices(eqn))


def _inside(
    eqn: JaxprEqn, program: Program, invars: Sequence[Any], carry: range = range(0), trips: int = 1
) -> Inside:
    body = _jaxpr(program)
    leaving = zip(body.outvars, eqn.outvars, strict=True) if len(body.outvars) == len(eqn.outvars) else ()
    consts = getattr(program, "consts", ())
    return Inside(body, consts, list(zip(invars, body.invars, strict=True)), list(leaving), carry, trips)


def _devices(eqn: JaxprEqn) -> int:
    """How many devices run the body of an equation, each on its own part of the values; one if it is no shard_map."""
    if eqn.primitive.name != "shard_map":
        return 1
    sizes = eqn.params["mesh"].shape
    return math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _is_body(item: Any, eqn: JaxprEqn) -> bool:
    return isinstance(item, ClosedJaxpr | Jaxpr) and len(_jaxpr(item).invars) <= len(eqn.invars)


def _jaxpr(program: Program) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program
