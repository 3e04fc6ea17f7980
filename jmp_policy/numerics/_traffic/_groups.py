"""The groups of devices in a program of XLA's, as axes of a mesh."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ._collective import Group

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
