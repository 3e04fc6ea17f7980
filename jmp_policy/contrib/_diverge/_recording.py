"""Runs a function once and on recorded values, and compares both runs with the recording."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from ..._jaxpr import find_real_shape
from ._align import describe
from ._exits import Key, Level
from ._measure import compare, stack
from ._plan import RowLayout, ScopePlan, find_narrowest
from ._run import Values, read
from ._scopes import Node, Scope, has_floats, is_inside, list_values, split_loop

Paths = frozenset[str]


class Comparisons:
    """The comparisons of a level, and their rows. `unrecorded`: the scopes between recorded values and each input."""

    def __init__(self, level: Level, unrecorded: Sequence[Paths], around: tuple[int, ...] = ()):
        flat = level.flat
        # The kind of a comparison, a value and the number of its recorded array. "passed": of recorded values with the
        # run; "introduced": with values that are computed from recorded ones; "read": of these with the run.
        self.wanted: dict[tuple[str, int, int], int] = {}
        self.loops: dict[int, Comparisons] = {}  # by the position of their nodes
        self.problems: list[str] = []  # the scopes that read values without a record, as sentences
        since = dict(zip(flat.inputs, unrecorded, strict=True))
        unknown: dict[Key, set[str]] = {}
        order: dict[Key | int, None] = {}  # the keys by their last values, and positions of loops
        find = lambda value: Paths() if isinstance(value, Literal) else since.get(value, Paths())
        for i, node in enumerate(flat.nodes):
            operands = [*map(find, node.operands)]
            if i in level.loops:
                self.loops[i] = _enter(level.loops[i], node, operands, (*around, len(self.loops)))
                order[i] = None
                made = self.loops[i].unrecorded
            else:
                made = [Paths().union(_list_scope_paths(node), *operands)] * len(node.results)
            for value, paths in zip(node.results, made, strict=True):
                since[value] = paths
                for key in level.keys.get(value, ()):
                    if key[1] != "recomputed":
                        others = [path for path in since[value] if not _belongs(path, key[0])]
                        unknown.setdefault(key, set()).update(others)
                        order.pop(key, None)
                        order[key] = None
                    since[value] = Paths()
        self.unrecorded = [*map(find, flat.outputs)]  # the scopes between recorded values and each output
        plans = {key: self._plan(level, key, unknown[key], bool(around)) for key in order if isinstance(key, tuple)}
        shapes = tuple(find_real_shape(flat.types[value]) for _, value, _ in self.wanted)
        self.rows: list[RowLayout] = []
        for key in order:
            if isinstance(key, int):
                self.rows += self.loops[key].rows
                self.problems += self.loops[key].problems
            else:
                self.rows.append(RowLayout(plans[key], around, shapes, _find_dtypes(level, key)))

    def _plan(self, level: Level, key: Key, unknown: set[str], is_loop: bool) -> ScopePlan:
        scope = Scope(*key)
        found = [(v, k) for v, keys in level.keys.items() for k, other in enumerate(keys) if other == key]
        outgoing = self._add("passed", found)
        if unknown:
            paths = ", ".join(sorted(unknown)[:3]) + (" and others" if len(unknown) > 3 else "")
            self.problems.append(describe(scope, f"reads values of {paths}, which the recording does not have"))
            return ScopePlan(scope, (), outgoing, ())
        incoming = self._add("read", [(value, 0) for value in _list_reads(level, key, is_loop)])
        return ScopePlan(scope, incoming, outgoing, self._add("introduced", found))

    def _add(self, kind: str, values: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        return tuple(self.wanted.setdefault((kind, *pair), len(self.wanted)) for pair in values)


def _enter(level: Level, node: Node, unrecorded: list[Paths], around: tuple[int, ...]) -> Comparisons:
    """Chooses the comparisons of a scan. Each iteration reads the values that the one before carries."""
    start, end = split_loop(node)
    while True:
        inner = Comparisons(level, unrecorded, around)
        carried = [one | other for one, other in zip(unrecorded[start:end], inner.unrecorded, strict=False)]
        merged = [*unrecorded[:start], *carried, *unrecorded[end:]]
        if merged == unrecorded:
            return inner
        unrecorded = merged


def _list_scope_paths(node: Node) -> set[str]:
    assert node.scope is not None
    inner = node.body.nodes if node.body is not None else ()
    return {node.scope.path}.union(*map(_list_scope_paths, inner))


def _belongs(path: str, recorded: str) -> bool:
    """True if the operations of a scope belong to a recorded one: it is in it or around it, or both are outside all."""
    return not path or (bool(recorded) and (is_inside(path, recorded) or is_inside(recorded, path)))


def _list_reads(level: Level, key: Key, is_loop: bool) -> list[int]:
    """Lists the floating values that a scope reads, except arguments. Recorded scopes in it count as others."""
    path, direction = key
    recorded = {other for keys in level.keys.values() for other, kind in keys if kind == direction and other != path}
    inner = [other for other in recorded if is_inside(other, path)]

    def is_own(node: Node | None) -> bool:
        if node is None or node.scope is None:
            return False
        own = node.scope.path
        return (is_inside(own, path) if path else not own) and not any(is_inside(own, other) for other in inner)

    nodes = [node for node in level.flat.nodes if is_own(node) and node.scope and node.scope.direction == direction]
    if not nodes:  # it returns the value of a scope in it
        return [value for value, keys in level.keys.items() if key in keys]
    makers = {value: level.flat.makers.get(value) for node in nodes for value in list_values(node.operands)}
    found = {
        value: maker for value, maker in makers.items() if has_floats(level.flat.types[value]) and not is_own(maker)
    }
    arguments = () if is_loop else level.flat.inputs
    same = [v for v, maker in found.items() if not maker or not maker.scope or maker.scope.direction == direction]
    return [value for value in same or found if value not in arguments]


def _find_dtypes(level: Level, key: Key) -> tuple[str, str]:
    arrays = [level.recorded[v][k] for v, keys in level.keys.items() for k, other in enumerate(keys) if other == key]
    types = [
        level.flat.types[value]
        for node in level.flat.nodes
        if node.scope is not None and node.scope.direction == key[1] and is_inside(node.scope.path, key[0])
        for value in node.results
    ]
    return find_narrowest(arrays), find_narrowest(types)


class Run:
    """A run of a level and, with comparisons, a second one, in which recorded values replace computed ones."""

    def __init__(
        self,
        level: Level,
        inputs: Sequence[Sequence[Any]],
        comparisons: Comparisons | None = None,
        recorded: tuple[dict[int, list[Any]], list[Any]] = ({}, []),
    ):
        self._level, self._comparisons, self._recorded = level, comparisons, recorded
        flat = level.flat
        self._runs = [{**flat.constants, **dict(zip(flat.inputs, given, strict=True))} for given in inputs]
        self._made: dict[tuple[int, int], Any] = {}  # the computed values that recorded ones replaced
        self._values = Values()
        self._found: list[Any] = []  # of loops
        for i, node in enumerate(flat.nodes):
            if i in level.loops:
                self._run_loop(i, node)
            else:
                for run in self._runs:
                    operands = [read(run, value) for value in node.operands]
                    run.update(zip(node.results, self._values.run(node.eqn, operands), strict=True))
            for value in node.results:
                for number, array in enumerate(recorded[0].get(value, ())):
                    self._made[value, number] = self._runs[1][value]
                    self._runs[1][value] = self._values.cast(array, flat.types[value].dtype)

    def _run_loop(self, i: int, node: Node) -> None:
        level = self._level.loops[i]
        comparisons = None if self._comparisons is None else self._comparisons.loops[i]
        recorded = self._recorded[1][len(self._found)] if comparisons else ({}, [])
        start, end = split_loop(node)
        operands = [[read(run, value) for value in node.operands] for run in self._runs]
        first = operands[0]
        # Both runs read the same weights.
        changed = [{j: own[j] for j in range(end, len(own)) if own[j] is not first[j]} for own in operands]

        def step(carry: Any, xs: Any) -> Any:
            given = [
                [*own[:start], *carry[j], *(xs[1][j].get(end + k, x) for k, x in enumerate(xs[0]))]
                for j, own in enumerate(operands)
            ]
            inner = Run(level, given, comparisons, xs[2])
            outputs = inner.read_outputs()
            return [own[: end - start] for own in outputs], ([own[end - start :] for own in outputs], inner.find())

        params = node.eqn.params
        init, xs = [own[start:end] for own in operands], (first[end:], changed, recorded)
        carried, (made, found) = lax.scan(step, init, xs, params["length"], reverse=params["reverse"])
        for run, own, stacked in zip(self._runs, carried, made, strict=True):
            run.update(zip(node.results, [*own, *stacked], strict=True))
        self._found.append(found)

    def read_outputs(self) -> list[list[Any]]:
        return [[jnp.asarray(read(run, value)) for value in self._level.flat.outputs] for run in self._runs]

    def find(self) -> Any:
        """Returns the record of the comparisons or, without them, the values that leave scopes, both with loops."""
        if self._comparisons is None:
            exits = self._level.exits
            values = [value for key in exits if key[1] != "recomputed" for value in exits[key]]
            return {value: self._runs[0][value] for value in values}, self._found
        return self._measure(self._comparisons), self._found

    def _measure(self, comparisons: Comparisons) -> jax.Array:
        rows = []
        for kind, value, number in comparisons.wanted:
            if kind == "read":
                rows.append(compare(self._runs[1][value], self._runs[0][value]))
            else:
                other = self._runs[0][value] if kind == "passed" else self._made[value, number]
                rows.append(compare(self._recorded[0][value][number], other))
        return stack(rows)
