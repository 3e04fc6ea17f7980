"""Sums, means and gathers over devices in the dtypes of a policy."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import (
    REDUCING,
    AxisName,
    Uncast,
    cast_floating,
    check_axes,
    check_divides,
    describe,
    is_floating,
    list_axes,
    name_state,
    vary,
)
from ..policy import PolicySpec
from ._gather_params import Gathering, gather_leaf, take_maximum
from ._state_shardings import apply_reduce_dtype, read_dtype

T = TypeVar("T")


def psum(tree: T, axis_name: AxisName, policy: PolicySpec = None) -> T:
    """Sums over devices in the reduce dtype of a policy.

    This is `jax.lax.psum` of each real floating array, cast to `policy.reduce_dtype` before and to its own dtype after.
    Other numbers are summed in their dtype. Float8 state combines by maximum. PRNG keys, `float0`, loss scales and
    quantized storage pass by identity.

    Args:
      tree: a tree of arrays, such as gradients.
      axis_name: a mapped axis, or several, of `jax.shard_map` or `jax.vmap`.
      policy: anything that `get_policy` accepts; `None` is the default policy, as there. A policy without a reduce
        dtype casts nothing.

    Returns:
      A tree of the same structure, shapes and dtypes.

    Raises:
      ValueError: an axis is not mapped here; `policy` is a map with several reduce dtypes.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> policy = jmp.get_policy("params=float32,compute=bfloat16,reduce=float32")
    >>> grads = {"w": jnp.bfloat16([256, 1, 1, 1])}  # one element on each of four devices
    >>> total = jax.vmap(lambda grads: jmp.sharding.psum(grads, "devices", policy), axis_name="devices")(grads)
    >>> total["w"].tolist(), total["w"].dtype  # 259 rounds to 260; in bfloat16 256 + 1 is 256
    ([260.0, 260.0, 260.0, 260.0], dtype(bfloat16))
    """
    return _reduce(tree, axis_name, policy, lambda x: lax.psum(vary(x, axis_name), axis_name))


def pmean(tree: T, axis_name: AxisName, policy: PolicySpec = None) -> T:
    """Averages over devices in the reduce dtype of a policy; otherwise like `psum`.

    In `jax.shard_map` with `check_vma`, and for arrays that are sharded under `jax.jit`, gradients need no `pmean`: JAX
    averages there.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> policy, grads = jmp.get_policy("p=f32,c=bf16,r=f32"), {"w": jnp.bfloat16([1, 3])}
    >>> mean = jax.vmap(lambda grads: jmp.sharding.pmean(grads, "devices", policy), axis_name="devices")(grads)
    >>> mean["w"].tolist()
    [2.0, 2.0]
    """
    return _reduce(tree, axis_name, policy, lambda x: lax.pmean(vary(x, axis_name), axis_name))


def psum_scatter(
    tree: T, axis_name: AxisName, policy: PolicySpec = None, *, scatter_dimension: int = 0, tiled: bool = False
) -> T:
    """Sums over devices in the reduce dtype of a policy, and returns to each device its shard.

    This is `jax.lax.psum_scatter` with the casts of `psum`. Float8 state, which every device needs, is not scattered:
    each device gets its maximum.

    Args:
      tree, axis_name, policy: as for `psum`.
      scatter_dimension: the dimension of every array that is split.
      tiled: whether the dimension is kept, divided by the number of devices. Otherwise its size must be the number of
        devices, and it is removed.

    Raises:
      ValueError: an axis is not mapped here; a dimension is not divisible; `policy` is a map with several reduce
        dtypes.
      TypeError: a leaf is not an array of numbers: a PRNG key, or quantized storage.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> policy, grads = jmp.get_policy("p=f32,c=bf16,r=f32"), jnp.bfloat16([[256, 1], [1, 2]])
    >>> jax.vmap(lambda x: jmp.sharding.psum_scatter(x, "devices", policy), axis_name="devices")(grads).tolist()
    [256.0, 3.0]
    """
    axes = list_axes(axis_name)
    check_axes(axes, "axis_name")

    def scatter(x: Any) -> Any:
        _check_numbers(x, "psum_scatter")
        check_divides(axes, x.shape, scatter_dimension, tiled)
        return lax.psum_scatter(vary(x, axis_name), axis_name, scatter_dimension=scatter_dimension, tiled=tiled)

    return _reduce(tree, axis_name, policy, scatter, skips=False)


def all_gather(tree: T, axis_name: AxisName, policy: PolicySpec = None, *, axis: int = 0, tiled: bool = False) -> T:
    """Gathers the shards of all devices in the compute dtype of a policy.

    This is `jax.lax.all_gather` of each real floating array that is wider than `policy.compute_dtype`, cast to it
    before and to its own dtype (exactly) after. Other arrays are gathered in their dtype. In the backward pass the
    cotangent is summed in the reduce dtype, and each device gets its shard; `jax.jvp` is not supported. Float8 state,
    which every device has, passes by identity.

    Args:
      tree, axis_name: as for `psum`.
      policy: anything that `get_policy` accepts; `None` is the default policy, as there. A policy without a compute
        dtype casts nothing.
      axis: the axis of each result along which shards are placed.
      tiled: whether shards are concatenated along an existing axis. Otherwise they are stacked along a new one.

    Raises:
      ValueError: an axis is not mapped here; `policy` is a map with several compute or reduce dtypes.
      TypeError: a leaf is not an array of numbers: a PRNG key, or quantized storage.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> policy, params = jmp.get_policy("p=f32,c=bf16,r=f32"), {"w": jnp.float32([1.001, 2])}
    >>> whole = jax.vmap(lambda w: jmp.sharding.all_gather(w, "devices", policy), axis_name="devices")(params)
    >>> whole["w"].tolist(), whole["w"].dtype
    ([[1.0, 2.0], [1.0, 2.0]], dtype('float32'))
    """
    axes = list_axes(axis_name)
    check_axes(axes, "axis_name")
    compute_dtype, reduce_dtype = read_dtype(policy, "compute"), read_dtype(policy, "reduce")
    apply_reduce_dtype(policy)
    spec = Gathering(((axis, axes),), axes, compute_dtype, reduce_dtype, tiled, uses_jax_grad=REDUCING.value is None)

    def gather(x: Any) -> Any:
        _check_numbers(x, "all_gather")
        return gather_leaf(jnp.asarray(x), spec)

    return _map_leaves(gather, lambda state: state, tree)


def _reduce(tree: T, axis_name: AxisName, policy: PolicySpec, reduce: Callable[[Any], Any], *, skips: bool = True) -> T:
    check_axes(list_axes(axis_name), "axis_name")
    dtype = read_dtype(policy, "reduce")

    def reduce_leaf(x: Any) -> Any:
        if skips and not _is_numeric(x):
            return x
        is_cast = dtype is not None and is_floating(x)
        return cast_floating(reduce(cast_floating(x, dtype)), x.dtype) if is_cast else reduce(x)

    return _map_leaves(reduce_leaf, lambda state: take_maximum(state, axis_name), tree)


def _map_leaves(map_rest: Callable[[Any], Any], map_state: Callable[[Any], Any], tree: T) -> T:
    """Maps float8 state and other leaves with two functions; `Uncast` is one leaf."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, Uncast))
    names = name_state(structure.unflatten(range(len(leaves))))
    mapped = [map_state(leaf) if name else map_rest(leaf) for name, leaf in zip(names, leaves, strict=True)]
    return structure.unflatten(mapped)


def _check_numbers(x: Any, name: str) -> None:
    if not _is_numeric(x):
        raise TypeError(
            f"{name} takes arrays of numbers, got {describe(x)}. Leave it out of the tree, and replicate it: P()."
        )


def _is_numeric(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, int | float | complex)
    return not isinstance(x, Uncast) and isinstance(dtype, np.dtype) and dtype != jax.dtypes.float0
