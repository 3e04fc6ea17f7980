"""Entries of a state by path, and the optimizer memory of each half-precision parameter."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .._base import OVERWRITE, is_half, name_state
from ..optim import COMPENSATED, COPIES, SPLIT, SpikeState, Storage
from ..quant import is_quantized

Path = tuple[str, ...]
Nested = Any  # dicts of dicts, or of indices into `jax.tree.leaves`

SKIPS = frozenset({"grads_finite", "skipped_steps", "consecutive_skips"})  # fields of every `LossScaledState`
SPIKES = frozenset(SpikeState._fields) - {"inner_state"}
_DYNAMIC_SCALE = {"loss_scale", "counter", "credits"}
MEMORIES = ("master", "remainder", "compensation")  # fields of `master_weights`, its mode "split", and `kahan`


@dataclasses.dataclass(frozen=True)
class Entry:
    """A leaf of a state, or a quantized weight."""

    name: str  # its path as users read it, `opt_state/inner_state/0/mu/w`
    path: Path  # the path that it has under every policy, `("opt_state", "0", "mu", "w")`
    value: Any  # the leaf
    # The part of this library that it belongs to: `loss_scale`, the `key` of stochastic rounding, the `scales` of 8-bit
    # moments, `float8`, or one of `MEMORIES`; or `""`.
    part: str
    inside: int  # the length of the prefix of the path that leads to the transformation with this memory
    index: int  # its number in `jax.tree.leaves`


def list_entries(saved: Any, target: Any) -> tuple[list[Entry], list[Entry]]:
    saved_nested, saved_values = _nest(saved)
    nested, values = _nest(target)
    return _name_entries(_align_float8(saved_nested, nested), saved_values), _name_entries(nested, values)


def _nest(tree: Any) -> tuple[Nested, list[Any]]:
    """Converts all containers to dicts."""
    root: dict[str, Any] = {}
    keyed = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)  # the arrays of a weight are one entry
    for index, (keys, _) in enumerate(keyed):
        *around, last = ["root", *(jax.tree_util.keystr((key,), simple=True) for key in keys)]
        node = root
        for key in around:
            node = node.setdefault(key, {})
        node[last] = index
    return root.get("root", {}), [leaf for _, leaf in keyed]


def _align_float8(saved: Nested, target: Nested) -> Nested:
    """Moves saved parameters to their place in the target."""
    if not isinstance(saved, dict) or not isinstance(target, dict):
        return saved
    pair = {"params", OVERWRITE}  # in place of the parameters of a linen train state with float8 layers
    if pair <= target.keys() and not pair & saved.keys():
        saved = {"params": saved}
    elif pair == saved.keys() and not pair & target.keys():
        saved = saved["params"]
    return {key: _align_float8(child, target.get(key)) for key, child in saved.items()}


def _name_entries(nested: Nested, values: list[Any]) -> list[Entry]:
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
    """Returns the fields of a state that only our transformations have, and the part of the library they belong to."""
    fields = node.keys() - {"inner_state"}
    if (
        SKIPS <= fields <= SKIPS | {"loss_scale", "updates_finite"}
        or {"loss_scale", "counter"} <= fields <= _DYNAMIC_SCALE
    ):
        return fields, "loss_scale"
    if fields == SPIKES:
        return fields, "spikes"
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


_STORAGES: dict[str, Storage] = dict(zip(MEMORIES, (COPIES, SPLIT, COMPENSATED), strict=True))


@dataclasses.dataclass(frozen=True)
class Pair:
    """An entry whose value is in two arrays. `decode` returns the value, and `encode` both arrays for a saved entry."""

    entry: Entry
    other: Entry


class Parameter(Pair):
    """A half-precision parameter and its memory."""

    def decode(self) -> Any:
        param, memory = jnp.asarray(self.entry.value), jnp.asarray(self.other.value)
        return _STORAGES[self.other.part].decode(param, memory)

    def encode(self, found: Entry, saved: Any) -> tuple[Any, Any]:
        like = self.entry.value
        if saved is not None and saved.other.part == self.other.part and saved.entry.value.dtype == like.dtype:
            return saved.entry.value, saved.other.value
        wide = jnp.asarray(found.value if saved is None else saved.decode(), jnp.float32)
        return _STORAGES[self.other.part].encode(wide, jax.ShapeDtypeStruct(like.shape, like.dtype), None)


def pair_memories(entries: Iterable[Entry]) -> dict[Path, Parameter]:
    """Finds the parameters of a state that have a memory, by their paths.

    The memory is a tree like the parameters, which are outside of the optimizer's state under another name. If several
    trees match (an average of the parameters), the name `params` decides, then the place beside the optimizer's state.
    """
    of_optimizer: dict[Path, list[Entry]] = defaultdict(list)
    by_path = {}
    for entry in entries:
        by_path[entry.path] = entry
        if entry.part in MEMORIES:
            of_optimizer[entry.path[: entry.inside + 1]].append(entry)
    found = {}
    for (*state, _), memories in of_optimizer.items():
        start = _find_parameters(by_path, tuple(state), memories)
        if start is not None:
            for memory in memories:
                param = by_path[start + _relative(memory)]
                found[param.path] = Parameter(param, memory)
    return found


def _find_parameters(by_path: dict[Path, Entry], state: Path, memories: list[Entry]) -> Path | None:
    """Returns the path of the tree that these memories belong to, or None."""
    first = _relative(memories[0])
    ends_like_it = (path for path in by_path if path[len(path) - len(first) :] == first)
    starts = [path[: len(path) - len(first)] for path in ends_like_it if path[: len(state)] != state]
    fitting = [start for start in starts if all(_fits(by_path.get(start + _relative(m)), m) for m in memories)]
    named = [start for start in fitting if "params" in start]
    if len(named) > 1:
        named = [start for start in named if start[: start.index("params")] == state[: start.index("params")]]
    if len(fitting) > 1 and len(named) != 1:
        names = ", ".join(repr("/".join(start)) for start in fitting)
        raise ValueError(
            f"The memory at {'/'.join((*state, memories[0].part))!r} may belong to the parameters at {names}. Name the "
            "trained parameters 'params', beside the optimizer state, in the saved state and in the target. "
            "For example: convert_state({'params': saved[0], 'opt_state': saved[1], 'average': saved[2]}, "
            "{'params': params, 'opt_state': opt_state, 'average': average})."
        )
    return next(iter(named or fitting), None)


def _relative(memory: Entry) -> Path:
    return memory.path[memory.inside + 1 :]


def _fits(param: Entry | None, memory: Entry) -> bool:
    return param is not None and not param.part and is_half(param.value) and param.value.shape == memory.value.shape
