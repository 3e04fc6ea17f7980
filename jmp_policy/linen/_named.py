"""The paths of linen modules, and what the name stacks that Flax makes have in their place."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn


def named(fun: Callable[..., Any], enter: Callable[..., None]) -> Callable[..., Any]:
    """The same function, which tells what linen modules it calls.

    Args:
      fun: any function.
      enter: called for each call of a module, with its path, its class, its name in the name stack, and whether that
        is the name of one of its methods.
    """

    def intercept(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        module: nn.Module = context.module
        if module.scope is not None:
            is_method = context.method_name != "__call__"
            name = module.name or type(module).__name__
            label = f"{name}.{context.method_name}" if is_method else name
            enter("/".join(map(str, module.path)), type(module), label, is_method)
        return call(*args, **kwargs)

    def with_modules_named(*args: Any, **kwargs: Any) -> Any:
        with nn.intercept_methods(intercept):
            return fun(*args, **kwargs)

    return with_modules_named
