"""The paths of nnx modules as scopes: nnx opens none."""

import contextvars
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from .._flax_objects import is_flax_object
from ..interpreter._module_paths import ELSEWHERE
from ._observed import is_watched, unwatch_modules, watch_modules

_CALLED: contextvars.ContextVar[str | None] = contextvars.ContextVar("_CALLED", default=None)
"""The path of the module whose method is being traced."""


def named(fun: Callable[..., Any], enter: Callable[..., None]) -> Callable[..., Any]:
    """The same function, in which each call of an nnx module among its arguments is a `jax.named_scope`.

    Args:
      fun: a function whose arguments nobody else holds: the classes of the modules are others while it runs.
      enter: called for each module, with its path and its class.
    """

    def with_modules_named(*args: Any, **kwargs: Any) -> Any:
        out = None
        models = [model for model in _modules_in((args, kwargs)) if not is_watched(model)]
        for model in models:
            for path, kind in watch_modules(model, _call_in_scope).items():
                enter(path, kind)
        try:
            out = fun(*args, **kwargs)
            return out
        finally:
            for model in (*models, *_modules_in(out)):  # a copy of one may be returned
                unwatch_modules(model)

    return with_modules_named


def _modules_in(tree: Any) -> list[nnx.Module]:
    leaves = jax.tree.leaves(tree, is_leaf=is_flax_object)
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def _call_in_scope(path: str, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    outer = _CALLED.get()
    name = _name_inside(outer, path)
    token = _CALLED.set(path)
    try:
        if not name:
            return method(*args, **kwargs)
        with jax.named_scope(name):
            return method(*args, **kwargs)
    finally:
        _CALLED.reset(token)


def _name_inside(outer: str | None, path: str) -> str:
    """What the scope of a module is called where its caller has the path `outer`; nothing, if that is itself."""
    if not outer or outer == path:
        return "" if outer == path else path
    return path.removeprefix(f"{outer}/") if path.startswith(f"{outer}/") else ELSEWHERE + path
