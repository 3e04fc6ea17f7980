"""Gathers sharded parameters in the dtypes in which a function reads them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
from jax.sharding import PartitionSpec, reshard

from .._base import (
    REDUCING,
    AxisName,
    PyTree,
    Splits,
    cast_floating,
    check_axes,
    check_explicit,
    complete_spec,
    find_splits,
    is_explicit,
    is_floating,
    is_floating_dtype,
    is_prepared,
    list_axes,
    name_state,
    read_leaf,
    spread_specs,
    vary,
    warn_once,
    write_leaf,
)
from .._jaxpr import Fact, Step, having, trace, walk
from ..policy import PolicySpec, get_policy, list_policies
from ._state_shardings import apply_reduce_dtype, read_dtype

MOVES = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS)  # casting their operands or their results is the same
_MARK = "jmp_policy parameter "  # prefix of the names that mark parameters in the jaxpr
Reads = set[np.dtype] | None  # dtypes that an array is cast to before any computation; None for an uncast use


def find_reads(
    fun: Callable[[Any], Any], params: PyTree, prepare: Callable[[Any], Any] = lambda params: params
) -> list:
    """Finds for each leaf of `params` the dtypes that `fun` casts it to, or None if it uses it uncast.

    Looks into jitted functions, loops, branches, remat and the primal functions of custom derivatives, and passes ops
    that only move elements. `prepare` is applied to `params` before `fun` and is traced too: on a partly manual mesh a
    `jax.ShapeDtypeStruct` cannot describe its outputs.
    """
    leaves = jax.tree.leaves(params)
    marks = {f"{_MARK}{i}": i for i, leaf in enumerate(leaves) if is_floating(leaf)}

    def read_marked(params: PyTree) -> Any:
        whole, structure = jax.tree.flatten(prepare(params))
        marked = [checkpoint_name(x, f"{_MARK}{i}") if i in marks.values() else x for i, x in enumerate(whole)]
        return fun(structure.unflatten(marked))

    program = trace(read_marked, (params,), {}).program.jaxpr
    reads: list[Reads] = [set() for _ in leaves]
    holds: dict[int, set[int]] = {}  # the leaves that each variable is made from

    def note(leaf: int, dtype: np.dtype | None) -> None:
        known = reads[leaf]
        reads[leaf] = None if known is None or dtype is None else known | {dtype}

    for step in walk(program):
        held = [holds.get(id(operand), set()) for operand in step.operands]
        for result in step.results:  # an earlier call of the same sub-jaxpr may have set them
            holds.pop(id(result), None)
        if step.name == "name" and step.eqn.params["name"] in marks:
            holds[id(step.results[0])] = {marks[step.eqn.params["name"]]}
            continue
        if not any(held):
            continue
        if _only_moves(step):
            in_pairs = len(step.results) == len(step.operands)
            for i, result in enumerate(step.results):
                holds[id(result)] = held[i] if in_pairs else set().union(*held)
        else:
            for leaf in set().union(*held):
                note(leaf, _find_cast(step, leaves[leaf].dtype))
    for var in program.outvars:
        for leaf in () if isinstance(var, Literal) else holds.get(id(var), ()):
            note(leaf, None)
    return reads


def _only_moves(step: Step) -> bool:
    if step.name == "convert_element_type":
        [operand], [result] = step.operands, step.results
        return operand.aval.dtype == result.aval.dtype
    return step.name == "link" or step.name in MOVES  # not "carry": its value changes from iteration to iteration


def _find_cast(step: Step, dtype: np.dtype) -> np.dtype | None:
    """Returns the floating dtype with fewer bytes that a step casts to, or None."""
    if step.name != "convert_element_type":
        return None
    new = step.eqn.params["new_dtype"]
    return np.dtype(new) if is_floating_dtype(new) and np.dtype(new).itemsize < dtype.itemsize else None


class Gathering(NamedTuple):
    """Arguments for gathering an array and summing its cotangent."""

    splits: Splits  # the dimensions to gather, each with its mesh axes
    reduce_axes: tuple[AxisName, ...]  # the axes along which cotangents differ and are summed
    compute_dtype: np.dtype | None  # of the forward gather, if narrower than the array
    reduce_dtype: np.dtype | None  # of the backward reduction; `None` for the dtype of the array
    tiled: bool = True  # whether shards are concatenated along an existing dimension
    uses_jax_grad: bool = False  # whether JAX alone takes the gradients, whose matmuls then output the compute dtype

    def warn_of_overflow(self, dtype: np.dtype) -> None:
        """Warns if a cotangent of this dtype may overflow before it is cast to the reduce dtype."""
        is_float16 = np.float16 in (self.compute_dtype, dtype)
        if self.uses_jax_grad and is_float16 and self.reduce_dtype not in (None, np.float16):
            warn_once(
                Gathering,
                f"The matmuls that make gradients of gathered parameters output float16, which overflows at 65504, "
                f"before these are reduced in {self.reduce_dtype}. Use jmp_policy.value_and_grad, grad or "
                "optim.minimize, under which the matmuls output the reduce dtype. For example: "
                "jmp_policy.grad(loss_fn, loss_scale=scale).",
            )


def gather_leaf(x: jax.Array, how: Gathering) -> jax.Array:
    """Gathers one array in its own dtype. Its cotangent is summed over devices, and each gets its shard of the sum."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _gather_exact(x, how)
    split_over = tuple(axis for _, axes in how.splits for axis in axes)
    x = vary(x, split_over)  # outside of the custom rule: JAX sums the cotangent of a replicated array itself
    varying = jax.typeof(x).manual_axis_type.varying
    shared = tuple(axis for axis in how.reduce_axes if axis not in split_over and axis not in varying)
    return _gather(x, how._replace(reduce_axes=shared))


