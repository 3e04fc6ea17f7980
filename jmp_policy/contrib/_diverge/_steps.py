"""Compares a teacher-forced pass with a recorded decode loop, scope by scope and at each position."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._base import hide_frames
from ..._jaxpr import Fact, having, sub_jaxprs, walk
from ...report import list_places
from ._compare import compare_recorded, record_traced
from ._divergence import Divergence
from ._positions import Positions, Target, align_steps, number_names, pair_steps
from ._recording import Level, group_arrays
from ._run import RowLayout, find_narrowest
from ._scopes import Flat, Node, is_inside
from ._trace import FlatFunction


class ScopeFacts(NamedTuple):
    """The narrowest dtype of the operations of a scope, and the names of their primitives."""

    dtype: str
    primitives: frozenset[str]


class Steps(NamedTuple):
    """A recorded decode loop.

    Attributes:
      arrays: the recording.
      scopes: facts by scope; empty for a recording of another framework.
      closed: the arrays that the function closes over.
    """

    arrays: Mapping[str, Any]
    scopes: Mapping[str, ScopeFacts] = {}
    closed: Sequence[Any] = ()


class ComparedSteps(NamedTuple):
    """A teacher-forced pass that was compared with a decode loop.

    Attributes:
      divergence: the errors; None if no value was aligned.
      unaligned: the parts that could not be aligned, as sentences.
      trainer: facts of the trainer's scopes.
      sampler: facts of the sampler's scopes, by their names in the trainer.
    """

    divergence: Divergence | None
    unaligned: tuple[str, ...]
    trainer: Mapping[str, ScopeFacts]
    sampler: Mapping[str, ScopeFacts]


def record_steps(sampler: Callable[..., Any]) -> Callable[..., Steps]:
    """Like `record`, with facts of the traced function."""

    @hide_frames
    def run_and_record(*args: Any) -> Steps:
        traced = FlatFunction(sampler, args, {})
        top = Level(traced.flat, [True] * len(traced.types))
        return Steps(record_traced(traced, top), _list_facts(traced), traced.closed)

    return run_and_record


def diverge_from_steps(
    trainer: Callable[..., Any], steps: Steps, names: Mapping[str, str], positions: Positions
) -> Callable[..., ComparedSteps]:
    """Compares a teacher-forced pass with a decode loop."""

    @hide_frames
    def compare_run(*args: Any) -> ComparedSteps:
        traced = FlatFunction(trainer, args, {})
        top = Level(traced.flat, [True] * len(traced.types))
        targets: dict[str, list[Target]] = {}
        for key, shape, level, value in top.list_exits():
            if key[1] == "forward":
                targets.setdefault(key[0], []).append(Target(shape, len(shape) - len(level.flat.types[value].shape)))
        outputs = {traced.names[i]: traced.types[i].shape for i in traced.list_floats()}
        outer, matched = _match_outer_scope(steps.arrays, targets)
        renamed, recorded = matched | {**names}, {name: x for name, x in steps.arrays.items() if name != outer}
        targets |= {name: [Target(shape, is_output=True)] for name, shape in outputs.items()}
        arrays = _bring(group_arrays(recorded, renamed, targets), traced.leaves)
        for name, shape in outputs.items():
            if positions.find_axis(shape) is None:  # without the last position
                targets.pop(name)
                arrays.pop(name, None)
        aligned, problems, known = align_steps(arrays, targets, positions)
        found = {*arrays, *aligned}
        missing = [path for path in targets if path not in found and not any(is_inside(name, path) for name in found)]
        scopes = _rename(steps.scopes, renamed, *pair_steps(arrays, targets))
        problems += [f"the sampler has no values of {list_places(missing)}"] * bool(missing)
        facts = _list_facts(traced)
        if targets.keys().isdisjoint(aligned):
            others = [f"{path!r} of the sampler is not a scope of the trainer" for path in aligned]
            return ComparedSteps(None, (*problems, *others), facts, scopes)
        located, titles = positions.cut(known), ("the sampler", "the trainer")
        divergence = compare_recorded(traced, top, number_names(aligned), {}, titles, located)
        problems += [_name_sides(line) for line in divergence.unaligned]
        layout = dataclasses.replace(
            divergence.layout,
            rows=tuple(_tell_dtype(row, scopes) for row in divergence.layout.rows),
            unaligned=tuple(dict.fromkeys(problems)),
        )
        divergence = dataclasses.replace(divergence, layout=layout)
        return ComparedSteps(divergence, layout.unaligned, facts, scopes)

    return compare_run


def _match_outer_scope(recorded: Iterable[str], targets: Iterable[str]) -> tuple[str, dict[str, str]]:
    """If one side has a scope around all of its own, returns it if it is the sampler's, and the trainer's names."""
    bases, known = dict.fromkeys(name.partition(":")[0] for name in recorded), {*targets}
    paths = {name.replace(".", "/"): name for name in bases}
    if not known.isdisjoint(paths.keys() - {""}):
        return "", {}
    [outer, *others] = {path.partition("/")[0] for path in paths if path not in ("result", "")} or {""}
    inner = {name: path.partition("/")[2] for path, name in paths.items()}
    if not others and not known.isdisjoint(inner.values()):
        return outer, {name: path for name, path in inner.items() if path in known}
    [outer, *others] = {path.partition("/")[0] for path in known if path} or {""}
    around = {name: f"{outer}/{path}" for path, name in paths.items()}
    return "", {} if others else {name: path for name, path in around.items() if path in known}


def _rename(
    scopes: Mapping[str, ScopeFacts],
    names: Mapping[str, str],
    stacked: Mapping[str, Sequence[str]],
    split: Mapping[str, Sequence[str]],
) -> dict[str, ScopeFacts]:
    """Returns facts of the sampler's scopes by the trainer's names. A scan has the narrowest dtype of its layers."""
    found = {names.get(path, path): known for path, known in scopes.items()}
    for path, paths in split.items():
        found |= dict.fromkeys(paths, found[path]) if path in found else {}
    for path, paths in stacked.items():
        layers = [found[name] for name in paths if name in found]
        dtypes = sorted((known.dtype for known in layers if known.dtype), key=lambda name: jnp.dtype(name).itemsize)
        if layers:
            primitives = frozenset().union(*(known.primitives for known in layers))
            found[path] = ScopeFacts(dtypes[0] if dtypes else "", primitives)
    return found


def _bring(arrays: dict[str, list[Any]], leaves: Sequence[Any]) -> dict[str, list[Any]]:
    """Takes arrays to the host unless they are on the devices of the trainer's arguments."""
    find = lambda found: {device for x in found if isinstance(x, jax.Array) for device in x.devices()}
    if find(array for group in arrays.values() for array in group) <= find(leaves):
        return arrays
    return {path: [np.asarray(array) for array in group] for path, group in arrays.items()}


