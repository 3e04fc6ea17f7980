"""Which values of a program `collect` measures: by operation, by path, and by pass."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from ..._base import did_you_mean, list_paths_to
from ..._jaxpr import (
    MATMULS,
    ModulePaths,
    Modules,
    Step,
    bodies_of,
    find_direction,
    float_dtype,
    is_recorded,
    multiplies_only,
    name_stack,
    walk,
)
from ._layout import Direction

PASSES = ("forward", "recomputed", "backward", "arguments", "results")
"""What `of` may name."""

MATMUL, ALL = "matmuls", "all"


class Place(NamedTuple):
    """Where an equation stands, as far as a choice depends on it.

    Attributes:
      direction: the pass that it belongs to.
      path: its module path; left empty where no pattern is chosen, so that a body that is called at two paths is
        copied once.
    """

    direction: Direction = "forward"
    path: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which values are measured. A value is, if its operation, its path and its pass are all chosen.

    Attributes:
      operations: `"matmuls"` and names of primitives; none stands for all.
      patterns: patterns of paths; none stands for all.
      passes: some of `PASSES`.
      modules: what tells the paths of modules from other names, where there are patterns.
    """

    operations: frozenset[str]
    patterns: tuple[str, ...]
    passes: frozenset[str]
    modules: Modules

    def find_place(self, outer: Place, eqn: JaxprEqn) -> Place:
        """The place of an equation in a body that stands at `outer`."""
        direction = find_direction(name_stack(eqn), outer.direction)
        path = _read_paths(self.modules).find(outer.path, eqn) if self.patterns else ""
        return Place(direction, path)

    def list_measured(self, eqn: JaxprEqn, place: Place) -> Sequence[int]:
        """Which results of an equation are measured."""
        if place.direction not in self.passes or is_recorded(eqn) or not self._is_operation_chosen(eqn):
            return ()
        if self.patterns and not any(_covers(pattern, place.path) for pattern in self.patterns):
            return ()
        return [i for i, var in enumerate(eqn.outvars) if float_dtype(var) is not None and not _is_dropped(var)]

    def _is_operation_chosen(self, eqn: JaxprEqn) -> bool:
        """Whether an equation, or one inside of what is not entered, is of a chosen operation."""
        return not self.operations or any(self._is_chosen(inner) for inner in _list_inner(eqn))

    def _is_chosen(self, eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        if MATMUL in self.operations and name in MATMULS and not multiplies_only(eqn):
            return True
        return name in self.operations


def make_choice(where: Sequence[str], of: Iterable[str], program: Jaxpr, modules: Modules) -> Choice:
    """Reads what a user chose of a program.

    Args:
      where: `"matmuls"`, `"all"`, names of primitives, and patterns of paths.
      of: some of `PASSES`.
      program: the program: it tells a primitive from a pattern.
      modules: the modules that it calls. Their classes are left out: what chooses outlives them.

    Raises:
      ValueError: the program has nothing of a name; the message has the nearest that it has.
    """
    named = modules._replace(types=())
    operations, patterns = set[str](), []
    others = [entry for entry in where if entry not in (MATMUL, ALL)]
    primitives, paths = _list_names(program, named) if others else (set(), [])
    for entry in where:
        if entry == MATMUL or entry in primitives:
            operations.add(entry)
        elif entry != ALL:
            _check_pattern(entry, primitives, paths)
            patterns.append(entry)
    chosen = frozenset() if ALL in where else frozenset(operations)
    return Choice(chosen, tuple(patterns), frozenset(of), named)


def _list_names(program: Jaxpr, modules: Modules) -> tuple[set[str], list[str]]:
    """The primitives of a program, and the paths of its equations with those around them."""
    read = _read_paths(modules).read_stack
    steps = [step for step in walk(program, live_only=True) if step.name not in ("link", "carry", "constant")]
    primitives = {eqn.primitive.name for step in steps for eqn in (step.eqn, *(around for around, _ in step.around))}
    paths = dict.fromkeys(path for step in steps for path in list_paths_to(read(step.scope)))
    return primitives, [path for path in paths if path]


def _check_pattern(entry: str, primitives: Iterable[str], paths: Sequence[str]) -> None:
    try:
        if any(re.fullmatch(entry, path) for path in ("", *paths)):
            return
    except re.error as error:
        raise ValueError(
            f"where has {entry!r}, which is no pattern: {error}. For example: where=('matmuls', 'encoder/.*')."
        ) from None
    near = did_you_mean(entry, [*paths, *sorted(primitives), MATMUL, ALL])
    raise ValueError(
        f"where has {entry!r}, but the function has no such operation, and no module or scope whose path it matches. "
        f"{near}"
    )


def _covers(pattern: str, path: str) -> bool:
    return any(re.fullmatch(pattern, outer) for outer in list_paths_to(path))


@functools.lru_cache(maxsize=64)
def _read_paths(modules: Modules) -> ModulePaths:
    return ModulePaths(modules)


def _list_inner(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An equation, and all that it runs where it is not entered."""
    steps: Iterable[Step] = (step for body in bodies_of(eqn) for step in walk(body.program))
    return [eqn, *(step.eqn for step in steps if step.name == step.eqn.primitive.name)]


def _is_dropped(var: object) -> bool:
    """Whether a result has no name, because nothing uses it."""
    return str(var) == "_"
