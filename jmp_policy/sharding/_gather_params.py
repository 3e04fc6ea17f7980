"""Parameters split over devices, gathered where they are used, and their gradients reduced."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec, reshard

from .._base import (
    AxisName,
    Splits,
    check_axes,
    check_explicit,
    complete_spec,
    find_splits,
    is_explicit,
    is_prepared,
    is_searching,
    list_axes,
    name_state,
    read_leaf,
    spread_specs,
    vary,
    warn_once,
    write_leaf,
)
from ..policy import PolicySpec
from ._reads import find_reads
from ._state_shardings import cast_leaf, list_compute_dtypes, read_compute_dtype, read_reduce_dtype, widen_products


class Gathering(NamedTuple):
    """How an array is gathered, and its cotangent summed.

    Attributes:
      splits: the dimensions that are gathered.
      reduce_axes: the axes along which devices have different cotangents, which are summed.
      compute_dtype: what moves in the forward pass, if it is narrower than the array.
      reduce_dtype: what moves in the backward pass; `None` for the dtype of the array.
      tiled: whether parts are joined along a dimension that there is.
      is_left_to_jax: whether JAX alone takes the gradients, so that products hand over sums in the compute dtype.
    """

    splits: Splits
    reduce_axes: tuple[AxisName, ...]
    compute_dtype: np.dtype | None
    reduce_dtype: np.dtype | None
    tiled: bool = True
    is_left_to_jax: bool = False

    def warn_of_overflow(self, dtype: np.dtype) -> None:
        """Warns where the cotangent of an array of a dtype may have overflowed before it gets the reduce dtype."""
        is_float16 = np.float16 in (self.compute_dtype, dtype)
        if self.is_left_to_jax and is_float16 and self.reduce_dtype not in (None, np.float16):
            warn_once(
                Gathering,
                f"The products that make gradients of gathered parameters sum in float16, which ends at 65504, before "
                f"these are reduced in {self.reduce_dtype}; take them by jmp_policy.value_and_grad, grad or "
                "optim.minimize, under which the products hand over their sums in the reduce dtype: "
                "jmp_policy.grad(loss_fn, loss_scale=scale).",
            )


def gather_leaf(x: jax.Array, how: Gathering) -> jax.Array:
    """Gathers one array, in its dtype; the cotangent of the result is summed over devices, and each gets its part.

    The cast back to the dtype of the array is exact, and leaves modules what they expect. Several uses of the result
    are then summed in that dtype, before one reduction for all of them. Integers and keys are gathered as they are.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _gather_exact(x, how)
    split_over = tuple(axis for _, axes in how.splits for axis in axes)
    x = vary(x, split_over)  # outside: where all devices had the same array, JAX sums its cotangent once more
    varying = jax.typeof(x).manual_axis_type.varying
    shared = tuple(axis for axis in how.reduce_axes if axis not in split_over and axis not in varying)
    return _gather(x, how._replace(reduce_axes=shared))


def share_state(state: jax.Array, axes: tuple[AxisName, ...]) -> jax.Array:
    """Hands on a leaf of float8 state, of which all devices have the same; its cotangent is the largest of theirs."""
    return _share(state, tuple(axis for axis in axes if axis not in jax.typeof(state).manual_axis_type.varying))


def take_maximum(state: jax.Array, axis_name: AxisName) -> jax.Array:
    """The largest of what all devices have of a leaf of float8 state."""
    largest = lax.pmax(vary(read_leaf(state), axis_name), axis_name)
    return write_leaf(largest, state) if is_prepared(state) else largest


def narrow(x: jax.Array, dtype: np.dtype | None) -> jax.Array:
    """Casts an array to a dtype if that has fewer bytes; the cast back is exact."""
    return x if dtype is None or dtype.itemsize >= x.dtype.itemsize else cast_leaf(x, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, how: Gathering) -> jax.Array:
    whole = narrow(x, how.compute_dtype)
    for dimension, axes in how.splits:
        whole = lax.all_gather(whole, axes, axis=dimension, tiled=how.tiled)
    return cast_leaf(vary(whole, how.reduce_axes), x.dtype)


def _scatter(how: Gathering, residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residuals
    how.warn_of_overflow(cotangent.dtype)
    part = cast_leaf(cotangent, how.reduce_dtype)
    for dimension, axes in reversed(how.splits):
        part = lax.psum_scatter(part, axes, scatter_dimension=dimension, tiled=how.tiled)
    if how.reduce_axes:
        part = lax.psum(part, how.reduce_axes)
    return (cast_leaf(part, cotangent.dtype),)


_gather.defvjp(lambda x, how: (_gather(x, how), None), _scatter)


def _gather_exact(x: jax.Array, how: Gathering) -> jax.Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    whole = jax.random.key_data(x) if is_key else x
    for dimension, axes in how.splits:
        whole = lax.all_gather(whole, axes, axis=dimension, tiled=how.tiled)
    return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(x)) if is_key else whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _share(state: jax.Array, axes: tuple[AxisName, ...]) -> jax.Array:
    return vary(state, axes)


_share.defvjp(
    lambda state, axes: (_share(state, axes), None),
    lambda axes, _, next_state: (take_maximum(next_state, axes) if axes else next_state,),
)


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
        return _gather_explicit(x, how, spec)
    return reshard(x, _without(spec, how)) if how.splits else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_explicit(x: jax.Array, how: Gathering, spec: PartitionSpec) -> jax.Array:
    whole = _without(spec, how)
    if x.ndim > 1:  # JAX adds no array that counts as reduced, and biases are added
        whole = PartitionSpec(*whole, reduced=frozenset(how.reduce_axes))
    return cast_leaf(reshard(narrow(x, how.compute_dtype), whole), x.dtype)


def _scatter_explicit(how: Gathering, spec: PartitionSpec, residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residuals
    how.warn_of_overflow(cotangent.dtype)
    return (cast_leaf(reshard(cast_leaf(cotangent, how.reduce_dtype), spec), cotangent.dtype),)


_gather_explicit.defvjp(lambda x, how, spec: (_gather_explicit(x, how, spec), None), _scatter_explicit)


def _without(spec: PartitionSpec, how: Gathering) -> PartitionSpec:
    """The sharding without the axes that are gathered."""
    gathered = {dimension for dimension, _ in how.splits}
    return PartitionSpec(*[None if i in gathered else entry for i, entry in enumerate(spec)])


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
