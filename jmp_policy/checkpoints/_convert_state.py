"""`convert_state`: fits a restored checkpoint to the state of a run under another policy."""

import difflib
import os
import re
from collections.abc import Callable, Collection, Container
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._base import describe, did_you_mean, escape_controls, is_floating, is_half, list_paths_to, round_to_half
from ..loss_scale import DynamicLossScale
from ..quant import ARRAYS, is_quantized
from ._entries import MEMORIES, SPIKES, Entry, Parameter, Path, list_entries, pair_memories
from ._values import (
    Misfit,
    Moment,
    check_saved_scale,
    convert_value,
    find_moment_roles,
    fit_history,
    is_abstract,
    pair_scales,
)

_MISSING = "is not in the checkpoint"

_INITIAL = dict.fromkeys(("counter", "skipped_steps", "consecutive_skips", *SPIKES), 0) | {
    "loss_scale": 2.0**15,
    "grads_finite": True,
    "updates_finite": True,
    "accepted": True,
}  # of the states of steps that may be skipped, for an abstract target


class Conversion:
    """One conversion: looks up saved entries, and collects the problems."""

    def __init__(self, saved: list[Entry], entries: list[Entry], is_ignored: Callable[[str], bool], target: Any):
        self._saved = {entry.path: entry for entry in saved}
        self._left = dict(self._saved)
        roles = find_moment_roles(target, entries)
        self._saved_pairs: dict[Path, Parameter | Moment] = {**pair_memories(saved), **pair_scales(saved, roles)}
        self._saved_memories = {pair.other.path for pair in self._saved_pairs.values() if isinstance(pair, Parameter)}
        pairs = [*pair_memories(entries).values(), *pair_scales(entries, roles).values()]
        self._pair_of = {entry.path: pair for pair in pairs for entry in (pair.entry, pair.other)}
        self._memories = {pair.other.path for pair in pairs if isinstance(pair, Parameter)}
        self._is_ignored = is_ignored
        self._scales = _find_dynamic_scales(target)
        self._problems: dict[str, str] = {}

    def convert(self, entry: Entry) -> Any:
        """Returns the value of one entry of the target, or notes a problem."""
        # The memory of a parameter is part of its value, so it is converted with the parameter, not with the rest of
        # the optimizer's state. The scales of a moment are converted with the moment.
        pair = self._pair_of.get(entry.path)
        decisive = entry if pair is None else pair.entry
        found = self._take(decisive.path)
        try:
            if self._is_ignored(decisive.name):
                return _keep_target(entry, "is ignored")
            return self._begin(entry) if found is None else self._convert(entry, pair, found)
        except Misfit as misfit:
            self._problems[entry.name] = str(misfit)
            return entry.value

    def list_problems(self) -> dict[str, str]:
        """Lists everything that does not fit, by the names of entries, after all were converted."""
        own = [e.path for e in self._left.values() if _is_own(e, self._saved_memories)]
        left = [e.name for e in self._left.values() if e.path not in own and not self._is_ignored(e.name)]
        problems = self._problems | dict.fromkeys(left, "is in the checkpoint, but not in the target")
        for name, what in self._problems.items():
            if what == _MISSING and (near := difflib.get_close_matches(name, left, 1)):
                problems[name] = f"{what}; the nearest there is {near[0]}"
        return problems

    def _take(self, path: Path) -> Any:
        """Returns the entry that was saved at a path, the arrays of a quantized weight, or None."""
        if path in self._saved:
            self._left.pop(path, None)
            return self._saved[path]
        arrays = {name: self._saved[*path, name] for name in ARRAYS if (*path, name) in self._saved}
        if not {"values", "scale"} <= arrays.keys():
            return None
        for name in arrays:
            self._left.pop((*path, name), None)
        return {name: entry.value for name, entry in arrays.items()}

    def _convert(self, entry: Entry, pair: Parameter | Moment | None, found: Any) -> Any:
        if not isinstance(found, Entry):  # the arrays of a quantized weight
            return convert_value(found, entry.value)
        saved = self._saved_pairs.get(found.path)
        if pair is not None:
            value, other = pair.encode(found, saved)
            return convert_value(value if entry is pair.entry else other, entry.value)
        is_loss_scale = entry.path[-1:] == ("loss_scale",) and entry.name in self._scales
        if is_loss_scale or (entry.part == "float8" and entry.path[-1].endswith("scale")):
            check_saved_scale(found.value)
        if entry.part == "float8" and np.ndim(found.value) == np.ndim(entry.value) > 0:
            return convert_value(fit_history(found.value, entry.value), entry.value)
        value = found.value if saved is None else saved.decode()
        if is_half(entry.value) and is_floating(value):
            value = round_to_half(value, entry.value.dtype)
        if is_loss_scale:
            value = _clip_to_bounds(value, self._scales[entry.name])
        return convert_value(value, entry.value)

    def _begin(self, entry: Entry) -> Any:
        """Returns the initial value of an entry that was not saved. Raises `Misfit` if it should have been saved."""
        if not _is_own(entry, self._memories):
            raise Misfit(_MISSING)
        last, scale, number = entry.path[-1], self._scales.get(entry.name), None
        if entry.part == "float8":
            number = 1.0 if last.endswith("scale") else 0.0
        elif last == "credits" and scale is not None:
            number = scale.hysteresis - 1
        elif entry.part in ("loss_scale", "spikes"):
            number = _INITIAL.get(last)
            number = float(_clip_to_bounds(number, scale)) if last == "loss_scale" and scale is not None else number
        if number is None or not is_abstract(entry.value):
            return _keep_target(entry, _MISSING)
        return convert_value(np.full(entry.value.shape, number, entry.value.dtype), entry.value)


