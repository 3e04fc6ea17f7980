"""Reads the arguments of `collect`, and chooses the values of a jaxpr to measure."""

import dataclasses
import functools
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from .._base import Args, describe, did_you_mean, is_array, list_paths_to
from .._jaxpr import (
    MATMULS,
    Atom,
    Fact,
    ModulePaths,
    Modules,
    Order,
    Program,
    RecordedOp,
    Recorder,
    array_dtype,
    body_of,
    find_direction,
    having,
    is_recorded,
    multiplies_only,
    name_stack,
    split_parts,
    sub_jaxprs,
    walk,
)
from ..policy import parse_format
from ._stats_measure import PartialStats, StatsSpec
from ._stats_record import Record, fold, join_records, merge
from ._stats_row import Direction, StatsLayout

PASSES = ("forward", "recomputed", "backward", "arguments", "results")
"""The values of `of`."""

MATMUL, ALL = "matmuls", "all"


class Place(NamedTuple):
    """Pass and module path of an equation. Without patterns the path is empty: a sub-jaxpr is then copied once."""

    direction: Direction = "forward"
    path: str = ""


@dataclasses.dataclass(frozen=True)
class StatsRecorder(Recorder):
    """Measures the values whose operation, path and pass are all chosen."""

    spec: StatsSpec
    loops: str  # one of `LOOPS`
    operations: frozenset[str]  # `"matmuls"` and names of primitives; empty for all
    patterns: tuple[str, ...]  # of paths; empty for all
    passes: frozenset[str]  # some of `PASSES`
    modules: Modules  # distinguishes the paths of modules from other names, where there are patterns

    def enter(self, outer: Place, eqn: JaxprEqn) -> Place:
        direction = find_direction(name_stack(eqn), outer.direction)
        return Place(direction, _read_paths(self.modules).find(outer.path, eqn) if self.patterns else "")

    def choose(self, eqn: JaxprEqn, context: Place) -> Sequence[int]:
        if context.direction not in self.passes or is_recorded(eqn):
            return ()
        steps = (step for body in sub_jaxprs(eqn) for step in walk(body.program))
        inside = (step.eqn for step in steps if step.name == step.eqn.primitive.name)
        if self.operations and not any(map(self._is_chosen, (eqn, *inside))):
            return ()
        around = list_paths_to(context.path)
        if self.patterns and not any(re.fullmatch(pattern, path) for pattern in self.patterns for path in around):
            return ()
        return [i for i, var in enumerate(eqn.outvars) if is_measured(var) and str(var) != "_"]

    def _is_chosen(self, eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        is_matmul = MATMUL in self.operations and name in MATMULS and not multiplies_only(eqn)
        return is_matmul or name in self.operations

    def find_twin(self, eqn: JaxprEqn, result: int) -> int | None:
        # Block-scaled formats need the magnitudes in the same places. A barrier does not return references.
        twins = _TWINS - _MOVES if self.spec.has_blocks else _TWINS
        if eqn.primitive.name not in twins or len(eqn.invars) != len(eqn.outvars):
            return None
        old, new = (getattr(atom, "aval", None) for atom in (eqn.invars[result], eqn.outvars[result]))
        is_same = all(getattr(old, name, None) == getattr(new, name, "") for name in ("size", "dtype"))
        return result if is_same else None

    def splits(self, turns: int) -> bool:
        return self.loops == "split" or (self.loops == "auto" and turns <= MOST_TURNS)

    def measure(self, value: Any) -> PartialStats | Record:
        return self.spec.look(split_parts(value))

    def gather(self, measured: PartialStats | Record) -> Record:
        return self.spec.gather(measured)

    def join(self, records: Sequence[Record]) -> Record:
        return join_records(records)

    def merge(self, one: Record, other: Record) -> Record:
        return merge(one, other)

    def fold(self, record: Record, order: Order) -> Record:
        return fold(record)

    def empty(self, rows: int) -> Record:
        return self.spec.empty(rows)


def is_measured(atom: Atom) -> bool:
    """True for floating and complex arrays."""
    dtype = array_dtype(atom)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


_MOVES = having(Fact.MOVES)
_TWINS = having(Fact.KEEPS) | {"neg", "abs"}


def make_recorder(request: "Request", spec: StatsSpec, program: Jaxpr, modules: Modules) -> StatsRecorder:
    """Reads `where` and `of` for a jaxpr; a name that it lacks is a ValueError with the nearest one that it has."""
    named = modules._replace(types=())
    operations, patterns = set[str](), []
    others = [entry for entry in request.where if entry not in (MATMUL, ALL)]
    primitives, paths = _list_targets(program, named) if others else (set(), [])
    for entry in request.where:
        if entry == MATMUL or entry in primitives:
            operations.add(entry)
        elif entry != ALL:
            _check_pattern(entry, primitives, paths)
            patterns.append(entry)
    chosen = frozenset() if ALL in request.where else frozenset(operations)
    return StatsRecorder(spec, request.loops, chosen, tuple(patterns), frozenset(request.of), named)


def _list_targets(program: Jaxpr, modules: Modules) -> tuple[set[str], list[str]]:
    """Returns the primitives of a jaxpr, and the paths of its equations and of the modules around them."""
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
            f"where has {entry!r}, which is not a pattern: {error}. For example: where=('matmuls', 'encoder/.*')."
        ) from None
    near = did_you_mean(entry, [*paths, *sorted(primitives), MATMUL, ALL])
    raise ValueError(
        f"where has {entry!r}, but the function has no such operation, and no module or scope whose path it matches. "
        f"{near}"
    )


