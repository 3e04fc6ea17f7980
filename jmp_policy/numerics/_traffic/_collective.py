"""One row of the report, and the mesh axes of its device groups."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ..._jaxpr import Pass, walk


class Meshes(NamedTuple):
    """Meshes of more than one device. `abstract` has those without a concrete mesh of the same shape."""

    concrete: tuple[Mesh, ...]
    abstract: tuple[AbstractMesh, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(axis for mesh in (*self.concrete, *self.abstract) for axis in mesh.axis_names))

    @property
    def devices(self) -> int:
        return max((mesh.size for mesh in (*self.concrete, *self.abstract)), default=1)


def find_meshes(program: Jaxpr, arguments: Iterable[Any]) -> Meshes:
    """Finds the meshes of the arguments, the shard_maps and the sharding constraints of a jaxpr."""
    shardings = [getattr(argument, "sharding", None) for argument in arguments]
    for eqn in {id(step.eqn): step.eqn for step in walk(program)}.values():
        shardings += [value for name in _MESH_PARAMETERS for value in jax.tree.leaves(eqn.params.get(name))]
    shardings += [getattr(var.aval, "sharding", None) for var in program.invars]  # of an explicit mesh
    shardings.append(jax.sharding.get_abstract_mesh())
    found = [value.mesh if isinstance(value, NamedSharding) else value for value in shardings]
    large = dict.fromkeys(mesh for mesh in found if isinstance(mesh, Mesh | AbstractMesh) and mesh.size > 1)
    concrete = [mesh for mesh in large if isinstance(mesh, Mesh)]
    shapes = [dict(mesh.shape) for mesh in concrete]
    abstract = [mesh for mesh in large if isinstance(mesh, AbstractMesh) and dict(mesh.shape) not in shapes]
    return Meshes(tuple(concrete), tuple(abstract))


_MESH_PARAMETERS = ("mesh", "ctx_mesh", "sharding", "in_shardings", "out_shardings", "dst_sharding")

DIRECTIONS = ("forward", "recomputed", "backward")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
REDUCING = ("all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of one kind, dtype, shape and group of axes from one source line and module.

    Attributes:
      kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`, `"collective-permute"` or
        `"collective-broadcast"`.
      reduction: `"sum"`, `"max"`, `"min"`, `"and"`, `"or"`, `"product"`, or empty for a collective that does not
        reduce.
      dtype: the dtype that is sent and reduced in.
      axes: the mesh axes along which devices communicate; empty if the groups do not match mesh axes.
      devices: the number of devices in a group.
      shape: the output shape of a gather, or the input shape of any other collective, on one device.
      direction: `"forward"`, `"recomputed"` or `"backward"`, as in `collect`. A sum of gradients is `"backward"`; ops
        after it, such as the check for finite gradients, are `"forward"`.
      is_gradient: True for a sum of gradients of parameters: in the backward pass, only casts and additions read its
        result. Other sums of the backward pass are of activations.
      inserted: True if XLA's partitioner inserted it, False if it is from a `shard_map`.
      source: the user's line, `"train.py:12 (loss)"`.
      path: the module names and `jax.named_scope`s around it, joined by `/`; empty for the root.
      count: the number of arrays, over all iterations of a loop.
      bytes: the total size of `count` arrays of `shape` on one device.

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
    direction: Pass
    is_gradient: bool
    inserted: bool
    source: str
    path: str
    count: int
    bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes that each device sends with a ring algorithm.

        With n devices `bytes * (n - 1) / n`, twice this for an all-reduce, and `bytes` for a permute or broadcast.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.devices - 1) // self.devices


class Group(NamedTuple):
    """Mesh axes of a device group (empty if it does not match mesh axes) and its size."""

    axes: tuple[str, ...]
    devices: int


class OpLocation(NamedTuple):
    """Module path and pass of an op."""

    path: str
    direction: Pass


def add_up(rows: Iterable[Collective]) -> tuple[Collective, ...]:
    """Merges rows that differ only in their counts."""
    table: dict[Collective, list[int]] = {}
    for row in rows:
        amounts = table.setdefault(dataclasses.replace(row, count=0, bytes=0), [0, 0])
        amounts[0] += row.count
        amounts[1] += row.bytes
    return tuple(dataclasses.replace(row, count=count, bytes=bytes) for row, (count, bytes) in table.items())


def find_group(attributes: str, meshes: Iterable[Mapping[str, int]], devices: int) -> Group:
    """Finds the device group in the attributes of an instruction. The first mesh (sizes by axis) that fits names it."""
    pairs = re.search(r"source_target_pairs=(\{[\d{},]*\})", attributes)
    groups = _read_groups(attributes, devices) if pairs is None else _read_lists(pairs[1])
    members = {number for group in groups for number in group}
    for mesh in meshes if members else ():
        sizes = list(mesh.values())
        if max(members) >= math.prod(sizes):
            continue
        coordinates = [np.transpose(np.unravel_index(group, sizes)) for group in groups]
        axes = [i for i in range(len(sizes)) if any(np.ptp(group[:, i]) for group in coordinates)]
        count = math.prod(sizes[i] for i in axes)
        # A permute may leave out devices. Any other group must have all devices along its axes.
        if pairs is not None or all(len(group) == count for group in groups):
            return Group(tuple(list(mesh)[i] for i in axes), count)
    return Group((), len(members) if pairs is not None else len(groups[0]))


def _read_groups(attributes: str, devices: int) -> list[list[int]]:
    everyone = [list(range(devices))]
    if (found := re.search(r"replica_groups=mesh\[(.*?)\]([^{]*)\{(.*?)\}", attributes)) is not None:
        return _read_mesh_groups(*found.groups()) or everyone
    if (found := re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\])(?:T\(([\d,]+)\))?", attributes)) is not None:
        return _read_iota(found[1], found[2], found[3])
    found = re.search(r"replica_groups=(\{[\d{},]*\})", attributes)
    return (_read_lists(found[1]) if found else []) or everyone


def _read_lists(text: str) -> list[list[int]]:
    """Parses lists of integers."""
    return [[int(number) for number in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", text)]


def _read_iota(groups: str, sizes: str, order: str | None) -> list[list[int]]:
    """Parses groups written as a transposed and reshaped iota."""
    dimensions = _read_numbers(sizes)
    numbers = np.arange(math.prod(dimensions)).reshape(dimensions)
    if order:
        numbers = numbers.transpose(_read_numbers(order))
    return numbers.reshape(_read_numbers(groups)).tolist()


def _read_mesh_groups(mesh: str, order: str, axes: str) -> list[list[int]]:
    """Parses groups along named axes; `'x':(2)4` is a sub-axis of size 4, with 2 before it."""
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
