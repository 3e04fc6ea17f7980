"""Subclasses that have the name of their base, and how to pickle them."""

import copyreg
import sys
from typing import Any

from ..._base import remember_on_class

_RECIPE = "_jmp_recipe"


def make_subclass(
    base: type, namespace: dict[str, Any], recipe: tuple, metaclass: type[type] | None = None, **options: Any
) -> Any:
    """Makes a subclass with the name of its base."""
    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    # A decorated class keeps its metaclass, because authors mix it with classes that have their own.
    if metaclass is None:
        metaclass = _make_picklable(type(base)) if find_by_name(base) is base else type(base)
    return metaclass(base.__name__, (base,), {_RECIPE: recipe, **same, **namespace}, **options)


def find_by_name(kind: type) -> Any:
    """Returns the object that the module of a class has under its name."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def pickle_by_recipe(metaclass: type[type]) -> type[type]:
    """Registers a metaclass, so that its classes are pickled by their recipes unless Python finds them by name."""
    copyreg.pickle(metaclass, _reduce_class)  # type: ignore[arg-type]
    return metaclass


def _reduce_class(kind: type) -> Any:
    recipe = vars(kind).get(_RECIPE)
    return kind.__qualname__ if recipe is None or find_by_name(kind) is kind else recipe


class _Picklable(type):
    """Metaclass of made classes whose bases have the metaclass `type`."""


pickle_by_recipe(_Picklable)


def _make_picklable(parent: type[type]) -> type[type]:
    if parent is type:
        return _Picklable
    return parent if parent in copyreg.dispatch_table else _picklable_metaclass(parent)


@remember_on_class
def _picklable_metaclass(parent: type[type]) -> type[type]:
    return pickle_by_recipe(type(parent.__name__, (parent,), {"__module__": __name__}))