def _is_own(entry: Entry, memories: Container[Path]) -> bool:
    """True if a policy adds an entry, so that it may be missing. A module may have the name of a memory."""
    return entry.path in memories if entry.part in MEMORIES else bool(entry.part)


def _keep_target(entry: Entry, why: str) -> Any:
    if is_abstract(entry.value):
        raise Misfit(f"{why}, and an abstract target has no value for it")
    return entry.value


def _find_dynamic_scales(target: Any) -> dict[str, DynamicLossScale]:
    """Returns the dynamic loss scales of a tree, by the name of each of their arrays."""
    is_scale = lambda node: isinstance(node, DynamicLossScale)
    scales = {}
    for path, node in jax.tree_util.tree_leaves_with_path(target, is_leaf=is_scale):
        for inner, _ in jax.tree_util.tree_leaves_with_path(node) if is_scale(node) else []:
            scales[jax.tree_util.keystr((*path, *inner), simple=True, separator="/")] = node
    return scales


def _clip_to_bounds(value: Any, scale: DynamicLossScale) -> Any:
    return jnp.clip(jnp.asarray(value, jnp.float32), scale.min_loss_scale, scale.max_loss_scale)


T = TypeVar("T")


def convert_state(saved: Any, target: T, *, ignore: str | Collection[str] = ()) -> T:
    """Converts a state that was saved under any policy to the state of a run under another policy.

    Arrays are matched by path and get the dtypes and shardings of the target. Entries that a policy adds to a state are
    converted as follows:

    - Loss scale: a dynamic one keeps its value and count, within the bounds of the target's. If none was saved, the
      target's is used. Skip counters are kept. Either state may be without `loss_scaled`.
    - Half-precision parameters: they and their master weights, remainders or compensations are computed from the exact
      saved values.
    - Moments in 8 bits and quantized weights: kept if the format is the same, else computed from floats, or dequantized
      to floats. The input range of a layer is the saved one, or the target's.
    - Float8 state: starts anew if none was saved. A history of another length keeps the newest values.

    Everything else must be in both states: counters, random keys, moments, running statistics. A value that float16
    cannot hold becomes infinite. Arrays that need no change are shared with `saved` and `target`, not copied.

    Args:
      saved: a restored state: from Orbax without a target, from `flax.serialization.msgpack_restore`, or a state in
        memory.
      target: a new state under the new policy, or its `jax.eval_shape`; in nnx `nnx.state((model, optimizer))`. Pass
        parameters and optimizer state together: half-precision parameters are in both.
      ignore: patterns of paths for which the target keeps its own values. Each covers its subtree: `"opt_state"` resets
        the optimizer of a train state.

    Returns:
      A tree with the types, dtypes and shardings of `target`. Input ranges of a calibrated model come from `saved`. If
      `target` is abstract, the result has arrays, and a dynamic loss scale that was not saved starts at 2**15.

    Raises:
      TypeError: `saved` is not a state, but a path, bytes or `None`.
      ValueError: arrays are missing, left over, or have another shape, or a saved scale is invalid (nan, infinite,
        negative, or zero where it divides); the error lists all of them. Also if a pattern in `ignore` matches nothing,
        or saved master weights fit several parameter trees.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> params = {"w": jnp.float32([0.1, 0.2])}
    >>> saved = {"params": params, "opt_state": optax.sgd(0.1, momentum=0.9).init(params)}
    >>> params = jmp.cast_floating(params, "bfloat16")
    >>> tx = jmp.optim.loss_scaled(jmp.optim.master_weights(optax.sgd(0.1, momentum=0.9)), jmp.NoOpLossScale())
    >>> state = jmp.convert_state(saved, {"params": params, "opt_state": tx.init(params)})
    >>> state["params"]["w"].dtype, state["opt_state"].inner_state.master["w"].tolist() == saved["params"]["w"].tolist()
    (dtype(bfloat16), True)
    """
    if saved is None or isinstance(saved, str | bytes | os.PathLike):
        read = "flax.serialization.msgpack_restore(data)" if isinstance(saved, bytes) else "checkpointer.restore(path)"
        raise TypeError(
            f"convert_state takes a restored state, got {describe(saved)}. For example: convert_state({read}, target)."
        )
    saved_entries, entries = list_entries(saved, target)
    names = {entry.name for entry in (*saved_entries, *entries)}
    is_ignored = _list_ignored(ignore, names).__contains__
    conversion = Conversion(saved_entries, entries, is_ignored, target)
    new = {entry.index: conversion.convert(entry) for entry in entries}
    if problems := conversion.list_problems():
        raise ValueError(_write_problems(problems, names))
    structure = jax.tree.structure(target, is_leaf=is_quantized)
    return structure.unflatten([new[index] for index in range(len(new))])


