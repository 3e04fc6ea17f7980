"""Parameters with what they lack: which memory of an optimizer belongs to which parameter, and both in every form."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base import is_floating, is_half, round_to_half
from ..optim._half import COMPENSATED, COPIES, SPLIT, Storage
from ._entries import MEMORIES, Entry, Path

_STORAGES: dict[str, Storage] = dict(zip(MEMORIES, (COPIES, SPLIT, COMPENSATED), strict=True))


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter, and its memory if it has one.

    Attributes:
      entry: where it stands.
      memory: where its memory stands.
    """

    entry: Entry
    memory: Entry | None = None

    def widen(self) -> Any:
        """Its exact value: float32 if it has a memory, else as it is stored."""
        if self.memory is None:
            return self.entry.value
        param, memory = jnp.asarray(self.entry.value), jnp.asarray(self.memory.value)
        return _STORAGES[self.memory.part].widen(param, memory)

    def narrow(self, saved: "Parameter") -> tuple[Any, Any]:
        """What stands here, and in the memory, for a saved parameter; both bit for bit if it was saved in this form."""
        if self.memory is None:
            return _round(saved.widen(), self.entry.value), None
        if saved.memory is not None and _form(self) == _form(saved):
            return saved.entry.value, saved.memory.value
        wide = jnp.asarray(saved.widen(), jnp.float32)
        return _STORAGES[self.memory.part].narrow(wide, _abstract(self.entry.value), None)


def pair_memories(entries: Iterable[Entry]) -> dict[Path, Parameter]:
    """Finds the parameters of a state that have a memory, by their paths.

    The memory of an optimizer is a tree like the parameters that it trains. Those stand outside of its state, under
    another name; an entry that is called like a memory and has no such parameters is none.

    Raises:
      ValueError: several trees are like the memory, an average of the parameters say. One that is `params` is told
        from those that are not, and one beside the optimizer's state from those that are in other places.
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
    """Where the tree begins that these memories belong to; `None` if there is none."""
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
            f"The memory at {'/'.join((*state, memories[0].part))!r} may belong to the parameters at {names}. Give "
            "those that the optimizer trains the name 'params', beside its state, in what was saved and in the target. "
            "For example: convert_state({'params': saved[0], 'opt_state': saved[1], 'average': saved[2]}, "
            "{'params': params, 'opt_state': opt_state, 'average': average})."
        )
    return next(iter(named or fitting), None)


def _relative(memory: Entry) -> Path:
    return memory.path[memory.inside + 1 :]


def _fits(param: Entry | None, memory: Entry) -> bool:
    return param is not None and not param.part and is_half(param.value) and param.value.shape == memory.value.shape


def _form(param: Parameter) -> tuple[Any, str | None]:
    return np.dtype(param.entry.value.dtype), None if param.memory is None else param.memory.part


def _abstract(like: Any) -> Any:
    return jax.ShapeDtypeStruct(like.shape, like.dtype)


def _round(value: Any, like: Any) -> Any:
    return round_to_half(value, like.dtype) if is_half(like) and is_floating(value) else value