@functools.lru_cache(maxsize=64)
def _read_paths(modules: Modules) -> ModulePaths:
    return ModulePaths(modules)


LOOPS = ("auto", "split", "merge")
MOST_TURNS = 64
"""With `loops="auto"`, each iteration of a loop of at most this length has its own rows."""


class Request(NamedTuple):
    """The checked arguments of `collect`."""

    spec: StatsSpec
    where: tuple[str, ...]
    of: tuple[str, ...]
    loops: str
    every: int | None


def make_request(
    formats: Any,
    where: str | Sequence[str],
    of: str | Sequence[str],
    histogram: bool,
    loops: str,
    every: int | None,
    sample: int | None,
) -> Request:
    names = formats if isinstance(formats, tuple | list | set | frozenset) else [formats]
    known = tuple(dict.fromkeys(parse_format(name).name for name in names))
    spec = StatsSpec(known, bool(histogram), sample=_parse_count("sample", sample, 4096))
    every = _parse_count("every", every, 100)
    if loops not in LOOPS:
        raise ValueError(f"Unknown loops {loops!r}. {did_you_mean(loops, LOOPS)} For example: loops='split'.")
    passes = _check_strings("of", of)
    for entry in passes:
        if entry not in PASSES:
            raise ValueError(f"of has {entry!r}. {did_you_mean(entry, PASSES)} For example: of={_EXAMPLES['of']}.")
    return Request(spec, _check_strings("where", where), passes, loops, every)


def take_step(every: int | None, args: Args) -> tuple[Any, Args]:
    """Removes the step number from the arguments."""
    if every is None:
        return None, args
    step = args[0] if args else None
    is_integer = is_array(step) and jnp.issubdtype(step.dtype, jnp.integer) and not step.shape
    if isinstance(step, bool) or not (isinstance(step, int) or is_integer):
        raise TypeError(
            f"With every={every}, the first argument is the number of the step, an integer, not {describe(step)}. "
            "For example: collect(train_step, every=100)(step, state, batch)."
        )
    return step, args[1:]


def _parse_count(name: str, count: int | None, example: int) -> int | None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"{name} must be a positive integer or None, got {count!r}. For example: {name}={example}.")
    return count


def _check_strings(name: str, entries: str | Sequence[str]) -> tuple[str, ...]:
    listed = (entries,) if isinstance(entries, str) or not isinstance(entries, Iterable) else tuple(entries)
    for entry in listed:
        if not isinstance(entry, str):
            raise TypeError(f"{name} takes strings, got {entry!r}. For example: {name}={_EXAMPLES[name]}.")
    if not listed:
        raise ValueError(f"{name} is empty, so that nothing would be measured. For example: {name}={_EXAMPLES[name]}.")
    return listed


_EXAMPLES = {"where": "('matmuls', 'blocks/.*')", "of": "('forward', 'backward')"}


Value = tuple[tuple[int, ...], int]
"""A value of a jaxpr: the ids of the equations around the one that makes it and of itself, and the index of its output.
An argument of the whole jaxpr has no equations."""


class ObservedProgram(NamedTuple):
    """A traced jaxpr, and the values that the rows of statistics are of."""

    program: Jaxpr  # without its constants
    modules: Modules  # the modules that it calls, without their types
    types: tuple[tuple[str, "weakref.ref[type]"], ...]  # by path; weak, so as not to keep a user's classes alive
    values: tuple[Value | None, ...]  # the value of each row; `None` for a result of the whole function

    def list_types(self) -> dict[str, type]:
        """Returns the types of modules by path, if they still exist."""
        return {path: kind for path, reference in self.types if (kind := reference()) is not None}


def remember_program(
    layout: StatsLayout,
    program: Program,
    modules: Modules,
    arguments: Sequence[int],
    lines: Sequence[RecordedOp],
    results: int,
) -> None:
    """Remembers the program of a layout, whose rows are of arguments, then of operations, then of results."""
    values: list[Value | None] = [((), i) for i in arguments]
    values += [(identify(line.step.around, line.step.eqn), line.result) for line in lines]
    values += [None] * results
    types = tuple((path, weakref.ref(kind)) for path, kind in modules.types)
    body = body_of(program)
    consts = getattr(body, "consts", ())  # from JAX 0.11 on they are a part of it
    body = body.replace(consts=[None] * len(consts)) if consts else body
    _PROGRAMS[layout] = ObservedProgram(body, modules._replace(types=()), types, tuple(values))


def remember_part(layout: StatsLayout, whole: StatsLayout, indices: Sequence[int]) -> None:
    """Remembers the program of a layout that has the rows of another at these indices."""
    found = _PROGRAMS.get(whole)
    if found is not None:
        _PROGRAMS[layout] = found._replace(values=tuple(found.values[i] for i in indices))


def find_program(layout: StatsLayout) -> ObservedProgram | None:
    """Returns the program of a layout; None if this process has not traced it."""
    return _PROGRAMS.get(layout)


def identify(around: Sequence[tuple[Any, Any]], eqn: Any) -> tuple[int, ...]:
    """Returns the ids of the equations around an equation, and of itself."""
    return (*(id(outer) for outer, _ in around), id(eqn))


_PROGRAMS: weakref.WeakKeyDictionary[StatsLayout, ObservedProgram] = weakref.WeakKeyDictionary()
