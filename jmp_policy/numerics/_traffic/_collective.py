"""One row of the report, and the mesh axes that its groups of devices lie along."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ..._jaxpr import sub_jaxprs


class Meshes(NamedTuple):
    """The meshes of a program, without those of one device.

    Attributes:
      concrete: those of devices.
      abstract: those of sizes and names only, in whose place no mesh of devices stands.
    """

    concrete: tuple[Mesh, ...]
    abstract: tuple[AbstractMesh, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes."""
        return tuple(dict.fromkeys(axis for mesh in (*self.concrete, *self.abstract) for axis in mesh.axis_names))


def find_meshes(program: Jaxpr, arguments: Iterable[Any]) -> Meshes:
    """Finds the meshes of the arguments of a program, of its shard_maps and of its constraints.

    Args:
      program: the program.
      arguments: arrays and `ShapeDtypeStruct`s.
    """
    found = dict.fromkeys(_list_meshes(program, arguments))
    large = [mesh for mesh in found if math.prod(mesh.shape.values()) > 1]
    concrete = [mesh for mesh in large if isinstance(mesh, Mesh)]
    shapes = [dict(mesh.shape) for mesh in concrete]
    abstract = [mesh for mesh in large if isinstance(mesh, AbstractMesh) and dict(mesh.shape) not in shapes]
    return Meshes(tuple(concrete), tuple(abstract))


def _list_meshes(program: Jaxpr, arguments: Iterable[Any]) -> Iterator[Mesh | AbstractMesh]:
    for argument in arguments:
        yield from _find_mesh(getattr(argument, "sharding", None))
    yield from _list_meshes_inside(program)
    for var in program.invars:  # arguments of an explicit mesh
        yield from _find_mesh(getattr(var.aval, "sharding", None))
    yield jax.sharding.get_abstract_mesh()


def _list_meshes_inside(program: Jaxpr) -> Iterator[Mesh | AbstractMesh]:
    for eqn in program.eqns:
        yield from _list_meshes_of(eqn)
        for body in sub_jaxprs(eqn):
            yield from _list_meshes_inside(body.program)


def _list_meshes_of(eqn: JaxprEqn) -> Iterator[Mesh | AbstractMesh]:
    for name in ("mesh", "ctx_mesh", "sharding", "in_shardings", "out_shardings", "dst_sharding"):
        for value in jax.tree.leaves(eqn.params.get(name)):
            yield from _find_mesh(value)


def _find_mesh(value: Any) -> Iterator[Mesh | AbstractMesh]:
    mesh = value.mesh if isinstance(value, NamedSharding) else value
    if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty:
        yield mesh


