"""The entries of a state: its arrays by the path that they have under every policy and after every saver.

A saver turns tuples and classes into lists or dicts, a Variable into a dict of its `value`, and drops what has no
arrays. A policy decides whether an optimizer is inside `loss_scaled`, and inside a transformation for half-precision
parameters. So an entry's path leaves out Variables and these transformations, and what is theirs alone is marked. The
fields of their states tell them: that is all that a saver keeps of a class.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from .._base import OVERWRITE, name_state
from ..quant import QuantizedArray

Path = tuple[str, ...]
Nested = Any
"""Dicts by name, of dicts or of the numbers of leaves in `jax.tree.leaves`."""

SKIPS = frozenset({"grads_finite", "skipped_steps", "consecutive_skips"})
"""The fields of a `LossScaledState` that all of them have."""

_PROVENANCE = frozenset({"steps", "nonfinite_step", "provenance"})
"""The fields beside them of a `ProvenanceState`."""

MEMORIES = ("master", "remainder", "compensation")
"""The fields in which `master_weights`, its mode `"split"` and `kahan` keep what half-precision parameters lack."""

_DYNAMIC_SCALE = {"loss_scale", "counter", "credits"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A leaf of a state, or a quantized weight.

    Attributes:
      name: its path as users read it, `opt_state/inner_state/0/mu/w`.
      path: the path that it has under every policy, `("opt_state", "0", "mu", "w")`.
      value: what stands there.
      part: what of the library it belongs to, `""` for what every state has: a `loss_scale` and the counters beside
        it, the `key` of stochastic rounding, the `scales` of moments in 8 bits, `float8` state, or one of `MEMORIES`.
      inside: how long the beginning of the path is that leads to the transformation whose memory it is.
      index: its number in `jax.tree.leaves`.
    """

    name: str
    path: Path
    value: Any
    part: str
    inside: int
    index: int


def list_entries(saved: Any, target: Any) -> tuple[list[Entry], list[Entry]]:
    """Lists the entries of what was saved and of what it is to become."""
    saved_nested, saved_values = _nest(saved)
    nested, values = _nest(target)
    return _list_entries(_align_float8(saved_nested, nested), saved_values), _list_entries(nested, values)


def is_whole(node: Any) -> bool:
    """Whether a node is one entry: a quantized weight, whose arrays belong together."""
    return isinstance(node, QuantizedArray)


def _nest(tree: Any) -> tuple[Nested, list[Any]]:
    """Makes dicts of all containers."""
    root: dict[str, Any] = {}
    keyed = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_whole)
    for index, (keys, _) in enumerate(keyed):
        *around, last = ["root", *(jax.tree_util.keystr((key,), simple=True) for key in keys)]
        node = root
        for key in around:
            node = node.setdefault(key, {})
        node[last] = index
    return root.get("root", {}), [leaf for _, leaf in keyed]


def _align_float8(saved: Nested, target: Nested) -> Nested:
    """Gives the parameters of what was saved the place that they have in the target.

    A linen train state holds `{"params": ..., "_overwrite_with_gradient": ...}` for its parameters if layers have
    float8 state, and the parameters themselves if none has.
    """
    if not isinstance(saved, dict) or not isinstance(target, dict):
        return saved
    pair = {"params", OVERWRITE}
    if pair <= target.keys() and not pair & saved.keys():
        saved = {"params": saved}
    elif pair == saved.keys() and not pair & target.keys():
        saved = saved["params"]
    return {key: _align_float8(child, target.get(key)) for key, child in saved.items()}


def _list_entries(nested: Nested, values: list[Any]) -> list[Entry]:
    numbers = jax.tree.leaves(nested)
    float8 = {index for index, name in zip(numbers, name_state(nested), strict=True) if name}

    def walk(node: Nested, name: Path, path: Path, part: str = "", inside: int = 0) -> Iterator[Entry]:
        node = _skip_variable(node)
        if not isinstance(node, dict):
            part = "float8" if node in float8 else part
            yield Entry("/".join(name), path, values[node], part, inside, node)
            return
        own, of = (set(), "") if part else _find_own_fields(node, values)
        for key, child in node.items():
            if key == "inner_state" and (own or len(node) == 1):
                yield from walk(child, (*name, key), path, part, inside)
            else:
                part_here, inside_here = (of, len(path)) if key in own else (part, inside)
                yield from walk(child, (*name, key), (*path, key), part_here, inside_here)

    return list(walk(nested, (), ()))


def _skip_variable(node: Nested) -> Nested:
    while isinstance(node, dict) and node.keys() == {"value"}:
        node = node["value"]
    return node


def _find_own_fields(node: dict[str, Any], values: list[Any]) -> tuple[set[str], str]:
    """The fields of a state that only its transformation has, and the part of the library that they belong to."""
    fields = node.keys() - {"inner_state"}
    if SKIPS <= fields <= SKIPS | _PROVENANCE | {"loss_scale"} or {"loss_scale", "counter"} <= fields <= _DYNAMIC_SCALE:
        return fields, "loss_scale"
    if {"scales"} <= fields <= {"scales", "key"} and isinstance(_skip_variable(node["scales"]), dict):
        return fields, "scales"
    if len(fields) != 1:
        return set(), ""
    (field,) = fields
    if field in MEMORIES:
        return fields, field
    key = _skip_variable(node[field])
    is_key = field == "key" and not isinstance(key, dict) and getattr(values[key], "dtype", None) == "uint32"
    return (fields, "key") if is_key else (set(), "")
