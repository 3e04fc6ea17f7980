"""Trees of shardings beside trees of arrays."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .._messages import describe
from .._trees import PyTree
from ._mapped_axes import AxisName, list_axes

Spec = NamedSharding | PartitionSpec

Splits = tuple[tuple[int, tuple[AxisName, ...]], ...]
"""The dimensions of an array that are split, each with the axes that it is split over."""


def spread_specs(specs: PyTree, tree: PyTree, name: str = "specs") -> list[Any]:
    """The specs of the leaves of a tree, in their order.

    Args:
      specs: a tree of specs; one may stand for all that is below its place, as in the `in_specs` of `jax.shard_map`.
      tree: a tree of arrays, or of what stands for them.
      name: what `specs` was given as.

    Raises:
      ValueError: the trees do not fit.
      TypeError: a leaf of `specs` is no spec.

    >>> spread_specs({"a": PartitionSpec("d"), "b": PartitionSpec()}, {"a": 1, "b": [2, 3]})
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


def complete_spec(spec: Spec, ndim: int, where: str) -> PartitionSpec:
    """A spec that has an entry for each dimension of an array.

    Raises:
      ValueError: it has more.
    """
    entries = tuple(spec.spec if isinstance(spec, NamedSharding) else spec)
    if len(entries) > ndim:
        raise ValueError(
            f"{where} is {PartitionSpec(*entries)}, for an array of {ndim} dimensions. In a scan over layers, one "
            "layer has a dimension less than all of them: jax.P(*spec[1:])."
        )
    return PartitionSpec(*entries, *[None] * (ndim - len(entries)))


def find_splits(spec: PartitionSpec, axes: tuple, where: str) -> Splits:
    """The dimensions that are split over some axes.

    Raises:
      ValueError: one is split over others, too.
    """
    splits = []
    for dimension, entry in enumerate(spec):
        own = list_axes(entry)
        if set(own) & set(axes):
            if not set(own) <= set(axes):
                raise ValueError(
                    f"{where} splits dimension {dimension} over {', '.join(own)}, of which only some are in "
                    f"reduce_axes, {', '.join(map(str, axes))}. Split another dimension over the others."
                )
            splits.append((dimension, own))
    return tuple(splits)


def _show(paths: Sequence[tuple]) -> str:
    names = ", ".join(jax.tree_util.keystr(path) or "the whole" for path in paths[:3])
    return f"{names} and {len(paths) - 3} more" if len(paths) > 3 else names
