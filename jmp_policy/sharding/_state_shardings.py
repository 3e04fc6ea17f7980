"""Shardings of an optimizer's state, and the dtypes in which a policy moves values between devices."""

from collections.abc import Container
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from .._base import PyTree, Spec, describe, is_wider, meet_policy, spread_specs
from ..policy import PolicySpec, get_policy, list_policies


def read_dtype(spec: PolicySpec, kind: Literal["compute", "reduce"]) -> np.dtype | None:
    """Returns a dtype of a policy, or of all policies of a map; raises if these have several."""
    found = {getattr(policy, f"{kind}_dtype") for policy in list_policies(get_policy(spec))}
    if len(found) > 1:
        names = " and ".join(sorted("none" if dtype is None else dtype.name for dtype in found))
        raise ValueError(
            f"The policies of this map have several dtypes for {kind}: {names}. A collective has one dtype for a whole "
            "tree, not one per module: pass a single policy, for example: "
            "'params=float32,compute=bfloat16,reduce=float32'."
        )
    return next(iter(found))


def apply_reduce_dtype(spec: PolicySpec) -> None:
    """Makes the matmuls of gradients output the reduce dtype, if it is wider than the compute dtype."""
    for policy in list_policies(get_policy(spec)):
        compute_dtype, reduce_dtype = policy.compute_dtype, policy.reduce_dtype
        if compute_dtype is None or reduce_dtype is None or is_wider(reduce_dtype, compute_dtype):
            meet_policy(compute_dtype, reduce_dtype)


Path = tuple[Any, ...]


def state_shardings(tx: optax.GradientTransformation, params: PyTree, shardings: PyTree) -> Any:
    """Returns the shardings of an optimizer's state: arrays are sharded like their parameters, everything else is
    replicated.

    An array of the state belongs to a parameter if its path ends with the path of the parameter and the shapes agree:
    moments, master weights, remainders, compensations and sums of microbatches, in any wrapper of `jmp_policy.optim` or
    optax. The scales of `optim.quantize_state`, with their shorter axes, are split like their parameter if each device
    has whole blocks. Counters, keys, hyperparameters, the loss scale, and the factored moments of adafactor are
    replicated.

    Args:
      tx: the optimizer.
      params: the parameters, or `jax.ShapeDtypeStruct`s of them, with float8 state if there is any.
      shardings: a `jax.NamedSharding` for each parameter or subtree, or a `jax.P` to get the `in_specs` of a
        `jax.shard_map`.

    Returns:
      A tree of the structure of `tx.init(params)`. `jax.jit(tx.init, out_shardings=...)(params)` makes the state in
      place: no device ever holds all of it.

    Raises:
      ValueError: `shardings` does not fit `params`.
      TypeError: a leaf of `shardings` is neither, or `tx` is not an optax transformation.

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
    first, replicated = specs[0] if specs else None, PartitionSpec()
    if isinstance(first, NamedSharding):
        replicated = NamedSharding(first.mesh, replicated)
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
    before = path[: len(path) - len(end)]  # ends with `.scales[0]` for a scale
    is_scale = len(before) > 1 and getattr(before[-2], "name", None) == "scales"
    is_like = leaf.shape == shape or (end in in_bytes and is_scale and _divides(spec, leaf.shape))
    return spec if is_like else replicated


def _find_end(path: Path, places: Container[Path]) -> Path | None:
    """Returns the longest suffix of a path that is the path of a parameter."""
    return next((path[n:] for n in range(len(path) + 1) if path[n:] in places), None)


def _divides(spec: Spec, shape: tuple[int, ...]) -> bool:
    """True if an array of this shape can be split so. `jax.shard_map` checks a `PartitionSpec` itself."""
    try:
        if isinstance(spec, NamedSharding):
            spec.shard_shape(shape)
    except ValueError:
        return False
    return True
