"""Records the values that leave each scope, and finds the recorded values that belong to those of another."""

import collections
import functools
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from ..._base import did_you_mean
from ..._jaxpr import Pass, find_real_shape
from ._align import describe
from ._measure import Measured, compare, stack
from ._positions import Positions
from ._run import RowLayout, ScopePlan, Values, find_narrowest, read
from ._scopes import Flat, Node, Scope, has_floats, is_inside, list_values, split_loop

Recording = Mapping[str, Any] | str | os.PathLike[str]
Key = tuple[str, Pass]
"""The path of a scope, and the pass. Scopes inside belong to it."""


class Level:
    """A jaxpr, or one iteration of a scan, with the values that leave its scopes."""

    def __init__(self, flat: Flat, is_used: Sequence[bool], around: str = ""):
        self.flat = flat
        self.exits: dict[Key, list[int]] = {}  # the floating values that the rest of the pass reads or returns
        self.loops: dict[int, Level] = {}  # of scans, by the position of their nodes
        self.keys: dict[int, list[Key]] = {}  # the scopes that a recorded value leaves, innermost first
        self.recorded: dict[int, list[jax.Array]] = {}  # the arrays of these scopes
        self._readers: dict[int, list[Any]] = {}  # None for a return
        for node in flat.nodes:
            for value in list_values(node.operands):
                self._readers.setdefault(value, []).append(node.scope)
        for value, used in zip(flat.outputs, is_used, strict=True):
            if used and not isinstance(value, Literal):
                self._readers.setdefault(value, []).append(None)
        for i, node in enumerate(flat.nodes):
            assert node.scope is not None
            path, direction = node.scope[:2]
            if node.body is not None and node.eqn.primitive.name == "scan":  # a `shard_map` is one operation here
                start, end = split_loop(node)
                readers = [self._readers.get(value, ()) for value in node.results]
                is_read = [any(r is None or r.direction == direction for r in found) for found in readers]
                used = [True] * (end - start) + is_read[end - start :]
                self.loops[i] = Level(node.body, used, path)
            while not is_inside(around, path):
                for value in node.results:
                    if has_floats(flat.types[value]) and self._leaves(value, (path, direction)):
                        self.exits.setdefault((path, direction), []).append(value)
                path = path.rpartition("/")[0]

    def _leaves(self, value: int, key: Key) -> bool:
        """True if a reader of the same pass outside of the scope needs the value; of any pass for a recomputed one."""
        path, direction = key
        readers = self._readers.get(value, ())
        passes = ("recomputed", "backward") if direction == "recomputed" else (direction,)
        return any(r is None or (r.direction in passes and not is_inside(r.path, path)) for r in readers)

    def list_exits(self, axes: tuple[int, ...] = ()) -> Iterator[tuple[Key, tuple[int, ...], "Level", int]]:
        """Yields keys, shapes, levels and values. Shapes have a leading axis for each loop around the value."""
        for key, values in self.exits.items():
            yield from ((key, (*axes, *self.flat.types[value].shape), self, value) for value in values)
        for i, level in self.loops.items():
            yield from level.list_exits((*axes, self.flat.nodes[i].eqn.params["length"]))

    def attach(self, value: int, key: Key, array: jax.Array) -> None:
        """Adds a recorded array. The output of a module is often made by a module in it, which comes first."""
        place = sum(len(other[0]) > len(key[0]) for other in self.keys.get(value, ()))
        self.keys.setdefault(value, []).insert(place, key)
        self.recorded.setdefault(value, []).insert(place, array)

    def attach_output(self, value: int | Literal, array: jax.Array) -> None:
        """Adds a recorded output, unless it leaves a recorded scope."""
        if not isinstance(value, Literal) and value in self.flat.makers and value not in self.keys:
            scope = self.flat.find_scope(value)
            is_forward = scope is None or scope.direction == "forward"
            self.attach(value, ("", "forward" if is_forward else "backward"), array)

    def drop_unrecorded(self) -> None:
        """Makes an operation of each loop without recorded values."""
        for level in self.loops.values():
            level.drop_unrecorded()
        self.loops = {i: level for i, level in self.loops.items() if level.keys or level.loops}

    def list_recorded(self) -> tuple[dict[int, list[jax.Array]], list[Any]]:
        """Returns the recorded arrays as a tree; each loop has a tree of its own."""
        return self.recorded, [level.list_recorded() for level in self.loops.values()]


def name_values(level: Level, found: tuple[dict[int, jax.Array], list[Any]]) -> dict[str, jax.Array]:
    """Names the values that leave scopes."""
    arrays: dict[Any, jax.Array] = {}

    def index(level: Level, found: Any) -> None:
        for value, array in found[0].items():
            arrays[id(level), value] = array
        for inner, own in zip(level.loops.values(), found[1], strict=True):
            index(inner, own)

    index(level, found)
    named: dict[str, jax.Array] = {}
    counts = collections.Counter[Key]()
    for key, _, owner, value in level.list_exits():
        if key[1] == "recomputed":
            continue
        named[_name_exit(key, counts[key])] = arrays[id(owner), value]
        counts[key] += 1
    return named


