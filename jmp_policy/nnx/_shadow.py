"""The nodes of a module tree, and the shadow that replaces a module during one call."""

import copy
import enum
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from .._base import (
    IN_FULL_PRECISION,
    at_least_float32,
    cast_floating,
    is_floating_dtype,
    remember_on_class,
    remember_weakly,
)
from ..quant import QuantizedArray, read_stored

Node = Any
"""A value in a tree of modules."""

Attributes = dict[str, Any]
"""The attributes of a module, by name."""


class NodeKind(enum.Enum):
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
    """Returns the kind of the values of a type. Remembered, because `isinstance` of nnx classes is slow."""
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
    """Returns the floating dtypes of a Param, which may hold an array, an array reference, or a tree of them."""
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(param.get_raw_value())]
    return {np.dtype(dtype) for dtype in dtypes if dtype is not None and is_floating_dtype(dtype)}


def list_items(container: Node) -> list[tuple[str, Node]]:
    """Returns the names and values in a container of any kind, or in a module."""
    match find_kind(type(container)):
        case NodeKind.MODULE | NodeKind.PYTREE:
            return list(vars(container).items())
        case NodeKind.STATE:
            return list(container.items())
        case NodeKind.BUILTIN:
            pairs = container.items() if isinstance(container, dict) else enumerate(container)
            return [(str(name), item) for name, item in pairs]
    return []


def walk_nodes(value: Node, path: tuple[str, ...] = (), seen: set[int] | None = None) -> Iterator[tuple[str, Node]]:
    """Yields a value and the nodes inside it, each once, with the first path that leads to it."""
    seen = set() if seen is None else seen
    if find_kind(type(value)) is NodeKind.OTHER or id(value) in seen:
        return
    seen.add(id(value))
    yield "/".join(path), value
    for name, item in list_items(value):
        yield from walk_nodes(item, (*path, name), seen)


def walk_modules(value: Node) -> Iterator[tuple[str, nnx.Module]]:
    """Yields the modules in a tree, without `nnx.List` and `nnx.Dict`."""
    return ((path, node) for path, node in walk_nodes(value) if find_kind(type(node)) is NodeKind.MODULE)


def replace_nodes(root: Node, new: dict[int, Node]) -> None:
    """Replaces nodes inside a tree, by their ids, in place."""
    for _, container in list(walk_nodes(root)):
        items = container if isinstance(container, dict | list) else getattr(container, "__dict__", {})
        for name, item in list(items.items() if isinstance(items, dict) else enumerate(items)):
            if id(item) in new:
                items[name] = new[id(item)]


def replace_items(container: Node, items: list[Node]) -> Node:
    """Copies a container with other values, in the order of `list_items`."""
    if isinstance(container, dict):
        return dict(zip(container, items, strict=True))
    if isinstance(container, list | tuple):
        return type(container)(items)
    return make_blank(type(container), dict(zip(vars(container), items, strict=True)))


def make_blank(kind: type, attributes: Attributes) -> Any:
    """Makes an object with these attributes, without its constructor."""
    new = object.__new__(kind)
    vars(new).update(attributes)
    return new


def pytree_options(base: type) -> dict[str, Any]:
    """Returns the class arguments by which a subclass is a pytree if its base is one."""
    return {} if getattr(base, "_pytree__is_pytree", True) else {"pytree": False}


_UNWRITTEN = object()


def call_on_shadow(
    module: nnx.Module,
    base: type,
    changed: Attributes,
    dtype: np.dtype | None,
    call: Callable[[Any], Any],
    reads_stored: bool = False,
) -> Any:
    """Calls `call` with a shadow of a module, of the class `base` with attributes `changed`, then copies its writes.

    With `reads_stored`, stored weights are shown as arrays.
    """
    # Params are cast to `dtype` at each use: gradients of a weight that is cast once would sum in half precision.
    # Without a dtype, the shadow shares the values of the module.
    record = _Originals(dtype, reads_stored)
    attributes = vars(module)
    if dtype is not None or reads_stored:
        attributes = {name: record.shadow(value) for name, value in attributes.items()}
    before = attributes | changed
    shadow = make_blank(base, before)
    try:
        out = call(shadow)
    finally:  # writes before an error stay, as without a policy
        record.write_back(vars(module), before, vars(shadow))
    return module if out is shadow else out


