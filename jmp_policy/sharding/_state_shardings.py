"""The shardings of an optimizer's state, and the dtypes in which a policy moves values between devices."""

from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._base import PyTree, Spec, describe, is_floating_dtype, is_wider, meet_reduce_dtype, spread_specs
from ..policy import Policy, PolicyMap, PolicySpec, get_policy


def read_reduce_dtype(policy: PolicySpec) -> np.dtype | None:
    """The dtype that sums over devices are taken in; `None` for that of the numbers themselves.

    Raises:
      ValueError: a map whose policies have several.
    """
    return _read_one(policy, "reduce_dtype", "reduce")


def read_compute_dtype(policy: PolicySpec) -> np.dtype | None:
    """The dtype that parameters are gathered in; `None` for that of the parameters themselves.

    Raises:
      ValueError: a map whose policies have several.
    """
    return _read_one(policy, "compute_dtype", "compute")


def list_compute_dtypes(policy: PolicySpec) -> set[np.dtype]:
    """The dtypes that modules of a model compute in under a policy or a map."""
    return {one.compute_dtype for one in list_policies(policy) if one.compute_dtype is not None}


def widen_products(spec: PolicySpec) -> None:
    """Has the products that make gradients hand them over in the reduce dtype, where that is wider than theirs."""
    for policy in list_policies(spec):
        compute_dtype, reduce_dtype = policy.compute_dtype, policy.reduce_dtype
        if compute_dtype is None or reduce_dtype is None or is_wider(reduce_dtype, compute_dtype):
            meet_reduce_dtype(policy.reduce_dtype)


def cast_leaf(leaf: jax.Array, dtype: np.dtype | None) -> jax.Array:
    """An array in a dtype, if both are real floating ones."""
    if dtype is None or leaf.dtype == dtype or not is_floating_dtype(leaf.dtype):
        return leaf
    return lax.convert_element_type(leaf, dtype)


def _read_one(spec: PolicySpec, field: str, key: str) -> np.dtype | None:
    found = {getattr(policy, field) for policy in list_policies(spec)}
    if len(found) > 1:
        names = " and ".join(sorted("none" if dtype is None else dtype.name for dtype in found))
        raise ValueError(
            f"The policies of this map have several dtypes for {key}: {names}. Numbers are exchanged between devices "
            "for a whole tree, not for a module: hand over one policy, for example: "
            "'params=float32,compute=bfloat16,reduce=float32'."
        )
    return next(iter(found))


def list_policies(spec: PolicySpec) -> list[Policy]:
    """The policies of a map, or the one that a spec is."""
    policy = get_policy(spec)
    if not isinstance(policy, PolicyMap):
        return [policy]
    default = [] if policy.default is None else [policy.default]
    return [*(rule.policy for rule in policy.rules), *default]


Path = tuple[Any, ...]


def state_shardings(tx: optax.GradientTransformation, params: PyTree, shardings: PyTree) -> Any:
    """The shardings of an optimizer's state: its arrays lie where their parameters do, and all else on every device.

    An array of the state belongs to a parameter if its path ends with the path of the parameter and it has the same
    shape: moments, master weights, remainders, compensations and sums of microbatches, in any wrapper of
    `jmp_policy.optim` or of optax. The scales of `optim.quantize_state`, whose axes are shorter, are split as their
    parameter is if each device has whole blocks. Counters, keys, hyperparameters, the loss scale and its counters are
    replicated; so are factored moments (adafactor's rows and columns), which are vectors for a matrix.

    Args:
      tx: the optimizer, as it will be used.
      params: the parameters, or `jax.ShapeDtypeStruct`s of them; float8 state may be among them.
      shardings: a `jax.NamedSharding` for each parameter; or a `jax.P`, where the result is to be the `in_specs` of a
        `jax.shard_map`. One may stand for all that is below its place.

    Returns:
      A tree of the structure of `tx.init(params)`. `jax.jit(tx.init, out_shardings=...)(params)` makes the state in
      place, and no device ever has the whole.

    Raises:
      ValueError: `shardings` does not fit `params`.
      TypeError: a leaf of `shardings` is neither, or `tx` is no optax transformation.

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.loss_scaled(jmp.optim.master_weights(optax.adam(1e-3)), jmp.DynamicLossScale())
    >>> params = {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}
    >>> specs = jmp.sharding.state_shardings(tx, params, {"w": jax.P("fsdp", None)})
    >>> specs.inner_state.master["w"], specs.inner_state.inner_state[0].mu["w"], specs.loss_scale.loss_scale
    (P('fsdp', None), P('fsdp', None), P())
    """
    if not hasattr(tx, "init"):
        raise TypeError(f"tx must be an optax transformation, got {describe(tx)}. For example: optax.adamw(1e-3).")
    specs = spread_specs(shardings, params, "shardings")
    replicated = _replicate(specs)
    paths = jax.tree_util.tree_leaves_with_path(params)
    places = {path: (leaf.shape, spec) for (path, leaf), spec in zip(paths, specs, strict=True)}
    state, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, params))
    in_bytes = {_find_end(path, places) for path, leaf in state if leaf.dtype == jnp.uint8}
    return structure.unflatten([_find_spec(path, leaf, places, in_bytes, replicated) for path, leaf in state])


def _find_spec(
    path: Path, leaf: Any, places: dict[Path, tuple[Any, Spec]], in_bytes: Container[Path | None], replicated: Spec
) -> Spec:
    end = _find_end(path, places)
    if end is None:
        return replicated
    shape, spec = places[end]
    is_like = leaf.shape == shape or (end in in_bytes and _is_scale(path, end) and _divides(spec, leaf.shape))
    return spec if is_like else replicated


def _find_end(path: Path, places: Container[Path]) -> Path | None:
    """The longest end of a path that is a parameter's: of `mu["block"]["w"]`, not the `["w"]` beside the block."""
    return next((path[n:] for n in range(len(path) + 1) if path[n:] in places), None)


def _is_scale(path: Path, end: Path) -> bool:
    """Whether a path is `.scales[0]` and the path of a parameter."""
    before = path[: len(path) - len(end)]
    return len(before) > 1 and getattr(before[-2], "name", None) == "scales"


def _divides(spec: Spec, shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape can be split so. In `jax.shard_map`, which says so itself, scales have to be."""
    try:
        if isinstance(spec, NamedSharding):
            spec.shard_shape(shape)
    except ValueError:
        return False
    return True


def _replicate(specs: list[Spec]) -> Spec:
    """The spec of what every device has, on the mesh of the others."""
    first = specs[0] if specs else PartitionSpec()
    return NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else PartitionSpec()
