"""Trees of shardings beside trees of arrays."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .._messages import describe
from .._trees import PyTree

Spec = NamedSharding | PartitionSpec


def spread_specs(specs: PyTree, tree: PyTree, name: str) -> list[Any]:
    """The specs of the leaves of a tree, in their order.

    Args:
      specs: a tree of specs; one may stand for all that is below its place, as in the `in_specs` of `jax.shard_map`.
      tree: a tree of arrays, or of what stands for them.
      name: what `specs` was given as.

    Raises:
      ValueError: the trees do not fit.
      TypeError: a leaf of `specs` is no spec.

    >>> spread_specs({"a": PartitionSpec("d"), "b": PartitionSpec()}, {"a": 1, "b": [2, 3]}, "specs")
    [P('d',), P(), P()]
    """
    given = dict(jax.tree_util.tree_leaves_with_path(specs))
    for path, spec in given.items():
        if not isinstance(spec, Spec):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} must be a PartitionSpec or a NamedSharding, got {describe(spec)}. "
                "For example: jax.P('fsdp', None), or jax.P() for an array that all devices have."
            )
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    found = [next((path[:n] for n in range(len(path), -1, -1) if path[:n] in given), None) for path in paths]
    missing = [path for path, prefix in zip(paths, found, strict=True) if prefix is None]
    unused = [path for path in given if path not in found]
    if missing or unused:
        words = [f"has none for {_show(missing)}"] * bool(missing) + [f"has {_show(unused)} beside it"] * bool(unused)
        raise ValueError(
            f"{name} does not fit the parameters: it {', and '.join(words)}. It has one spec for each array, or one "
            f"for all that is below a place, for example: {name} = jax.tree.map(lambda _: jax.P(), params)."
        )
    return [given[prefix] for prefix in found if prefix is not None]


def _show(paths: Sequence[tuple]) -> str:
    names = ", ".join(jax.tree_util.keystr(path) or "the whole" for path in paths[:3])
    return f"{names} and {len(paths) - 3} more" if len(paths) > 3 else names
