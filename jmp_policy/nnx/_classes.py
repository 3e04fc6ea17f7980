"""Policied classes: subclasses that carry a spec, and whose public methods run as it says."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

from flax import nnx

from .._boundary import check_keep
from .._made_classes import make_subclass
from .._memory import remember_on_class
from ._call import Adopt, call_method
from ._module_spec import SPEC, ModuleSpec, find_spec
from ._nodes import make_blank

_INHERITED = frozenset(dir(nnx.Module)) - {"__call__"}


def policied_class(spec: ModuleSpec, adopt: Adopt) -> type:
    """The subclass of `spec.runs` for the modules of a spec; one for equal specs, so that jit caches hit."""
    return _policied_class(spec.base, spec, adopt)


@remember_on_class
def _policied_class(_: type, spec: ModuleSpec, adopt: Adopt) -> type:
    base = spec.runs
    namespace = {
        SPEC: spec,
        "__reduce__": lambda self: (_remade, (spec, adopt, vars(self).copy())),
    }
    if spec.calls:
        namespace |= policied_methods(base, adopt)
    options: dict[str, Any] = {} if getattr(base, "_pytree__is_pytree", True) else {"pytree": False}
    return make_subclass(base, namespace, (policied_class, (spec, adopt)), **options)


def policied_methods(base: type, adopt: Adopt) -> dict[str, Callable[..., Any]]:
    """The public methods of a class by name, made to look at the spec of the module that they are called with."""
    return {name: _policied_method(method, adopt) for name, method in public_methods(base)}


def checked_keep(base: type, keep: Collection[str]) -> tuple[str, ...]:
    """The names of `keep`, each an argument of one of the public methods of a class.

    Raises:
      ValueError: one is not, or `keep` is a string.
    """
    methods = dict(public_methods(base))
    main = methods.get("__call__", base)
    if isinstance(keep, str):
        check_keep(main, keep)
    for name in keep:
        if not any(_takes(method, name) for method in methods.values()):
            check_keep(main, [name])
    return tuple(sorted(keep))


def public_methods(base: type) -> Iterator[tuple[str, Any]]:
    """The methods of a class that are called from outside, by name, as they are without a policy."""
    for name in dir(base):
        if name in _INHERITED or (name.startswith("_") and name != "__call__"):
            continue
        found = inspect.getattr_static(base, name)
        if isinstance(found, staticmethod | classmethod | property | type):
            continue
        if callable(found) and hasattr(found, "__get__"):
            yield name, getattr(found, "_jmp_method", found)


def _policied_method(method: Any, adopt: Adopt) -> Callable[..., Any]:
    @functools.wraps(method)
    def policied(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = find_spec(self)
        if spec is None:  # a shadow, or an instance of a decorated class that is still being made
            return method.__get__(self, type(self))(*args, **kwargs)
        return call_method(self, spec, method, args, kwargs, adopt)

    policied._jmp_method = method  # type: ignore[attr-defined]
    return policied


def _takes(method: Any, name: str) -> bool:
    parameters = inspect.signature(method).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _remade(spec: ModuleSpec, adopt: Adopt, attributes: dict[str, Any]) -> Any:
    return make_blank(policied_class(spec, adopt), attributes)