def _name_sides(line: str) -> str:
    """Calls the recording the sampler, and the function the trainer."""
    return line.replace("the recording", "the sampler").replace("the function", "the trainer")


def _tell_dtype(row: RowLayout, scopes: Mapping[str, ScopeFacts]) -> RowLayout:
    """Replaces the dtype of recorded values, which are float32 in files, by the traced sampler's dtype."""
    known = scopes.get(row.plan.scope.path)
    return row if known is None else row._replace(dtypes=(known.dtype, row.dtypes[1]))


def _list_facts(traced: FlatFunction) -> dict[str, ScopeFacts]:
    nodes: dict[str, list[Node]] = {}
    for node in _list_nodes(traced.flat):
        if node.scope is not None:
            nodes.setdefault(node.scope.path, []).append(node)
    # A sampler may draw its tokens: random numbers that no output depends on.
    drawn = {step.name for step in walk(traced.program, live_only=True, all_results=False)} & _RANDOM
    return {path: _read_facts(found, _RANDOM - drawn) for path, found in nodes.items()}


_RANDOM = having(Fact.RANDOM)


def _list_nodes(flat: Flat) -> Iterator[Node]:
    for node in flat.nodes:
        if node.body is None:
            yield node
        else:
            yield from _list_nodes(node.body)


def _read_facts(nodes: Sequence[Node], unused: frozenset[str]) -> ScopeFacts:
    inner = [step for node in nodes for body in sub_jaxprs(node.eqn) for step in walk(body.program)]
    avals = [atom.aval for node in nodes for atom in (*node.eqn.invars, *node.eqn.outvars)]
    avals += [var.aval for step in inner for var in step.results]
    names = {node.eqn.primitive.name for node in nodes} | {step.name for step in inner}
    return ScopeFacts(find_narrowest(avals), frozenset(names - unused))
