"""The conversion of one state: each entry of the target from what was saved, and an account of what does not fit."""

import difflib
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..loss_scale import DynamicLossScale
from ..numerics._nonfinite import Provenance
from ..quant._weights import ARRAYS
from ._entries import MEMORIES, Entry, Path
from ._memories import Parameter, pair_memories
from ._moments import Moment, find_roles, pair_scales
from ._values import Misfit, check_scale, convert_value, fit_history, is_abstract

_MISSING = "is not in the checkpoint"

_BEGINNINGS = {
    "loss_scale": 2.0**15,
    "counter": 0,
    "grads_finite": True,
    "skipped_steps": 0,
    "consecutive_skips": 0,
    "steps": 0,
    "nonfinite_step": 0,
}
"""Where the parts of a loss-scaled state begin, for a target that has no values."""


class Conversion:
    """What `convert_state` knows of one conversion.

    Args:
      saved: the entries of what was saved.
      entries: those of the target.
      is_ignored: whether the entries of a name begin anew.
      target: the target itself.
    """

    def __init__(self, saved: list[Entry], entries: list[Entry], is_ignored: Callable[[str], bool], target: Any):
        self._saved = {entry.path: entry for entry in saved}
        self._left = dict(self._saved)
        self._saved_params = pair_memories(saved)
        self._params = pair_memories(entries)
        self._memory_of = {p.memory.path: p for p in self._params.values() if p.memory is not None}
        roles = find_roles(target, entries)
        self._saved_moments = pair_scales(saved, roles)
        moments = pair_scales(entries, roles).values()
        self._moment_of = {entry.path: m for m in moments for entry in (m.entry, m.scale) if entry is not None}
        self._is_ignored = is_ignored
        self._scales = _find_scales(target)
        self._problems: dict[str, str] = {}

    def convert(self, entry: Entry) -> Any:
        """The value of one entry of the target; its own value, and a problem that is noted, if there is none."""
        # The memory of a parameter is a part of its value: it follows the parameter, and not the optimizer's state.
        # The scales of a moment follow the moment.
        param = self._memory_of.get(entry.path)
        moment = self._moment_of.get(entry.path)
        decisive = param.entry if param is not None else moment.entry if moment is not None else entry
        found = self._take(decisive.path)
        try:
            if self._is_ignored(decisive.name):
                return _keep(entry, "is to be ignored")
            return self._begin(entry) if found is None else self._convert(entry, param, found)
        except Misfit as misfit:
            self._problems[entry.name] = str(misfit)
            return entry.value

    def list_problems(self) -> dict[str, str]:
        """What does not fit, by the names of entries, after all were converted."""
        memories = {p.memory.path for p in self._saved_params.values() if p.memory is not None}
        left = [e.name for e in self._left.values() if not (_is_own(e, memories) or self._is_ignored(e.name))]
        problems = self._problems | dict.fromkeys(left, "is in the checkpoint, and not in the target")
        for name, what in self._problems.items():
            if what == _MISSING and (near := difflib.get_close_matches(name, left, 1)):
                problems[name] = f"{what}; the nearest there is {near[0]}"
        return problems

    def _take(self, path: Path) -> Any:
        """What was saved at a path: an entry, the arrays of a quantized weight, or `None`."""
        if path in self._saved:
            self._left.pop(path, None)
            return self._saved[path]
        arrays = {name: self._saved[*path, name] for name in ARRAYS if (*path, name) in self._saved}
        if not {"values", "scale"} <= arrays.keys():
            return None
        for name in arrays:
            self._left.pop((*path, name), None)
        return {name: entry.value for name, entry in arrays.items()}

    def _convert(self, entry: Entry, param: Parameter | None, found: Any) -> Any:
        if not isinstance(found, Entry):  # the arrays of a quantized weight
            return convert_value(found, entry.value)
        saved = self._saved_params.get(found.path, Parameter(found))
        if param is not None:
            return convert_value(param.narrow(saved)[1], entry.value)
        moment, saved_moment = self._moment_of.get(entry.path), self._saved_moments.get(found.path, Moment(found))
        if moment is not None:
            value, scale = moment.narrow(saved_moment)
            return convert_value(value if entry is moment.entry else scale, entry.value)
        if saved_moment.is_quantized:
            return convert_value(saved_moment.widen(), entry.value)
        is_loss_scale = entry.path[-1:] == ("loss_scale",) and entry.name in self._scales
        if is_loss_scale or (entry.part == "float8" and entry.path[-1].endswith("scale")):
            check_scale(found.value)
        if entry.part == "float8" and np.ndim(found.value) == np.ndim(entry.value) > 0:
            return convert_value(fit_history(found.value, entry.value), entry.value)
        value = self._params.get(entry.path, Parameter(entry)).narrow(saved)[0]
        if is_loss_scale:
            value = _clip(value, self._scales[entry.name])
        return convert_value(value, entry.value)

    def _begin(self, entry: Entry) -> Any:
        """The value of an entry that was not saved.

        Raises:
          Misfit: it should have been.
        """
        if not _is_own(entry, self._memory_of):
            raise Misfit(_MISSING)
        number = self._find_beginning(entry)
        if number is None or not is_abstract(entry.value):
            return _keep(entry, _MISSING)
        return convert_value(np.full(entry.value.shape, number, entry.value.dtype), entry.value)

    def _find_beginning(self, entry: Entry) -> float | None:
        """The number that a part of the library begins at; `None` if that is not known."""
        last, scale = entry.path[-1], self._scales.get(entry.name)
        if entry.part == "float8":
            return 1.0 if last.endswith("scale") else 0.0
        if last == "credits" and scale is not None:
            return scale.hysteresis - 1
        if entry.part == "loss_scale" and entry.path[-2:-1] == ("provenance",):
            return float(np.ravel(getattr(Provenance.empty(), last))[0])
        number = _BEGINNINGS.get(last) if entry.part == "loss_scale" else None
        return float(_clip(number, scale)) if last == "loss_scale" and scale is not None else number


def _is_own(entry: Entry, memories: Container[Path]) -> bool:
    """Whether a policy makes an entry, and its absence means nothing; a module may be called like a memory."""
    return entry.path in memories if entry.part in MEMORIES else bool(entry.part)


def _keep(entry: Entry, why: str) -> Any:
    if is_abstract(entry.value):
        raise Misfit(f"{why}, and an abstract target has no value for it")
    return entry.value


def _find_scales(target: Any) -> dict[str, DynamicLossScale]:
    """The dynamic loss scales of a tree, by the name of each of their arrays."""
    is_scale = lambda node: isinstance(node, DynamicLossScale)
    scales = {}
    for path, node in jax.tree_util.tree_leaves_with_path(target, is_leaf=is_scale):
        for inner, _ in jax.tree_util.tree_leaves_with_path(node) if is_scale(node) else []:
            scales[jax.tree_util.keystr((*path, *inner), simple=True, separator="/")] = node
    return scales


def _clip(value: Any, scale: DynamicLossScale) -> Any:
    return jnp.clip(jnp.asarray(value, jnp.float32), scale.min_loss_scale, scale.max_loss_scale)
