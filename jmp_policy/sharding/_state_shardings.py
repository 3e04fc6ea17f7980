"""Where the state of an optimizer lies, from where its parameters do."""

from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from .._base import PyTree, describe
from .._base.mesh import Spec, spread_specs

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
