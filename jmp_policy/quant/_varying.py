"""Arrays that differ from device to device, as far as `shard_map` keeps account of it."""

from collections.abc import Collection
from typing import Any

import jax
from jax import lax


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The mapped axes on which one of these arrays differs; none outside of `shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def varying_over(x: jax.Array, axes: Collection[str]) -> jax.Array:
    """An array that counts as different on these axes; its derivative, if it was the same on them, is a sum."""
    missing = frozenset(axes) - varying_axes(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def maximum_over(x: jax.Array, axes: Collection[str]) -> jax.Array:
    """The largest of an array's values over the devices of some axes."""
    return lax.pmax(x, tuple(axes)) if axes else x
