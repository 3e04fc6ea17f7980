"""The axes along which devices exchange numbers, and what is said of a name that is none of them."""

import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType

from .._messages import quote


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
