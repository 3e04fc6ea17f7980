"""What stands for a class, or for what is called: a `functools.partial` of it, or a generic one with subscripts."""

import functools
import typing
from typing import Any


def named_by(target: Any) -> Any:
    """The class or object inside of partials and subscripts, or the target itself.

    >>> named_by(functools.partial(functools.partial(list[int])))
    <class 'list'>
    """
    while True:
        if isinstance(target, functools.partial):
            target = target.func
        elif isinstance(origin := typing.get_origin(target), type):
            target = origin
        else:
            return target


def renamed(target: Any, new: Any) -> Any:
    """A target of partials and subscripts that names another class or object.

    >>> renamed(functools.partial(list[int], "ab"), dict)
    functools.partial(dict[int], 'ab')
    """
    if isinstance(target, functools.partial):
        return functools.partial(renamed(target.func, new), *target.args, **target.keywords)
    return new[typing.get_args(target)] if isinstance(typing.get_origin(target), type) else new


def keep_parameters(new: Any, generic: Any) -> None:
    """Has a subclass made of a generic class take subscripts as that does: Python takes it for one of no parameters."""
    parameters = getattr(generic, "__parameters__", ())
    if isinstance(new, type) and parameters:
        new.__parameters__ = parameters  # type: ignore[attr-defined]
