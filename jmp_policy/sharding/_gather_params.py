"""Parameters that are split over devices, gathered where they are used, and their gradients reduced."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._base import name_state
from .._base.mesh import (
    AxisName,
    Splits,
    check_axes,
    check_explicit,
    complete_spec,
    find_splits,
    is_explicit,
    list_axes,
    spread_specs,
)
from ..policy import PolicySpec, is_searching
from ._dtypes import list_compute_dtypes, read_compute_dtype, read_reduce_dtype, widen_products
from ._gather_leaf import Gathering, gather_leaf, share_state
from ._reads import find_reads
from ._reshard_leaf import reshard_leaf

T = TypeVar("T")


def gather_params(
    params: T,
    policy: PolicySpec,
    specs: Any,
    *,
    reduce_axes: AxisName,
    fun: Callable[[T], Any] | None = None,
) -> T:
    """Gathers parameters in the compute dtype of a policy, and has their gradients reduced in its reduce dtype.

    For fully sharded training in `jax.shard_map`: each device has a part of each parameter, and its own part of the
    batch. Called on the parts inside of the function that is differentiated, it returns the whole parameters in their
    own dtypes:

    - forward, a part is cast to the compute dtype, gathered, and cast back, which is exact;
    - backward, the gradient is cast to the reduce dtype, summed over `reduce_axes`, and cast back; each device gets
      the sum for its part. A parameter that is used twice is gathered once, and its gradient reduced once.
      `jmp_policy.value_and_grad`, `grad` and `optim.minimize` have the products that make it hand over their sums in
      the reduce dtype. `jax.grad` leaves these in the compute dtype: in float16 they may overflow, and a warning says
      so.

    Parameters that something reads as they are, as norms do, must not be cast. With `fun`, only those are cast that
    `fun` reads in the compute dtype alone: it computes what it would compute without a mesh. Without `fun`, all are
    cast that are wider. Gradients are summed: let each device differentiate its part of the mean. A policy without a
    reduce dtype reduces in the dtypes of the parameters. Integers and keys are gathered as they are; float8 state is on
    all devices, and its gradient is the maximum.

    A step over a mesh of two axes, data and fsdp, both of which split the batch:

        def loss_fn(shards, batch):  # of one device
            apply = lambda params: model.apply({"params": params}, batch)
            whole = jmp.sharding.gather_params(shards, policy, specs, reduce_axes=("data", "fsdp"), fun=apply)
            return cross_entropy(apply(whole), batch) / devices

        def step(shards, opt_state, batch):
            loss, grads = jmp.value_and_grad(loss_fn, loss_scale=opt_state)(shards, batch)
            shards, opt_state = jmp.optim.step(tx, grads, opt_state, shards)
            return shards, opt_state, jax.lax.psum(loss, ("data", "fsdp"))

    with `tx = loss_scaled(..., axis_name=("data", "fsdp"))`, since each device sees its part of the gradients. A tensor
    axis that `jax.shard_map(..., axis_names={"data", "fsdp"})` leaves to XLA is not named here.

    In a `jax.lax.scan` over layers, call it in the body, on one layer, whose specs have no axis of layers: each layer
    is then gathered when it is used, and again in the backward pass if the body is under `jax.checkpoint`.

    Its derivative is written by hand: `jax.jvp` cannot pass through it.

    On a mesh of `AxisType.Explicit`, without `jax.shard_map`, it does the same by `reshard`; there `params` and `specs`
    are of whole arrays. JAX lets arrays whose gradients are not yet reduced be multiplied, indexed and moved, but not
    added: those of one dimension, as biases and norms, are gathered as said and reduced by JAX, in the dtype in which
    they are used.

    Args:
      params: the parts of this device.
      policy: what `get_policy` reads. A map needs `fun`, and one reduce dtype.
      specs: a `jax.P` for each parameter, as in the `in_specs` of the `jax.shard_map`; a dimension that is split over
        an axis of `reduce_axes` is gathered. One may stand for all that is below its place.
      reduce_axes: the axes of the mesh over which the batch is split.
      fun: the function of the whole parameters that will read them; it is traced, not run.

    Returns:
      The whole parameters, in the dtypes and the structure of `params`.

    Raises:
      ValueError: an axis is not one of the mesh that is manual (or explicit); a spec does not fit its array;
        `policy` is a map of several compute dtypes, and there is no `fun`; float8 state is split.
      TypeError: a leaf of `specs` is no spec.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> policy = "params=float32,compute=bfloat16,reduce=float32"
    >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> specs = {"w": jax.P("fsdp", None), "scale": jax.P()}
    >>> def loss_fn(shards, x):
    ...     apply = lambda p: (x @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32) * p["scale"]
    ...     return apply(jmp.sharding.gather_params(shards, policy, specs, reduce_axes="fsdp", fun=apply)).sum()
    >>> grad = jax.shard_map(jax.grad(loss_fn), mesh=mesh, in_specs=(specs, jax.P("fsdp")), out_specs=specs)
    >>> params = {"w": jnp.full((2, 2), 1.001), "scale": jnp.full(2, 1.001)}
    >>> jax.jit(grad)(params, jnp.ones((4, 2), jnp.bfloat16))["scale"].tolist()
    [8.0, 8.0]
    """
    widen_products(policy)
    is_left_to_jax = not is_searching()
    axes = list_axes(reduce_axes)
    structure = jax.tree.structure(params)
    parts = list(_list_parts(params, specs, axes))
    reduce_dtype = read_reduce_dtype(policy)

    def gather(dtypes: list[np.dtype | None], leaves: list[Any]) -> list[Any]:
        return [
            _gather_part(x, part, Gathering(part.splits, axes, dtype, reduce_dtype, is_left_to_jax=is_left_to_jax))
            for x, part, dtype in zip(leaves, parts, dtypes, strict=True)
        ]

    leaves = [part.array for part in parts]
    if fun is None:
        return structure.unflatten(gather([read_compute_dtype(policy)] * len(leaves), leaves))
    gather_whole = lambda leaves: structure.unflatten(gather([None] * len(leaves), leaves))
    reads, allowed = find_reads(fun, leaves, gather_whole), list_compute_dtypes(policy)
    dtypes = [next(iter(read)) if read and len(read) == 1 and read <= allowed else None for read in reads]
    return structure.unflatten(gather(dtypes, leaves))


class _Part(NamedTuple):
    """What this device has of a parameter, or, on explicit axes, the whole of it."""

    array: jax.Array
    spec: PartitionSpec
    splits: Splits
    is_state: bool
    is_explicit: bool


def _list_parts(params: Any, specs: Any, axes: tuple) -> Iterator[_Part]:
    explicit = is_explicit(axes)
    check = check_explicit if explicit else check_axes
    check(axes, "reduce_axes")
    keyed, given, names = jax.tree_util.tree_leaves_with_path(params), spread_specs(specs, params), name_state(params)
    for (path, leaf), spec, name in zip(keyed, given, names, strict=True):
        array, where = jnp.asarray(leaf), f"specs{jax.tree_util.keystr(path)}"
        spec = complete_spec(spec, array.ndim, where)
        check(tuple(axis for entry in spec for axis in list_axes(entry) if axis is not None), where)
        splits = find_splits(spec, axes, where)
        if splits and name:
            raise ValueError(f"{where} splits float8 state, which every device needs whole. For example: jax.P().")
        yield _Part(array, spec, splits, bool(name), explicit)


def _gather_part(x: jax.Array, part: _Part, how: Gathering) -> jax.Array:
    if part.is_explicit:
        return x if part.is_state else reshard_leaf(x, how, part.spec)
    if part.is_state:
        return share_state(x, how.reduce_axes)
    return gather_leaf(x, how)
