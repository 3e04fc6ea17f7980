"""Runs a hook in place of each method of the linen modules that a function calls."""

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
    """Returns `fun` with a hook for each method of a module, inside of its casts; `boundary_hook` runs around them."""

    def intercept(next_fun: Callable[..., Any], args: Args, kwargs: Kwargs, context: Any) -> Any:
        module: nn.Module = context.module
        skips_setup = context.method_name == "setup" and not setup
        if skips_setup or module.scope is None or is_trial(module, context.method_name):
            return next_fun(*args, **kwargs)
        # Modules that run through `.apply` in the hook or the method are inside of this one.
        with calling(module):
            return hook(describe_call(module, context.method_name), next_fun, args, kwargs)

    def call_hooked(*args: Any, **kwargs: Any) -> Any:
        token = BOUNDARY_HOOK.set(boundary_hook or BOUNDARY_HOOK.get())
        try:
            # The first interceptor is the outermost, so those that apply policies run inside of it.
            with nn.intercept_methods(intercept):
                return fun(*args, **kwargs)
        finally:
            BOUNDARY_HOOK.reset(token)

    return call_hooked


def describe_call(module: nn.Module, method: str) -> ModuleCall:
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
