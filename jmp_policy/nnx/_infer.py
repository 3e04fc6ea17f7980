"""A compute dtype that only a call's inputs can tell: it holds for the modules inside while the call lasts."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flax import nnx

from .._policy import Policy
from ._roles import Kind, Role, items_of, kind_of, role_of

INFERRED = "_jmp_inferred_dtype"
"""The attribute that holds the dtype. It is a static one, and so part of the key of jit caches inside the call."""


@contextlib.contextmanager
def inferred_inside(
    module: nnx.Module, policy: Policy, dtype: np.dtype | None, adopt: Callable[[nnx.Module, Role], None]
) -> Iterator[None]:
    """A context in which the modules inside a policied one compute in the dtype that its inputs had.

    Args:
      module: the module that is called.
      policy: its policy, without a compute dtype; modules inside that have another one are left alone.
      dtype: the inferred dtype.
      adopt: called with every module that may have got new ones inside.
    """
    undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for inner, role in _modules_inside(module, policy, adopt, {id(module)}):
        attributes = vars(inner)
        undo.append((attributes, {"dtype": attributes["dtype"]} if role.open_dtype else {}))
        attributes[INFERRED] = dtype
        if role.open_dtype:
            attributes["dtype"] = dtype
    try:
        yield
    finally:
        for attributes, before in undo:
            attributes.pop(INFERRED, None)
            attributes.update(before)


def _modules_inside(
    container: Any, policy: Policy, adopt: Callable[[nnx.Module, Role], None], seen: set[int]
) -> Iterator[tuple[nnx.Module, Role]]:
    for _, item in items_of(container):
        kind = kind_of(type(item))
        if id(item) in seen or kind not in (Kind.MODULE, Kind.PYTREE, Kind.BUILTIN):
            continue
        seen.add(id(item))
        if kind is Kind.MODULE:
            role = role_of(item)
            if role is None or role.boundary or role.policy is not policy:
                continue
            adopt(item, role)
            yield item, role
        yield from _modules_inside(item, policy, adopt, seen)
