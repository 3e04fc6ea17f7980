"""Module trees whose modules say when they are called, and with what."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from .._memory import remember_on_class
from ..explanation._observation import observe_call
from ._call import list_public_methods
from ._module_spec import SPEC
from ._nodes import NodeKind, find_kind, list_items

_PATH = "_pytree__jmp_path"
"""The attribute that holds the path of a module: a static one, so that transforms which split and merge keep it. It is
named like the bookkeeping of Flax, whose bridge takes all other attributes for variables of a linen module."""


Watch = Callable[[str, Any, tuple, dict[str, Any]], Any]
"""What runs in the place of a method: given the path of its module, the bound method and its arguments."""


def observed(module: nnx.Module) -> nnx.Module:
    """Observes all calls of the modules in a tree; in place.

    Nothing that others hold may be in it: it is meant for what `nnx.merge` has just made.
    """
    watch_modules(module, observe_call)
    return module


def watch_modules(module: nnx.Module, watch: Watch) -> dict[str, type]:
    """Changes the class of a module, and of all inside it, to one whose public methods are watched; in place.

    Returns:
      The classes that the modules had, by path.
    """
    found: dict[str, type] = {}
    for path, inside in _inside(module, (), set()):
        found[path] = type(inside)
        vars(inside)[_PATH] = path
        object.__setattr__(inside, "__class__", _watched_class(type(inside), watch))
    return found


def is_watched(module: nnx.Module) -> bool:
    """Whether the calls of a module are watched."""
    return _PATH in vars(module)


def unwatch_modules(module: nnx.Module) -> None:
    """Gives the modules in a tree their own classes back; in place."""
    for _, value in _inside(module, (), set()):
        if vars(value).pop(_PATH, None) is not None:
            object.__setattr__(value, "__class__", type(value).__base__)


def _inside(value: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, nnx.Module]]:
    """The modules in a tree, each once, with the first path that leads to it."""
    kind = find_kind(type(value))
    if kind not in (NodeKind.MODULE, NodeKind.PYTREE, NodeKind.BUILTIN) or id(value) in seen:
        return
    seen.add(id(value))
    items = list_items(value)  # before its class may change
    if kind is NodeKind.MODULE:
        yield "/".join(path), value
    for name, item in items:
        yield from _inside(item, (*path, name), seen)


@remember_on_class
def _watched_class(kind: Any, watch: Watch) -> type:
    """The subclass whose public methods are watched; one for each class, because JAX never forgets a pytree class."""
    methods = {
        name: _watched_method(inspect.getattr_static(kind, name), watch) for name, _ in list_public_methods(kind)
    }
    spec = {SPEC: vars(kind)[SPEC]} if SPEC in vars(kind) else {}
    options = {} if getattr(kind, "_pytree__is_pytree", True) else {"pytree": False}
    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **spec, **methods}
    return type(kind)(kind.__name__, (kind,), namespace, **options)


def _watched_method(method: Any, watch: Watch) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        path = vars(self).get(_PATH)
        return bound(*args, **kwargs) if path is None else watch(path, bound, args, kwargs)

    return watched_method
