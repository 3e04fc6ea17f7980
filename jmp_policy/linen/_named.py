"""The paths of linen modules, and what the name stacks that Flax makes have in their place."""

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from flax import linen as nn

from ..interpreter._module_paths import ELSEWHERE
from ._place import calling, is_trial, path_of

_CALLED: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar("_CALLED", default=None)
"""The path of the module whose method is being traced."""


def named(fun: Callable[..., Any], enter: Callable[..., None]) -> Callable[..., Any]:
    """The same function, which tells what linen modules it calls.

    Args:
      fun: any function.
      enter: called for each call of a module, with its path, its class, its name in the name stack, and whether that
        is the name of one of its methods.
    """

    def intercept(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        module: nn.Module = context.module
        if module.scope is None or is_trial(module, context.method_name):
            return call(*args, **kwargs)
        path = tuple(map(str, path_of(module)))
        name = module.name or type(module).__name__
        is_method = context.method_name != "__call__"
        enter("/".join(path), type(module), f"{name}.{context.method_name}" if is_method else name, is_method)
        outer = _CALLED.get()
        token = _CALLED.set(path)
        try:
            with calling(module), _scope_of(path, name, outer):
                return call(*args, **kwargs)
        finally:
            _CALLED.reset(token)

    def with_modules_named(*args: Any, **kwargs: Any) -> Any:
        with nn.intercept_methods(intercept):
            return fun(*args, **kwargs)

    return with_modules_named


def _scope_of(path: tuple[str, ...], name: str, outer: tuple[str, ...] | None) -> AbstractContextManager[Any]:
    """A scope that says the path, where the module is called from one that it is not inside of."""
    if not path or path == outer or path == (*(outer or ()), name):
        return nullcontext()
    return jax.named_scope(ELSEWHERE + "/".join(path))