def take_maximum(state: jax.Array, axis_name: AxisName) -> jax.Array:
    """Returns the maximum of float8 state over devices."""
    largest = lax.pmax(vary(read_leaf(state), axis_name), axis_name)
    return write_leaf(largest, state) if is_prepared(state) else largest


def narrow(x: jax.Array, dtype: np.dtype | None) -> jax.Array:
    """Casts an array to a dtype with fewer bytes, or returns it."""
    return x if dtype is None or dtype.itemsize >= x.dtype.itemsize else cast_floating(x, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, how: Gathering) -> jax.Array:
    whole = narrow(x, how.compute_dtype)
    for dimension, axes in how.splits:
        whole = lax.all_gather(whole, axes, axis=dimension, tiled=how.tiled)
    return cast_floating(vary(whole, how.reduce_axes), x.dtype)


def _scatter(how: Gathering, residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residuals
    how.warn_of_overflow(cotangent.dtype)
    part = cast_floating(cotangent, how.reduce_dtype)
    for dimension, axes in reversed(how.splits):
        part = lax.psum_scatter(part, axes, scatter_dimension=dimension, tiled=how.tiled)
    if how.reduce_axes:
        part = lax.psum(part, how.reduce_axes)
    return (cast_floating(part, cotangent.dtype),)


_gather.defvjp(lambda x, how: (_gather(x, how), None), _scatter)


def _gather_exact(x: jax.Array, how: Gathering) -> jax.Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    whole = jax.random.key_data(x) if is_key else x
    for dimension, axes in how.splits:
        whole = lax.all_gather(whole, axes, axis=dimension, tiled=how.tiled)
    return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(x)) if is_key else whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _share(state: jax.Array, axes: tuple[AxisName, ...]) -> jax.Array:
    """Returns replicated float8 state. Its cotangent is the maximum over devices."""
    return vary(state, axes)


_share.defvjp(
    lambda state, axes: (_share(state, axes), None),
    lambda axes, _, next_state: (take_maximum(next_state, axes) if axes else next_state,),
)