class _Originals:
    """Maps the values in a shadow to the values of the module."""

    def __init__(self, dtype: np.dtype | None, reads_stored: bool):
        self.dtype, self.reads_stored = dtype, reads_stored
        # By the id of a view or copied container: the original, itself, and its contents before the call.
        self.originals: dict[int, tuple[Node, Node, dict | list | None]] = {}
        self.views: dict[int, nnx.Param] = {}  # by the id of the Param: a tied one stays tied

    def shadow(self, value: Node) -> Node:
        """Returns a view of a Param, a copy of a container of Params, or any other value itself."""
        match find_kind(type(value)):
            case NodeKind.PARAM if self.dtype is not None:
                return self._view(value)
            case NodeKind.OTHER if self.reads_stored and isinstance(value, nnx.Variable):
                raw = value.get_raw_value()
                return self._view(value, raw) if isinstance(raw, QuantizedArray) else value
            case NodeKind.PYTREE | NodeKind.BUILTIN:
                items = [item for _, item in list_items(value)]
                shadows = [self.shadow(item) for item in items]
                if all(map(operator.is_, items, shadows)):
                    return value
                return self._remember(replace_items(value, shadows), value)
        return value

    def write_back(self, attributes: Attributes, before: Attributes, after: Attributes) -> None:
        """Copies assignments, deletions, and writes into Params."""
        self._hand_over(attributes, before, after)
        for original, stand_in, held in self.originals.values():
            if isinstance(stand_in, nnx.Param):
                if (written := stand_in.get_raw_value()) is not original.get_raw_value():
                    original.set_value(written)
            elif isinstance(held, dict):
                self._hand_over(_get_contents(original), held, _get_contents(stand_in))
            elif isinstance(held, list) and not (len(stand_in) == len(held) and all(map(operator.is_, stand_in, held))):
                original[:] = map(self._find_original, stand_in)

    def _hand_over(self, attributes: Attributes, before: Attributes, after: Attributes) -> None:
        for name, value in after.items():
            if before.get(name, _UNWRITTEN) is not value:
                attributes[name] = self._find_original(value)
        for name in before.keys() - after.keys():
            del attributes[name]

    def _find_original(self, value: Node) -> Node:
        return self.originals[id(value)][0] if id(value) in self.originals else value

    def _view(self, param: Any, stored: QuantizedArray | None = None) -> Any:
        if stored is None and find_floating_dtypes(param) <= {self.dtype}:
            return param
        if id(param) not in self.views:
            make_class = _make_view_class if stored is None else _make_stored_view_class
            view = make_class(type(param), self.dtype).from_metadata(param.get_raw_value(), param.get_metadata())
            self.views[id(param)] = self._remember(view, param)
        return self.views[id(param)]

    def _remember(self, stand_in: Node, original: Node) -> Node:
        self.originals[id(stand_in)] = original, stand_in, copy.copy(_get_contents(stand_in))
        return stand_in


@remember_on_class
def _make_view_class(kind: type[nnx.Param], dtype: np.dtype | None) -> type[nnx.Param]:
    """Makes the class of Params that hold a stored value, which transforms see, and show it in another dtype."""

    def get_value(self: nnx.Param, **kwargs: Any) -> Any:
        read_in = at_least_float32(dtype) if IN_FULL_PRECISION.value and dtype is not None else dtype
        return cast_floating(kind.get_value(self, **kwargs), read_in)

    def set_value(self: nnx.Param, value: Any, **kwargs: Any) -> None:
        stored = getattr(self.get_raw_value(), "dtype", None)
        kind.set_value(self, cast_floating(value, stored), **kwargs)

    def get_attribute(self: nnx.Param, name: str) -> Any:  # of the array, such as `param.T`, if the Variable has none
        metadata = self.get_metadata()
        return metadata[name] if name in metadata else getattr(self.get_value(), name)

    methods = {"get_value": get_value, "set_value": set_value, "__getattr__": get_attribute}
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


@remember_on_class
def _make_stored_view_class(kind: type[nnx.Variable], dtype: np.dtype | None) -> type[nnx.Variable]:
    """Makes the class of Variables that hold a stored weight, and show it as an array."""

    def get_value(self: nnx.Variable, *, index: Any = ..., **_: Any) -> Any:
        read_in = at_least_float32(dtype) if IN_FULL_PRECISION.value and dtype is not None else dtype
        value = read_stored(self.get_raw_value(), read_in)
        return value if index is ... else value[index]

    def get_attribute(self: nnx.Variable, name: str) -> Any:
        metadata = self.get_metadata()
        return metadata[name] if name in metadata else getattr(get_value(self), name)

    methods = {"get_value": get_value, "__getattr__": get_attribute}
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def _get_contents(container: Node) -> Any:
    """Returns the items or attributes that code may assign to, or `None`."""
    if isinstance(container, dict | list):
        return container
    return vars(container) if isinstance(container, nnx.Pytree) else None