def _name_exit(key: Key, number: int) -> str:
    path, direction = key
    return f"{path}{'' if direction == 'forward' else '@backward'}{f':{number}' if number else ''}"


def match(
    top: Level, outputs: Mapping[str, tuple[int, ...]], recording: Recording, names: Mapping[str, str]
) -> tuple[dict[str, jax.Array], list[str]]:
    """Attaches recorded arrays to the values of a function.

    Args:
      top: the levels of the function.
      outputs: the shapes of its floating outputs, by name.
      recording: arrays by name, or a file of them.
      names: the scope or output for names of the recording.

    Returns:
      The recorded arrays of outputs, by name, and the problems with others, as sentences.
    """
    results: dict[str, jax.Array] = {}
    targets: dict[Key, list[_Target]] = {}
    for key, shape, level, value in top.list_exits():
        targets.setdefault(key, []).append(_Target(shape, functools.partial(level.attach, value, key)))
    for name, shape in outputs.items():
        targets[name, "forward"] = [_Target(shape, functools.partial(results.__setitem__, name))]
    arrays, paths = _read_arrays(recording), list(dict.fromkeys(path for path, _ in targets))
    _check_names(names, arrays, paths)
    groups, numbered = dict[Key, list[tuple[int, str, Any]]](), set[Key]()
    for name, values in arrays.items():
        key, number = _parse(names.get(name, name), paths)
        numbered |= {key} if number else set()
        groups.setdefault(key, []).extend((int(number or 0) + i, name, array) for i, array in enumerate(values))
    problems, count = list[str](), 0
    for key, group in groups.items():
        group.sort(key=lambda item: item[0])
        for shape in dict.fromkeys(array.shape for _, _, array in group):
            found = {i: target for i, target in enumerate(targets.get(key, ())) if target.shape == shape}
            alike = [item for item in group if item[2].shape == shape]
            if len(alike) > len(found):
                problems.append(_explain(group[0][1], key, [array for _, _, array in alike], targets))
                continue
            pairs, problem = _pair(key, alike, found, key in numbered)
            problems += [problem] * bool(problem)
            count += len(pairs)
            again = [target for target in targets.get((key[0], "recomputed"), ()) if target.shape == shape]
            copies = again if len(again) == len(pairs) and key[1] == "forward" else ()
            for target, array in (*pairs, *zip(copies, (array for _, array in pairs), strict=False)):
                target.attach(jnp.asarray(array))
    if not count:
        reasons = "; ".join(problems[:3]) or "it is empty"
        example = _name_exit(next(iter(targets), ("result", "forward")), 0)
        raise ValueError(
            f"No value of the recording belongs to a scope of the function: {reasons}. Name the values as the scopes, "
            f"for example: {example!r}, or pass names={{name: scope}}."
        )
    top.drop_unrecorded()
    return results, problems


class _Target(NamedTuple):
    """A value of the function that may be recorded."""

    shape: tuple[int, ...]
    attach: Callable[[jax.Array], None]


def _pair(
    key: Key, given: Sequence[tuple[int, str, Any]], found: Mapping[int, _Target], is_numbered: bool
) -> tuple[list[tuple[_Target, Any]], str]:
    """Pairs recorded arrays of one shape with values of a scope. Also returns a doubt about the pairs, or ""."""
    shape, is_numbered = given[0][2].shape, is_numbered and len({number for number, _, _ in given}) == len(given)
    known = [(found[number], array) for number, _, array in given if is_numbered and number in found]
    if known:
        unknown = ", ".join(repr(name) for number, name, _ in given if number not in found)
        return known, unknown and f"{unknown} of the recording: the function has no value {shape} of that number"
    # A hook sees the output of a module, which it computes last, in its last call.
    last = [*found.values()][len(found) - len(given) :]
    pairs = [(target, array) for target, (_, _, array) in zip(last, given, strict=True)]
    if len(given) == len(found):
        return pairs, ""
    names, count = ", ".join(dict.fromkeys(repr(name) for _, name, _ in given)), f" {len(given)}" * (len(given) > 1)
    which = f"compared with the last{count} of {len(found)} values of shape {shape}"
    return pairs, f"{names} of the recording: {which}. {_name_exit(key, 0) + ':0'!r} is the first"


