"""Running a hook in place of each method of the nnx modules among the arguments of a function.

nnx tells nobody when a module is called. So the modules get other classes while the function runs, whose public methods
call the hooks: subclasses of their own, one for each class, because JAX never forgets the class of a pytree.
"""

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from .._base import Args, Kwargs, PyTree, remember_on_class
from ..modules import Hook, ModuleCall, is_flax_object
from ._methods import list_public_methods
from ._module_spec import SPEC, find_spec
from ._nodes import NodeKind, find_kind, list_items, pytree_options
from ._quantized import describe_quantization

_PATH = "_pytree__jmp_path"
"""The attribute that holds the path of a module: a static one, so that transforms which split and merge keep it. It is
named like the bookkeeping of Flax, whose bridge takes all other attributes for variables of a linen module."""

_HOOKS: contextvars.ContextVar[tuple[Hook, ...]] = contextvars.ContextVar("_HOOKS", default=())
"""The hooks that run now, the outermost first. They are not in the classes, which JAX would keep alive with them."""


def hook_calls(fun: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns the same function, in which a hook runs in place of each method of a module among its arguments.

    Args:
      fun: a function whose arguments nobody else holds: the classes of the modules are others while it runs.
      hook: runs outside of the casts of a module with a policy.
    """

    def call_hooked(*args: Any, **kwargs: Any) -> Any:
        out = None
        models = _find_models((args, kwargs))
        for model in models:
            for path, module in list(_walk(model, (), set())):
                vars(module)[_PATH] = path
                object.__setattr__(module, "__class__", _make_hooked_class(type(module)))
        token = _HOOKS.set((*_HOOKS.get(), hook))
        try:
            out = fun(*args, **kwargs)
            return out
        finally:
            _HOOKS.reset(token)
            for model in (*models, *_list_modules(out)):  # a copy of one may be returned
                _restore_classes(model)

    return call_hooked


def find_modules(arguments: PyTree) -> dict[str, type]:
    """Returns the classes, by path, of the modules among some arguments that `hook_calls` would hook."""
    return {path: type(module) for model in _find_models(arguments) for path, module in _walk(model, (), set())}


def _find_models(arguments: PyTree) -> list[nnx.Module]:
    """The modules among some arguments, but for those that are hooked, whose paths begin further out."""
    return [module for module in _list_modules(arguments) if _PATH not in vars(module)]


def _list_modules(tree: PyTree) -> list[nnx.Module]:
    leaves = jax.tree.leaves(tree, is_leaf=is_flax_object)
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def _walk(value: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, nnx.Module]]:
    """The modules in a tree, each once, with the first path that leads to it."""
    kind = find_kind(type(value))
    if kind not in (NodeKind.MODULE, NodeKind.PYTREE, NodeKind.BUILTIN) or id(value) in seen:
        return
    seen.add(id(value))
    if kind is NodeKind.MODULE:
        yield "/".join(path), value
    for name, item in list_items(value):
        yield from _walk(item, (*path, name), seen)


def _restore_classes(model: nnx.Module) -> None:
    """Gives the modules in a tree their own classes back; in place."""
    for _, module in list(_walk(model, (), set())):
        if vars(module).pop(_PATH, None) is not None:
            object.__setattr__(module, "__class__", type(module).__base__)


@remember_on_class
def _make_hooked_class(kind: Any) -> type:
    """The subclass of a module class whose public methods call the hooks."""
    methods = {name: _hook_method(name, inspect.getattr_static(kind, name)) for name, _ in list_public_methods(kind)}
    spec = {SPEC: vars(kind)[SPEC]} if SPEC in vars(kind) else {}
    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **spec, **methods}
    return type(kind)(kind.__name__, (kind,), namespace, **pytree_options(kind))


def _hook_method(name: str, method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        path, hooks = vars(self).get(_PATH), _HOOKS.get()
        if path is None or not hooks:
            return bound(*args, **kwargs)
        describe_quantization = functools.partial(_describe_weight, self)
        # The class without the hooks: what a caller compares types with.
        call = ModuleCall(path, type(self).__base__, name, "", self, describe_quantization)  # type: ignore[arg-type]
        return _run_hooks(hooks, call, bound, args, kwargs)

    return call_hooks


def _run_hooks(hooks: tuple[Hook, ...], call: ModuleCall, fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    if not hooks:
        return fun(*args, **kwargs)
    inside = lambda *args, **kwargs: _run_hooks(hooks[1:], call, fun, args, kwargs)
    return hooks[0](call, inside, args, kwargs)


def _describe_weight(module: nnx.Module) -> str:
    spec = find_spec(module)
    return "" if spec is None else describe_quantization(spec.base, vars(module), spec.policy)
