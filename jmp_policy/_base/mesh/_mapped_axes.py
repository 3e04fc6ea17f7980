"""Axes along which devices exchange numbers: those of `jax.shard_map` and `jax.vmap`."""

from typing import Any

import jax
from jax import lax

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
