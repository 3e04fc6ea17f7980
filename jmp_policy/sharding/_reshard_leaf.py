"""One array on explicit axes of a mesh, gathered by its sharding, with a backward pass that sums in another dtype."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from ._dtypes import cast_leaf
from ._gather_leaf import Gathering, narrow


def reshard_leaf(x: jax.Array, how: Gathering, spec: PartitionSpec) -> jax.Array:
    """Gathers one array, in its dtype; what `gather_leaf` does in `jax.shard_map`.

    Only where the gathered array counts as `reduced` is its cotangent unreduced: partial sums in whatever dtype the
    equation has that made them, which are then cast and summed. Otherwise JAX sums them before anyone can cast.

    Args:
      x: the whole array.
      how: how it is gathered.
      spec: its sharding, with an entry for each dimension.
    """
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _gather(x, how, spec)
    return reshard(x, _without(spec, how)) if how.splits else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, how: Gathering, spec: PartitionSpec) -> jax.Array:
    whole = _without(spec, how)
    if x.ndim > 1:  # JAX adds no array that counts as reduced, and biases are added
        whole = PartitionSpec(*whole, reduced=frozenset(how.reduce_axes))
    return cast_leaf(reshard(narrow(x, how.compute_dtype), whole), x.dtype)


def _scatter(how: Gathering, spec: PartitionSpec, residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residuals
    how.warn_of_overflow(cotangent.dtype)
    return (cast_leaf(reshard(cast_leaf(cotangent, how.reduce_dtype), spec), cotangent.dtype),)


_gather.defvjp(lambda x, how, spec: (_gather(x, how, spec), None), _scatter)


def _without(spec: PartitionSpec, how: Gathering) -> PartitionSpec:
    """The sharding without the axes that are gathered."""
    gathered = {dimension for dimension, _ in how.splits}
    return PartitionSpec(*[None if i in gathered else entry for i, entry in enumerate(spec)])
