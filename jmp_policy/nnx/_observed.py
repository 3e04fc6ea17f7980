"""Module trees that say what their modules are called with."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from ..explanation._observation import observe_call
from ._classes import public_methods
from ._roles import ROLE, Kind, items_of, kind_of

_PATH = "_pytree__jmp_path"
"""The attribute that holds the path of a module: a static one, so that transforms which split and merge keep it. It is
named like the bookkeeping of Flax, whose bridge takes all other attributes for variables of a linen module."""


def observed(module: nnx.Module) -> nnx.Module:
    """Changes the class of a module, and of all inside it, to one whose public methods are observed; in place.

    Nothing that others hold may be in it: it is meant for what `nnx.merge` has just made.
    """
    _observe_inside(module, (), set())
    return module


def _observe_inside(value: Any, path: tuple[str, ...], seen: set[int]) -> None:
    kind = kind_of(type(value))
    if kind not in (Kind.MODULE, Kind.PYTREE, Kind.BUILTIN) or id(value) in seen:
        return
    seen.add(id(value))
    items = items_of(value)
    if kind is Kind.MODULE:
        vars(value)[_PATH] = "/".join(path)
        object.__setattr__(value, "__class__", _observed_class(type(value)))
    for name, item in items:
        _observe_inside(item, (*path, name), seen)


@functools.cache
def _observed_class(kind: Any) -> type:
    """The subclass whose public methods are observed; one for each class, because JAX never forgets a pytree class."""
    methods = {name: _observed_method(inspect.getattr_static(kind, name)) for name, _ in public_methods(kind)}
    role = {ROLE: vars(kind)[ROLE]} if ROLE in vars(kind) else {}
    options = {} if getattr(kind, "_pytree__is_pytree", True) else {"pytree": False}
    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **role, **methods}
    return type(kind)(kind.__name__, (kind,), namespace, **options)


def _observed_method(method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def observed_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        path = vars(self).get(_PATH)
        return bound(*args, **kwargs) if path is None else observe_call(path, bound, args, kwargs)

    return observed_method
