"""Moments in 8 bits with their scales: which belong together, and both in every form."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from ..optim._moments import CODES, Blocks, Shape, dequantize, find_role, list_roles, quantize
from ._entries import Entry, Path, is_whole
from ._values import Misfit


@dataclasses.dataclass(frozen=True)
class Moment:
    """A moment of an optimizer, and its scales if `quantize_state` has any for it.

    Attributes:
      entry: where it stands.
      scale: where its scales stand; a one, where the moment is left as it is.
      role: what it is a moment of.
    """

    entry: Entry
    scale: Entry | None = None
    role: str = ""

    @property
    def is_quantized(self) -> bool:
        """Whether it is codes."""
        return self.scale is not None and self.entry.value.dtype == jnp.uint8

    def widen(self) -> Any:
        """Its value: float32 if it is codes, else as it is stored."""
        if self.scale is None or not self.is_quantized:
            return self.entry.value
        blocks = Blocks(jnp.asarray(self.entry.value), jnp.asarray(self.scale.value))
        return dequantize(blocks, CODES[self.role], self._sides)

    def narrow(self, saved: "Moment") -> tuple[Any, Any]:
        """What stands here and in the scales for a saved moment; both bit for bit if it was saved in this form."""
        if self.scale is None or not self.is_quantized:
            return saved.widen(), None if self.scale is None else jnp.ones(self.scale.value.shape, jnp.float32)
        if saved.scale is not None and saved.is_quantized and saved.scale.value.shape == self.scale.value.shape:
            return saved.entry.value, saved.scale.value
        if saved.entry.value.shape != self.entry.value.shape:
            raise Misfit(f"was saved in the shape {saved.entry.value.shape}, the target has {self.entry.value.shape}")
        return quantize(jnp.asarray(saved.widen(), jnp.float32), CODES[self.role], self._sides)

    @property
    def _sides(self) -> Shape:
        assert self.scale is not None
        lengths = zip(self.entry.value.shape, self.scale.value.shape, strict=True)
        return tuple(length // max(count, 1) for length, count in lengths)


def find_roles(target: Any, entries: Iterable[Entry]) -> dict[Path, str]:
    """The roles of the moments of a target by their paths, in their order.

    Classes tell them. Where `nnx.state` dropped those, names do that mean the same in all of optax.
    """
    roles = list_roles(target, is_leaf=is_whole)
    found = {entry.path: roles[entry.index] or find_role(entry.path) for entry in entries if not entry.part}
    return {path: role for path, role in found.items() if role is not None}


def pair_scales(entries: Iterable[Entry], roles: Mapping[Path, str]) -> dict[Path, Moment]:
    """Finds the moments that have scales, by their paths.

    Scales are `scales/0/w`, `scales/1/w`, ... beside the state of the optimizer: those of its first field of moments,
    of its second, ..., in the order of the classes.
    """
    by_path = {entry.path: entry for entry in entries}
    of_state: dict[Path, dict[Path, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in by_path.values():
        if entry.part == "scales" and entry.path[entry.inside] == "scales":
            of_state[entry.path[: entry.inside]][entry.path[entry.inside + 2 :]].append(entry)
    found = {}
    for state, scales in of_state.items():
        moments: dict[Path | None, list[Path]] = defaultdict(list)
        for path in roles:
            if path[: len(state)] == state:  # the longest end that is a parameter's
                end = next((path[n:] for n in range(len(state), len(path) + 1) if path[n:] in scales), None)
                moments[end].append(path)
        for end, own in scales.items():
            own = sorted(own, key=lambda entry: int(entry.path[entry.inside + 1]))
            if len(own) == len(moments[end]):
                pairs = zip(moments[end], own, strict=True)
                found |= {path: Moment(by_path[path], scale, roles[path]) for path, scale in pairs if path in by_path}
    return found
