"""The program that statistics are of: what would be asked of another policy, the rows alone cannot tell.

A layout is static and small, and is saved. The program is neither: it is remembered beside the layout, for as long as
that lives, and what comes back from a file has none.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr

from ..._jaxpr import Line, Modules, Program, body_of
from ._layout import Layout

Value = tuple[tuple[int, ...], int]
"""A value of a program: the identities of the equations around the one that makes it and of that one, outermost first,
and which of its results it is. An argument of the whole program has no equations."""


class ObservedProgram(NamedTuple):
    """A program, and which of its values the rows of statistics are of.

    Attributes:
      program: its equations, without the arrays that it closes over.
      modules: the modules that it calls, without their types.
      types: the types by path, weakly: statistics do not keep a user's classes alive.
      values: the value of each row; `None` for the result of the whole.
    """

    program: Jaxpr
    modules: Modules
    types: tuple[tuple[str, "weakref.ref[type]"], ...]
    values: tuple[Value | None, ...]

    def list_types(self) -> dict[str, type]:
        """The types of modules by path, of those that still exist."""
        return {path: kind for path, reference in self.types if (kind := reference()) is not None}


def remember_program(
    layout: Layout, program: Program, modules: Modules, arguments: Sequence[int], lines: Sequence[Line], results: int
) -> None:
    """Remembers the program that the rows of a layout are of.

    Args:
      layout: its rows are of arguments, of operations and of results, in this order.
      program: the program as it was traced.
      modules: those that it calls.
      arguments: which arguments have rows.
      lines: what the rows of operations are of.
      results: how many results have rows.
    """
    values: list[Value | None] = [((), i) for i in arguments]
    values += [(identify(line.step.around, line.step.eqn), line.result) for line in lines]
    values += [None] * results
    types = tuple((path, weakref.ref(kind)) for path, kind in modules.types)
    body = _drop_constants(body_of(program))
    _PROGRAMS[layout] = ObservedProgram(body, modules._replace(types=()), types, tuple(values))


def remember_part(layout: Layout, whole: Layout, indices: Sequence[int]) -> None:
    """Remembers the program of a layout that has some of the rows of another."""
    found = _PROGRAMS.get(whole)
    if found is not None:
        _PROGRAMS[layout] = found._replace(values=tuple(found.values[i] for i in indices))


def find_program(layout: Layout) -> ObservedProgram | None:
    """The program of a layout; `None` if this process has not traced it."""
    return _PROGRAMS.get(layout)


def identify(around: Sequence[tuple[Any, Any]], eqn: Any) -> tuple[int, ...]:
    """The identities of the equations around an equation, and of that one."""
    return (*(id(outer) for outer, _ in around), id(eqn))


def _drop_constants(program: Jaxpr) -> Jaxpr:
    """A body without the arrays that it closes over: from JAX 0.11 on they are a part of it, and something must be."""
    consts = getattr(program, "consts", ())
    return program.replace(consts=[None] * len(consts)) if consts else program


_PROGRAMS: weakref.WeakKeyDictionary[Layout, ObservedProgram] = weakref.WeakKeyDictionary()