def _read_arrays(recording: Recording) -> dict[str, list[Any]]:
    if not isinstance(recording, Mapping):
        try:
            with open(recording, "rb") as stream, np.load(stream) as file:
                recording = dict(file)
        except (ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"{recording} is damaged, or is not an .npz file: {error}. For example: np.savez(path, **record(f)(x))."
            ) from None
    found: dict[str, list[Any]] = {}
    for name, value in recording.items():
        several = value if isinstance(value, list | tuple) else [value]
        found[name] = [x if isinstance(x, jax.Array) else np.asarray(x) for x in several if x is not None]
        for array in found[name]:
            if array.dtype.type is np.void:
                raise ValueError(
                    f"{name!r} of the recording has the dtype {array.dtype}: files of NumPy lose bfloat16 and float8. "
                    "Save float32, for example: np.savez(path, **{name: array.astype('float32')})."
                )
    return found


def group_arrays(recording: Recording, names: Mapping[str, str], paths: Iterable[str]) -> dict[str, list[Any]]:
    """Returns the recorded arrays of the forward pass by scope, in the order of their numbers.

    A name in `names` stands for all its numbers.
    """
    arrays, paths = _read_arrays(recording), list(paths)
    _check_names(names, arrays, paths)
    groups: dict[str, list[tuple[int, Any]]] = {}
    for name, values in arrays.items():
        base = name.partition(":")[0]
        renamed = names.get(name) or name.replace(base, names.get(base, base), 1)
        (path, direction), number = _parse(renamed, paths)
        if direction == "forward":
            groups.setdefault(path, []).extend((int(number or 0) + i, array) for i, array in enumerate(values))
    return {path: [array for _, array in sorted(group, key=lambda item: item[0])] for path, group in groups.items()}


def _check_names(names: Mapping[str, str], arrays: Iterable[str], paths: Sequence[str]) -> None:
    for name, path in names.items():
        if name not in arrays:
            raise ValueError(f"names has {name!r}, which the recording does not have. {did_you_mean(name, arrays)}")
        if _parse(path, paths)[0][0] not in paths:
            raise ValueError(
                f"names has {name!r}: {path!r}, but the function has no scope or output {path!r}. "
                f"{did_you_mean(path, paths)}"
            )


def _parse(name: str, paths: Iterable[str]) -> tuple[Key, str | None]:
    """Reads a name such as `"encoder/dense@backward:1"`, whose number may be missing. PyTorch writes dots."""
    found = re.fullmatch(r"(.*?)(@backward)?(?::(\d+))?", name, re.DOTALL)
    assert found is not None
    path = found[1] if found[1] in paths else found[1].replace(".", "/")
    return (path, "backward" if found[2] else "forward"), found[3]


def _explain(name: str, key: Key, given: Sequence[Any], targets: Mapping[Key, Sequence[_Target]]) -> str:
    shape = given[0].shape
    if (key[0], "forward") in targets and key not in targets:
        return f"the function has no backward pass of {key[0]!r}, which the recording has"
    if key not in targets:
        near = did_you_mean(key[0], dict.fromkeys(path for path, _ in targets))
        hint = f" ({near[0].lower()}{near[1:-1]}?)" if near.startswith("Did") else ""
        return f"{name!r} of the recording is not a scope of the function{hint}"
    shapes = [target.shape for target in targets[key]]
    if shape in shapes:
        counts = f"{len(given)} values of shape {shape} in the recording, and {shapes.count(shape)}"
        return f"{name!r} has {counts} in the function"
    known = " and ".join(map(str, dict.fromkeys(shapes)))
    return f"{name!r} has shape {shape} in the recording, and {known} in the function"


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
    """A run of a level and, with comparisons, a second one, in which recorded values replace computed ones.

    With positions, values are compared at each of them, and values at other positions are not replaced.
    """

    def __init__(
        self,
        level: Level,
        inputs: Sequence[Sequence[Any]],
        comparisons: Comparisons | None = None,
        recorded: tuple[dict[int, list[Any]], list[Any]] = ({}, []),
        positions: Positions | None = None,
    ):
        self._level, self._comparisons, self._recorded = level, comparisons, recorded
        self._positions = positions
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
                    chosen = positions.choose(array, self._runs[0][value]) if positions else array
                    self._runs[1][value] = self._values.cast(chosen, flat.types[value])

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
            inner = Run(level, given, comparisons, xs[2], self._positions)
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
        measure = self._positions.compare if self._positions else compare
        for kind, value, number in comparisons.wanted:
            if kind == "read":
                rows.append(measure(self._runs[1][value], self._runs[0][value]))
            else:
                other = self._runs[0][value] if kind == "passed" else self._made[value, number]
                rows.append(measure(self._recorded[0][value][number], other))
        if not self._positions:
            return stack(rows)
        # (positions, comparisons, fields)
        return (
            jnp.swapaxes(stack(rows), 0, 1) if rows else jnp.zeros((self._positions.length, 0, len(Measured._fields)))
        )
