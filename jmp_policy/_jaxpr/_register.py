"""The Flax modules that are called while a function is traced: where their paths stand in its name stacks."""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax

from .._base import Args, Kwargs
from ..modules import Adapter, ModuleCall, find_loaded_adapters
from ._module_paths import ELSEWHERE, Modules

_LINEN: contextvars.ContextVar[str] = contextvars.ContextVar("_LINEN", default="")
_NNX: contextvars.ContextVar[str] = contextvars.ContextVar("_NNX", default="")
"""The paths of the linen and of the nnx module whose method is being traced; each begins at a root of its own."""

_CASTING: contextvars.ContextVar[bool] = contextvars.ContextVar("_CASTING", default=False)
"""True while `autocast` traces a function, which it then rewrites."""


@contextmanager
def note_casting() -> Iterator[None]:
    """Has `refuse_casting` raise inside."""
    token = _CASTING.set(True)
    try:
        yield
    finally:
        _CASTING.reset(token)


def refuse_casting(instrument: str) -> None:
    """Raises a `ValueError` where a program is measured that `autocast` then rewrites."""
    if _CASTING.get():
        raise ValueError(
            f"{instrument} inside of autocast would report the dtypes that the function was traced with, and not those "
            f"that it runs in: put it outside. For example: {instrument}(autocast(loss_fn, 'mixed_bfloat16'))."
        )


class Register:
    """The modules that were called in the traces of one function.

    Attributes:
      token: what stands for it in JAX's keys, which JAX never lets go of.
    """

    def __init__(self) -> None:
        find_loaded_adapters()  # loaded while a jitted function is traced, their contexts would have JAX trace it again
        self.token = object()
        self._types: dict[str, type] = {}
        self._roots: set[str] = set()
        self._methods: set[tuple[str, str]] = set()

    def list_modules(self) -> Modules:
        """Returns those that were entered."""
        return Modules(tuple(self._types.items()), frozenset(self._roots), frozenset(self._methods))

    def watch(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which enters the modules it calls, and runs each in a scope from which its path is read.

        Args:
          fun: a function whose arguments nobody else holds, as `Adapter.hook_calls` wants it.
        """
        for adapter in find_loaded_adapters():
            fun = self._watch_modules_of(adapter, fun)
        return fun

    def _watch_modules_of(self, adapter: Adapter, fun: Callable[..., Any]) -> Callable[..., Any]:
        hooked = adapter.hook_calls(fun, self._hook, setup=True)

        def call_watched(*args: Any, **kwargs: Any) -> Any:
            # A rule may be for a module that is not called, and decide for what is inside of it.
            self._types.update(adapter.find_modules((args, kwargs)))
            return hooked(*args, **kwargs)

        return call_watched

    def _hook(self, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        self._enter(call)
        called = _LINEN if call.scope else _NNX
        scope = _scope_of(call, called.get())
        token = called.set(call.path)
        try:
            with scope:
                return next_fun(*args, **kwargs)
        finally:
            called.reset(token)

    def _enter(self, call: ModuleCall) -> None:
        self._types[call.path] = call.type
        if call.scope and not call.path:
            self._roots.add(call.scope)
        elif call.scope and call.method != "__call__":
            self._methods.add((call.path, call.scope))


def _scope_of(call: ModuleCall, caller: str) -> AbstractContextManager[Any]:
    """The scope to open around a call, so that with what Flax opens the name stack says the path.

    Args:
      call: the call.
      caller: the path of the module that makes it; the empty string at a root, and outside of all modules.
    """
    if call.scope and not call.path:
        return nullcontext()
    if call.path == caller:
        # Flax opens a scope for a call by itself, as of a cell in a scan, as for one of a module of its name inside.
        is_again = call.scope and call.method == "__call__"
        return jax.named_scope(ELSEWHERE + call.path) if is_again else nullcontext()
    inside = call.path.removeprefix(f"{caller}/" if caller else "")
    if caller and inside == call.path:
        return jax.named_scope(ELSEWHERE + call.path)
    if not call.scope:
        return jax.named_scope(inside)
    # Flax opens a scope of the module's own name, which is all there is to say of one right inside of its caller.
    name = call.scope.removesuffix(f".{call.method}")
    return nullcontext() if inside == name else jax.named_scope(ELSEWHERE + call.path)