def reshard_leaf(x: jax.Array, how: Gathering, spec: PartitionSpec) -> jax.Array:
    """Gathers one whole array with sharding `spec` on explicit axes, like `gather_leaf` in `jax.shard_map`."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _gather_explicit(x, how, spec)
    return reshard(x, _without(spec, how)) if how.splits else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_explicit(x: jax.Array, how: Gathering, spec: PartitionSpec) -> jax.Array:
    whole = _without(spec, how)
    # Only of a `reduced` array is the cotangent unreduced, so that partial sums can be cast before they are summed.
    if x.ndim > 1:  # JAX cannot add an array that is `reduced`, and biases are added
        whole = PartitionSpec(*whole, reduced=frozenset(how.reduce_axes))
    return cast_floating(reshard(narrow(x, how.compute_dtype), whole), x.dtype)


def _scatter_explicit(how: Gathering, spec: PartitionSpec, residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residuals
    how.warn_of_overflow(cotangent.dtype)
    return (cast_floating(reshard(cast_floating(cotangent, how.reduce_dtype), spec), cotangent.dtype),)


_gather_explicit.defvjp(lambda x, how, spec: (_gather_explicit(x, how, spec), None), _scatter_explicit)


def _without(spec: PartitionSpec, how: Gathering) -> PartitionSpec:
    """Returns the sharding without the gathered axes."""
    gathered = {dimension for dimension, _ in how.splits}
    return PartitionSpec(*[None if i in gathered else entry for i, entry in enumerate(spec)])


T = TypeVar("T")


def gather_params(
    params: T, policy: PolicySpec, specs: Any, *, reduce_axes: AxisName, fun: Callable[[T], Any] | None = None
) -> T:
    """Gathers parameters in the compute dtype of a policy, and reduces their gradients in its reduce dtype.

    For fully sharded training in `jax.shard_map`. Called on the shards inside the differentiated function, it returns
    whole parameters in their own dtypes. Forward, a shard is cast to the compute dtype, gathered, and cast back
    exactly. Backward, the gradient is cast to the reduce dtype, summed over `reduce_axes`, and cast back; each device
    gets its shard of the sum, so differentiate a share of the mean loss. Integers and keys are gathered uncast. Float8
    state is replicated, and its gradient is the maximum. `jax.jvp` is not supported.

    Under `jmp_policy.value_and_grad`, `grad` and `optim.minimize`, the matmuls that make gradients output the reduce
    dtype. `jax.grad` keeps the compute dtype, in which float16 may overflow (a warning says so). In a `jax.lax.scan`
    over layers, call it in the body, with the specs of one layer. On a mesh with explicit axes, without
    `jax.shard_map`, `params` and `specs` describe whole arrays, and JAX itself reduces gradients with one dimension.

    Args:
      params: the shards of this device.
      policy: anything that `get_policy` accepts. A map needs `fun`, and one reduce dtype.
      specs: a `jax.P` for each parameter, or for a subtree, as in the `in_specs` of the `jax.shard_map`. A dimension
        that is split over an axis of `reduce_axes` is gathered.
      reduce_axes: the axes of the mesh over which the batch is split.
      fun: the function of the whole parameters that will read them; it is traced, not run. Only parameters that it
        casts to the compute dtype before any other use are cast, so that the result is the same as without a mesh.
        Without `fun`, all wider parameters are cast.

    Returns:
      The whole parameters, in the dtypes and the structure of `params`.

    Raises:
      ValueError: an axis is not a manual (or explicit) axis of the mesh; a spec does not fit its array; `policy` is a
        map with several compute dtypes, and `fun` is missing; float8 state is split.
      TypeError: a leaf of `specs` is not a spec.

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
    apply_reduce_dtype(policy)
    axes, uses_jax_grad = list_axes(reduce_axes), REDUCING.value is None
    structure = jax.tree.structure(params)
    parts = list(_list_parts(params, specs, axes))
    reduce_dtype = read_dtype(policy, "reduce")

    def gather(dtypes: list[np.dtype | None], leaves: list[Any]) -> list[Any]:
        return [
            _gather_part(x, part, Gathering(part.splits, axes, dtype, reduce_dtype, uses_jax_grad=uses_jax_grad))
            for x, part, dtype in zip(leaves, parts, dtypes, strict=True)
        ]

    leaves = [part.array for part in parts]
    if fun is None:
        return structure.unflatten(gather([read_dtype(policy, "compute")] * len(leaves), leaves))
    gather_whole = lambda leaves: structure.unflatten(gather([None] * len(leaves), leaves))
    reads = find_reads(fun, leaves, gather_whole)
    allowed = {each.compute_dtype for each in list_policies(get_policy(policy))}
    dtypes = [next(iter(read)) if read and len(read) == 1 and read <= allowed else None for read in reads]
    return structure.unflatten(gather(dtypes, leaves))


class _Shard(NamedTuple):
    """The shard of a parameter on this device, or the whole parameter on explicit axes."""

    array: jax.Array
    spec: PartitionSpec
    splits: Splits
    is_state: bool
    is_explicit: bool


def _list_parts(params: Any, specs: Any, axes: tuple) -> Iterator[_Shard]:
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
        yield _Shard(array, spec, splits, bool(name), explicit)


def _gather_part(x: jax.Array, part: _Shard, how: Gathering) -> jax.Array:
    if not part.is_state:
        return reshard_leaf(x, how, part.spec) if part.is_explicit else gather_leaf(x, how)
    varying = jax.typeof(x).manual_axis_type.varying
    return x if part.is_explicit else _share(x, tuple(axis for axis in how.reduce_axes if axis not in varying))
