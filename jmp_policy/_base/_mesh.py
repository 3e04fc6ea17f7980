"""Mesh axes: checks of axis names, and trees of shardings."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._messages import describe, quote
from ._trees import PyTree


def check_axes(axes: tuple[Any, ...], where: str) -> None:
    """Raises unless all axes are mapped; `where` says in errors how they were given."""
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError:
            raise ValueError(f"{quote(axis)} in {where} is not a mapped axis here. {_list_mapped()}") from None


def is_explicit(axes: tuple[Any, ...]) -> bool:
    """True if any of the axes is an explicit axis of the current mesh."""
    return not set(axes).isdisjoint(_list_explicit())


def check_explicit(axes: tuple[Any, ...], where: str) -> None:
    """Raises unless all axes are explicit axes of the current mesh."""
    explicit = _list_explicit()
    for axis in axes:
        if axis not in explicit:
            raise ValueError(
                f"{quote(axis)} in {where} is not an explicit axis of the mesh; these are: "
                f"{', '.join(map(repr, explicit))}. Make it explicit, or call this in jax.shard_map."
            )


def check_divides(axes: tuple[Any, ...], shape: tuple[int, ...], dimension: int, tiled: bool) -> None:
    """Raises unless a dimension is divisible by the number of devices (or equals it, if not tiled)."""
    count = math.prod(lax.axis_size(axis) for axis in axes)
    size = shape[dimension] if -len(shape) <= dimension < len(shape) else -1
    if size == count or (tiled and size % count == 0):
        return
    needs = f"is not divisible by the {count} devices" if tiled else f"must equal the number of devices, {count},"
    raise ValueError(
        f"Dimension {dimension} of an array of shape {shape} {needs} along {', '.join(map(str, axes))}. Split "
        "another dimension, pad this one, or do not split the array: P()."
    )


def _list_explicit() -> list[Any]:
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [axis for axis, axis_type in types if axis_type == AxisType.Explicit]


def _list_mapped() -> str:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return (
            "There is no mesh: call it in jax.shard_map(fun, mesh=mesh, in_specs=..., out_specs=...), or in "
            "jax.vmap(fun, axis_name=...)."
        )
    manual = ", ".join(map(repr, mesh.manual_axes)) or "none"
    return (
        f"The mesh has {', '.join(map(repr, mesh.axis_names))}, of which {manual} is manual. Name a manual axis, "
        "or make this one manual: jax.shard_map(fun, axis_names={...}, ...)."
    )


AxisName = Any
"""Name of a mapped axis, or a tuple of names, as in `jax.lax`."""


def list_axes(axis_name: AxisName) -> tuple[Any, ...]:
    """Returns the axis names as a tuple."""
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def vary(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Marks `x` as device-varying over `axis_name` (`lax.pcast`); a no-op outside of `shard_map`."""
    # JAX sums gradients over axes that an array does not vary along, and from 0.11 on its collectives reject several
    # axes if an array varies along only some of them.
    manual, varying = jax.sharding.get_abstract_mesh().manual_axes, jax.typeof(x).manual_axis_type.varying
    missing = tuple(axis for axis in list_axes(axis_name) if axis in manual and axis not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_everywhere(tree: Any) -> Any:
    """Marks the arrays of a tree as varying along all axes of the surrounding `shard_map`s."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.tree.map(lambda x: vary(x, axes), tree) if axes else tree


Spec = NamedSharding | PartitionSpec

Splits = tuple[tuple[int, tuple[AxisName, ...]], ...]
"""Pairs of a split dimension and the axes that it is split over."""


def spread_specs(specs: PyTree, tree: PyTree, name: str = "specs") -> list[Any]:
    """Returns one spec per leaf of `tree`; a spec may stand for a subtree, as in the `in_specs` of `jax.shard_map`."""
    given = dict(jax.tree_util.tree_leaves_with_path(specs))
    for path, spec in given.items():
        if not isinstance(spec, Spec):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} must be a PartitionSpec or a NamedSharding, got {describe(spec)}. "
                "For example: jax.P('fsdp', None), or jax.P() for a replicated array."
            )
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    found = [next((path[:n] for n in range(len(path), -1, -1) if path[:n] in given), None) for path in paths]
    missing = [path for path, prefix in zip(paths, found, strict=True) if prefix is None]
    unused = [path for path in given if path not in found]
    if missing or unused:
        words = [f"has none for {_name_paths(missing)}"] * bool(missing) + [
            f"has {_name_paths(unused)} beside it"
        ] * bool(unused)
        raise ValueError(
            f"{name} does not fit the parameters: it {', and '.join(words)}. Pass one spec per array, or one "
            f"for a whole subtree. For example: {name} = jax.tree.map(lambda _: jax.P(), params)."
        )
    return [given[prefix] for prefix in found if prefix is not None]


def complete_spec(spec: Spec, ndim: int, where: str) -> PartitionSpec:
    """Pads a spec to one entry per dimension."""
    entries = tuple(spec.spec if isinstance(spec, NamedSharding) else spec)
    if len(entries) > ndim:
        raise ValueError(
            f"{where} is {PartitionSpec(*entries)}, for an array of {ndim} dimensions. In a scan over layers, one "
            "layer has one dimension fewer than the stack: jax.P(*spec[1:])."
        )
    return PartitionSpec(*entries, *[None] * (ndim - len(entries)))


def find_splits(spec: PartitionSpec, axes: tuple, where: str) -> Splits:
    """Finds the dimensions that are split over `axes`; raises if one is also split over other axes."""
    splits = []
    for dimension, entry in enumerate(spec):
        own = list_axes(entry)
        if set(own) & set(axes):
            if not set(own) <= set(axes):
                raise ValueError(
                    f"{where} splits dimension {dimension} over {', '.join(own)}, and not all of these are in "
                    f"reduce_axes, {', '.join(map(str, axes))}. Split another dimension over the others."
                )
            splits.append((dimension, own))
    return tuple(splits)


def _name_paths(paths: Sequence[tuple]) -> str:
    names = ", ".join(jax.tree_util.keystr(path) or "the whole" for path in paths[:3])
    return f"{names} and {len(paths) - 3} more" if len(paths) > 3 else names
