"""Mesh axes: which are bound, what to say about an unknown name, and trees of shardings."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._messages import describe, quote
from ._trees import PyTree


def check_axes(axes: tuple[Any, ...], where: str) -> None:
    """Checks that devices can exchange numbers along axes here.

    Args:
      axes: names of axes.
      where: what the names were given as.

    Raises:
      ValueError: one of them is not mapped.
    """
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError:
            raise ValueError(f"{quote(axis)} in {where} is not an axis that is mapped here. {_list_mapped()}") from None


def is_explicit(axes: tuple[Any, ...]) -> bool:
    """Whether one of the axes is an explicit one of the mesh in use."""
    return not set(axes).isdisjoint(_list_explicit())


def check_explicit(axes: tuple[Any, ...], where: str) -> None:
    """Checks that arrays are sharded explicitly along axes.

    Raises:
      ValueError: one of them is not explicit.
    """
    explicit = _list_explicit()
    for axis in axes:
        if axis not in explicit:
            raise ValueError(
                f"{quote(axis)} in {where} is not an explicit axis of the mesh; these are: "
                f"{', '.join(map(repr, explicit))}. Make it explicit, too, or call this in jax.shard_map."
            )


def count_devices(axes: tuple[Any, ...]) -> int:
    """How many devices there are along axes together."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def check_divides(axes: tuple[Any, ...], shape: tuple[int, ...], dimension: int, tiled: bool, where: str = "") -> None:
    """Checks that a dimension can be split over the devices along axes, or with `tiled=False` is as long.

    Raises:
      ValueError: it cannot.
    """
    count = count_devices(axes)
    size = shape[dimension] if -len(shape) <= dimension < len(shape) else -1
    if size == count or (tiled and size % count == 0):
        return
    needs = f"does not divide by the {count} devices" if tiled else f"is not as long as there are devices, {count},"
    raise ValueError(
        f"Dimension {dimension} of an array of shape {shape}{where} {needs} along {', '.join(map(str, axes))}. Split "
        "another dimension, pad this one, or leave the array whole: P()."
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
        f"The mesh has {', '.join(map(repr, mesh.axis_names))}, and of these {manual} is manual. Name an axis that is, "
        "or make it so: jax.shard_map(fun, axis_names={...}, ...)."
    )


AxisName = Any
"""The name of a mapped axis, or a tuple of them, as in `jax.lax`."""


def list_axes(axis_name: AxisName) -> tuple[Any, ...]:
    """The axes that a name stands for: itself, or those of a tuple.

    >>> list_axes("data"), list_axes(("data", "fsdp"))
    (('data',), ('data', 'fsdp'))
    """
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def vary(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Has an array count as different on the devices along axes.

    In `jax.shard_map`, JAX knows along which axes an array is the same on all devices. There it has gradients summed by
    itself, and from JAX 0.11 on its collectives refuse several axes along some of which the array is the same: as a
    check of gradients that are split over one axis, and were summed over another.

    >>> vary(jax.numpy.ones(2), "anything")  # outside of shard_map there is nothing to say
    Array([1., 1.], dtype=float32)
    """
    manual, varying = jax.sharding.get_abstract_mesh().manual_axes, jax.typeof(x).manual_axis_type.varying
    missing = tuple(axis for axis in list_axes(axis_name) if axis in manual and axis not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_everywhere(tree: Any) -> Any:
    """Marks the arrays of a tree as varying along all axes of the `shard_map`s around them.

    >>> vary_everywhere({"a": jax.numpy.ones(2)})  # outside of shard_map there is nothing to say
    {'a': Array([1., 1.], dtype=float32)}
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.tree.map(lambda x: vary(x, axes), tree) if axes else tree


Spec = NamedSharding | PartitionSpec

Splits = tuple[tuple[int, tuple[AxisName, ...]], ...]
"""The dimensions of an array that are split, each with the axes that it is split over."""


def spread_specs(specs: PyTree, tree: PyTree, name: str = "specs") -> list[Any]:
    """The specs of the leaves of a tree, in their order.

    Args:
      specs: a tree of specs; one may stand for all that is below its place, as in the `in_specs` of `jax.shard_map`.
      tree: a tree of arrays, or of what stands for them.
      name: what `specs` was given as.

    Raises:
      ValueError: the trees do not fit.
      TypeError: a leaf of `specs` is no spec.

    >>> spread_specs({"a": PartitionSpec("d"), "b": PartitionSpec()}, {"a": 1, "b": [2, 3]})
    [P('d',), P(), P()]
    """
    given = dict(jax.tree_util.tree_leaves_with_path(specs))
    for path, spec in given.items():
        if not isinstance(spec, Spec):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} must be a PartitionSpec or a NamedSharding, got {describe(spec)}. "
                "For example: jax.P('fsdp', None), or jax.P() for an array that all devices have."
            )
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    found = [next((path[:n] for n in range(len(path), -1, -1) if path[:n] in given), None) for path in paths]
    missing = [path for path, prefix in zip(paths, found, strict=True) if prefix is None]
    unused = [path for path in given if path not in found]
    if missing or unused:
        words = [f"has none for {_show(missing)}"] * bool(missing) + [f"has {_show(unused)} beside it"] * bool(unused)
        raise ValueError(
            f"{name} does not fit the parameters: it {', and '.join(words)}. It has one spec for each array, or one "
            f"for all that is below a place, for example: {name} = jax.tree.map(lambda _: jax.P(), params)."
        )
    return [given[prefix] for prefix in found if prefix is not None]


def complete_spec(spec: Spec, ndim: int, where: str) -> PartitionSpec:
    """A spec that has an entry for each dimension of an array.

    Raises:
      ValueError: it has more.
    """
    entries = tuple(spec.spec if isinstance(spec, NamedSharding) else spec)
    if len(entries) > ndim:
        raise ValueError(
            f"{where} is {PartitionSpec(*entries)}, for an array of {ndim} dimensions. In a scan over layers, one "
            "layer has a dimension less than all of them: jax.P(*spec[1:])."
        )
    return PartitionSpec(*entries, *[None] * (ndim - len(entries)))


def find_splits(spec: PartitionSpec, axes: tuple, where: str) -> Splits:
    """The dimensions that are split over some axes.

    Raises:
      ValueError: one is split over others, too.
    """
    splits = []
    for dimension, entry in enumerate(spec):
        own = list_axes(entry)
        if set(own) & set(axes):
            if not set(own) <= set(axes):
                raise ValueError(
                    f"{where} splits dimension {dimension} over {', '.join(own)}, of which only some are in "
                    f"reduce_axes, {', '.join(map(str, axes))}. Split another dimension over the others."
                )
            splits.append((dimension, own))
    return tuple(splits)


def _show(paths: Sequence[tuple]) -> str:
    names = ", ".join(jax.tree_util.keystr(path) or "the whole" for path in paths[:3])
    return f"{names} and {len(paths) - 3} more" if len(paths) > 3 else names
