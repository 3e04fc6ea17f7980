"""Classes that are made of others under their names, and how they are pickled, which is to say, found again."""

import copyreg
import sys
from typing import Any

from ..._base import remember_on_class

_RECIPE = "_jmp_recipe"


def make_subclass(
    base: type,
    namespace: dict[str, Any],
    recipe: tuple[Any, tuple],
    metaclass: type[type] | None = None,
    **options: Any,
) -> Any:
    """A subclass with the name of its base, so that what is named after the class stays as it is.

    Args:
      base: the class.
      namespace: attributes of the subclass.
      recipe: a function and its arguments that make an equal subclass: what a pickle holds of one that is not found
        under its name, because its base is.
      metaclass: the metaclass of the subclass, one for `pickle_by_recipe`, if it is to have one of its own.
      **options: what else the metaclass of the base takes.
    """
    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    # No other metaclass where a decorator may put the subclass in its base's place: authors mix such a class with
    # others, which have metaclasses of their own.
    if metaclass is None:
        metaclass = _make_picklable(type(base)) if find_by_name(base) is base else type(base)
    return metaclass(base.__name__, (base,), {_RECIPE: recipe, **same, **namespace}, **options)


def find_by_name(kind: type) -> Any:
    """What the module of a class has under its name."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def pickle_by_recipe(metaclass: type[type]) -> type[type]:
    """Has the classes of a metaclass of ours pickled by their recipes, where they are not found under their names."""
    copyreg.pickle(metaclass, _reduce_class)  # type: ignore[arg-type]
    return metaclass


def _reduce_class(kind: type) -> Any:
    recipe = vars(kind).get(_RECIPE)
    return kind.__qualname__ if recipe is None or find_by_name(kind) is kind else recipe


class _Picklable(type):
    """The metaclass of made classes whose bases have none."""


pickle_by_recipe(_Picklable)


def _make_picklable(parent: type[type]) -> type[type]:
    if parent is type:
        return _Picklable
    return parent if parent in copyreg.dispatch_table else _picklable_metaclass(parent)


@remember_on_class
def _picklable_metaclass(parent: type[type]) -> type[type]:
    return pickle_by_recipe(type(parent.__name__, (parent,), {"__module__": __name__}))