def _list_ignored(ignore: str | Collection[str], names: Collection[str]) -> set[str]:
    """Lists the names that a pattern covers. A pattern that is not valid or covers nothing is a `ValueError`."""
    ignored = set()
    for pattern in [ignore] if isinstance(ignore, str) else ignore:
        try:
            covers = re.compile(pattern).fullmatch
            covered = {name for name in names if any(map(covers, list_paths_to(name)[1:]))}
        except re.error as error:
            raise ValueError(
                f"{pattern!r} of ignore is not a valid pattern: {error}. For example: ignore='opt_state'."
            ) from None
        if not covered:
            known = dict.fromkeys(path for name in sorted(names) for path in list_paths_to(name)[1:])
            raise ValueError(f"{pattern!r} of ignore matches no path. {did_you_mean(pattern, known)}")
        ignored |= covered
    return ignored


def _write_problems(problems: dict[str, str], names: Collection[str]) -> str:
    lines = "".join(f"\n  {escape_controls(name, keep='') or 'it'} {what}" for name, what in sorted(problems.items()))
    return (
        f"The checkpoint does not fit the target:{lines}\n"
        "Make the target like the state of the saved run, except for the policy. Or keep the target's values for these "
        f"paths: convert_state(saved, target, ignore={_find_common_paths(problems, names)!r})."
    )


def _find_common_paths(problems: Collection[str], names: Collection[str]) -> list[str]:
    """Returns the paths that hold the problems and nothing that fits, or their first names if there are many."""
    fitting = [f"{name}/" for name in names if name not in problems]
    found = []
    for name in sorted(problems):
        inside_out = reversed(list_paths_to(name)[1:])
        bad = [path for path in inside_out if not any(other.startswith(f"{path}/") for other in fitting)]
        found.append(bad[-1] if bad else name)
    paths = list(dict.fromkeys(found))
    return paths if len(paths) <= _MOST_PATHS else list(dict.fromkeys(path.partition("/")[0] for path in paths))


_MOST_PATHS = 6  # an optimizer that differs in more paths is ignored as a whole
