"""Running a hook in place of each method of the linen modules that a function calls."""

import contextvars
import functools
from collections.abc import Callable
from typing import Any

from flax import linen as nn

from .._base import Args, Kwargs
from ..modules import Hook, ModuleCall
from ._active_policy import CURRENT, ActivePolicy
from ._place import calling, is_trial, path_text
from ._quantized import quantization_of

BOUNDARY_HOOK: contextvars.ContextVar[Hook | None] = contextvars.ContextVar("BOUNDARY_HOOK", default=None)
"""The hook that runs around the casts of a module with a policy of its own."""


def hook_calls(
    fun: Callable[..., Any], hook: Hook, *, setup: bool = False, boundary_hook: Hook | None = None
) -> Callable[..., Any]:
    """Returns the same function, in which a hook runs in place of each method of a module.

    Args:
      fun: any function.
      hook: runs inside of the casts of a module with a policy of its own.
      setup: whether it runs in place of `setup` as well.
      boundary_hook: runs around those casts, where nothing is cast yet; `hook` runs inside of it.
    """

    def intercept(next_fun: Callable[..., Any], args: Args, kwargs: Kwargs, context: Any) -> Any:
        module: nn.Module = context.module
        skips_setup = context.method_name == "setup" and not setup
        if skips_setup or module.scope is None or is_trial(module, context.method_name):
            return next_fun(*args, **kwargs)
        # What runs through `.apply` in the hook or the method stands inside of this module.
        with calling(module):
            return hook(_describe_call(module, context.method_name), next_fun, args, kwargs)

    def call_hooked(*args: Any, **kwargs: Any) -> Any:
        token = BOUNDARY_HOOK.set(boundary_hook or BOUNDARY_HOOK.get())
        try:
            # The first interceptor in place is the outermost: those that apply policies run inside of it.
            with nn.intercept_methods(intercept):
                return fun(*args, **kwargs)
        finally:
            BOUNDARY_HOOK.reset(token)

    return call_hooked


def hook_boundary(module: nn.Module, method: str, fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Calls the boundary of a module, under the hook for boundaries, if there is one.

    Args:
      module: the module.
      method: the name of the method that was called.
      fun: casts the arguments, calls the method, and casts what it returns.
      args: positional arguments, without the module.
      kwargs: keyword arguments.
    """
    hook = BOUNDARY_HOOK.get()
    return fun(*args, **kwargs) if hook is None else hook(_describe_call(module, method), fun, args, kwargs)


def _describe_call(module: nn.Module, method: str) -> ModuleCall:
    name = module.name or type(module).__name__
    return ModuleCall(
        path=path_text(module),
        type=type(module),
        method=method,
        scope=name if method == "__call__" else f"{name}.{method}",
        module=module,
        describe_quantization=functools.partial(_describe_quantization, module),
    )


def _describe_quantization(module: nn.Module) -> str:
    active: ActivePolicy | None = CURRENT.value
    return "" if active is None else quantization_of(module, active.match(module).policy)
