"""The kinds of values that a tree of modules is made of, and what each contains."""

import enum
from typing import Any

import jax
import numpy as np
from flax import nnx

from .._base import is_floating_dtype, remember_weakly

Node = Any
"""A value in a tree of modules: anything that an attribute may hold."""

Attributes = dict[str, Any]
"""The attributes of a module, by name."""


class NodeKind(enum.Enum):
    """The kinds of values that the walks over module trees tell apart."""

    MODULE = enum.auto()
    PARAM = enum.auto()
    PYTREE = enum.auto()
    """Containers with attributes: `nnx.List`, `nnx.Dict`, and users' `nnx.Pytree` classes."""
    BUILTIN = enum.auto()
    """Lists, tuples and dictionaries."""
    STATE = enum.auto()
    """A mapping of Variables, as WeightNorm has."""
    OTHER = enum.auto()


@remember_weakly
def find_kind(kind: type) -> NodeKind:
    """The kind of the values of a type; a dictionary look-up, where `isinstance` of nnx runs Python code."""
    if issubclass(kind, nnx.Param):
        return NodeKind.PARAM
    if issubclass(kind, nnx.Rngs | nnx.RngStream):
        return NodeKind.OTHER
    if issubclass(kind, nnx.Module) and not issubclass(kind, nnx.List | nnx.Dict):
        return NodeKind.MODULE
    if issubclass(kind, nnx.Pytree):
        return NodeKind.PYTREE
    if issubclass(kind, nnx.State):
        return NodeKind.STATE
    return NodeKind.BUILTIN if kind in (list, tuple, dict) else NodeKind.OTHER


def find_floating_dtypes(param: nnx.Param) -> set[np.dtype]:
    """The floating dtypes that a Param is stored in: of an array, an array reference, or a tree of them."""
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(param.get_raw_value())]
    return {np.dtype(dtype) for dtype in dtypes if dtype is not None and is_floating_dtype(dtype)}


def list_items(container: Node) -> list[tuple[str, Node]]:
    """The names and values in a container of any kind; modules are containers too."""
    match find_kind(type(container)):
        case NodeKind.MODULE | NodeKind.PYTREE:
            return list(vars(container).items())
        case NodeKind.STATE:
            return list(container.items())
        case NodeKind.BUILTIN:
            pairs = container.items() if isinstance(container, dict) else enumerate(container)
            return [(str(name), item) for name, item in pairs]
    return []


def replace_items(container: Node, items: list[Node]) -> Node:
    """A copy of a container with other values, in the order of `list_items`."""
    if isinstance(container, dict):
        return dict(zip(container, items, strict=True))
    if isinstance(container, list | tuple):
        return type(container)(items)
    return make_blank(type(container), dict(zip(vars(container), items, strict=True)))


def make_blank(kind: type, attributes: Attributes) -> Any:
    """An object with these attributes, made without its constructor."""
    new = object.__new__(kind)
    vars(new).update(attributes)
    return new


def pytree_options(base: type) -> dict[str, Any]:
    """Returns the class arguments by which a subclass is a pytree if its base is one."""
    return {} if getattr(base, "_pytree__is_pytree", True) else {"pytree": False}