Direction = Literal["forward", "recomputed", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "recomputed", "backward")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
REDUCING = ("all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of one kind and dtype over the same axes, of one line of the source, in one place.

    Attributes:
      kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`, `"collective-permute"` or
        `"collective-broadcast"`.
      reduction: how a reduction combines numbers, `"sum"`, `"max"`, `"min"`, `"and"`, `"or"` or `"product"`; the
        empty string for what only moves them.
      dtype: the dtype that is sent, and reduced in.
      axes: the names of the mesh axes along which devices communicate; none, where they are no axes of the mesh.
      devices: how many devices communicate with each other.
      shape: what each device gets of a gather, and puts into any other collective.
      direction: `"forward"`, `"recomputed"` or `"backward"`, as in the rows of `collect`. What follows the gradients,
        such as the check whether they are finite, is `"forward"`; a sum of the gradients themselves is `"backward"`.
      is_gradient: whether it is a sum of gradients that nothing else of the backward pass reads but casts and
        additions: those of parameters. A sum of what flows on through the layers is one of activations.
      inserted: whether XLA's partitioner inserted it; otherwise the program says so, in a `shard_map`.
      source: the user's line that it comes from, `"train.py:12 (loss)"`.
      path: the module names and `jax.named_scope`s around it, joined by `/`; the root's is the empty string.
      count: how many there are, one for each array; in a loop, for all its turns.
      bytes: the bytes of arrays of `shape`, of all of them: on one device, what it has after gathers, and before
        reductions and other collectives.

    >>> from jmp_policy.numerics import Collective
    >>> fields = {"direction": "backward", "is_gradient": True, "inserted": False, "source": "train.py:12", "path": ""}
    >>> row = Collective("all-reduce", "sum", "float32", ("data",), 4, (256,), count=2, bytes=2048, **fields)
    >>> row.moved_bytes
    3072
    """

    kind: str
    reduction: str
    dtype: str
    axes: tuple[str, ...]
    devices: int
    shape: tuple[int, ...]
    direction: Direction
    is_gradient: bool
    inserted: bool
    source: str
    path: str
    count: int
    bytes: int

    @property
    def moved_bytes(self) -> int:
        """The bytes that each device sends, where neighbours in a ring pass them on.

        With n devices, `bytes * (n - 1) / n`, and twice that for an all-reduce; a permute or broadcast sends `bytes`.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.devices - 1) // self.devices


class Group(NamedTuple):
    """The devices that communicate.

    Attributes:
      axes: the names of their axes; none, where they are no axes of the mesh.
      devices: how many there are.
    """

    axes: tuple[str, ...]
    devices: int


class Place(NamedTuple):
    """Where an operation stands.

    Attributes:
      path: the names of modules and scopes.
      direction: the pass.
    """

    path: str
    direction: Direction


def add_up(rows: Iterable[Collective]) -> tuple[Collective, ...]:
    """Makes one of the rows that differ in nothing but their counts, in the order of the first of each."""
    table: dict[Collective, list[int]] = {}
    for row in rows:
        amounts = table.setdefault(dataclasses.replace(row, count=0, bytes=0), [0, 0])
        amounts[0] += row.count
        amounts[1] += row.bytes
    return tuple(dataclasses.replace(row, count=count, bytes=bytes) for row, (count, bytes) in table.items())


def count_elements(shape: Iterable[int]) -> int:
    """How many numbers an array has."""
    return math.prod(shape)


Shape = Mapping[str, int]
"""The sizes of the axes of a mesh, by name."""


def find_group(attributes: str, meshes: Iterable[Shape], devices: int) -> Group:
    """Finds which devices communicate.

    Args:
      attributes: those of an instruction.
      meshes: the meshes of the program; the first one that has such groups names the axes.
      devices: how many devices run the program, in the order of the mesh.

    >>> mesh = {"data": 2, "model": 2}
    >>> find_group("replica_groups={{0,2},{1,3}}, dimensions={0}", [mesh], 4)
    Group(axes=('data',), devices=2)
    >>> find_group("replica_groups=[1,4]<=[4]", [mesh], 4)
    Group(axes=('data', 'model'), devices=4)
    >>> find_group("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", [mesh], 4)
    Group(axes=('model',), devices=2)
    """
    pairs = re.search(r"source_target_pairs=(\{[\d{},]*\})", attributes)
    if pairs is not None:
        return _find_of_pairs(_read_lists(pairs[1]), meshes)
    groups = _read_groups(attributes, devices)
    return next((found for mesh in meshes if (found := _match(groups, mesh))), Group((), len(groups[0])))


def _read_groups(attributes: str, devices: int) -> list[list[int]]:
    """The numbers of the devices of each group."""
    everyone = [list(range(devices))]
    if (found := re.search(r"replica_groups=mesh\[(.*?)\]([^{]*)\{(.*?)\}", attributes)) is not None:
        return _read_mesh_groups(*found.groups()) or everyone
    if (found := re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\])(?:T\(([\d,]+)\))?", attributes)) is not None:
        return _read_iota(found[1], found[2], found[3])
    found = re.search(r"replica_groups=(\{[\d{},]*\})", attributes)
    return (_read_lists(found[1]) if found else []) or everyone


def _read_lists(text: str) -> list[list[int]]:
    """Lists of numbers.

    >>> _read_lists("{{0,1},{2,3}}")
    [[0, 1], [2, 3]]
    """
    return [[int(number) for number in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", text)]


def _read_iota(groups: str, sizes: str, order: str | None) -> list[list[int]]:
    """Numbers in order, as an array that is transposed and cut into groups.

    >>> _read_iota("[2,2]", "[2,2]", "1,0")
    [[0, 2], [1, 3]]
    """
    dimensions = _read_numbers(sizes)
    numbers = np.arange(math.prod(dimensions)).reshape(dimensions)
    if order:
        numbers = numbers.transpose(_read_numbers(order))
    return numbers.reshape(_read_numbers(groups)).tolist()


def _read_mesh_groups(mesh: str, order: str, axes: str) -> list[list[int]]:
    """Groups along axes of a mesh that XLA names itself; `'x':(2)4` is a part of an axis, with 2 before it.

    >>> _read_mesh_groups("'a'=2,'b'=2", " ", "'a'")
    [[0, 2], [1, 3]]
    >>> _read_mesh_groups("'a'=2,'b'=2", ", device_ids=([2,2]T(1,0)) ", "'a'")
    [[0, 1], [2, 3]]
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", mesh)}
    numbers = np.arange(math.prod(sizes.values()))
    if (found := re.search(r"(?:\[[\d,]+\]<=)?(\[[\d,]+\])(?:T\(([\d,]+)\))?", order)) is not None:
        numbers = np.array(_read_iota(f"[{numbers.size}]", found[1], found[2]))
    elif (found := re.search(r"\(([\d,]+)\)", order)) is not None:
        numbers = np.array(_read_numbers(found[1]))
    chosen, dimensions = [], []
    parts = {name: (before, size) for name, before, size in re.findall(r"'(.*?)'(?::\((\d+)\)(\d+))?", axes)}
    for name, size in sizes.items():
        before, own = (int(n or 1) for n in parts.get(name, ("", "")))
        if name in parts:
            own = own if parts[name][1] else size
            chosen.append(len(dimensions) + 1)
            dimensions += [before, own, size // (before * own)]
        else:
            dimensions.append(size)
    others = [i for i in range(len(dimensions)) if i not in chosen]
    count = math.prod(dimensions[i] for i in chosen)
    return numbers.reshape(dimensions).transpose(others + chosen).reshape(-1, count).tolist()


def _read_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _match(groups: Sequence[Sequence[int]], mesh: Shape) -> Group | None:
    """The axes of a mesh along which groups lie; `None` where they lie otherwise."""
    sizes = list(mesh.values())
    if max(map(max, groups)) >= math.prod(sizes):
        return None
    axes = _find_varying(groups[0], sizes)
    others = [i for i in range(len(sizes)) if i not in axes]
    numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(others + axes)
    expected = numbers.reshape(-1, math.prod(sizes[i] for i in axes))
    if {frozenset(group) for group in groups} != set(map(frozenset, expected.tolist())):
        return None
    names = list(mesh)
    return Group(tuple(names[i] for i in axes), len(groups[0]))


def _find_of_pairs(pairs: Sequence[Sequence[int]], meshes: Iterable[Shape]) -> Group:
    """The axes along which devices send to others."""
    for mesh in meshes:
        sizes = list(mesh.values())
        if pairs and max(map(max, pairs)) < math.prod(sizes):
            axes = sorted({axis for pair in pairs for axis in _find_varying(pair, sizes)})
            names = list(mesh)
            return Group(tuple(names[i] for i in axes), math.prod(sizes[i] for i in axes))
    return Group((), len({number for pair in pairs for number in pair}))


def _find_varying(numbers: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The axes along which some devices of a mesh have different coordinates."""
    coordinates = np.unravel_index(list(numbers), sizes)
    return [i for i, along in enumerate(coordinates) if len(set(along.tolist())) > 1]
