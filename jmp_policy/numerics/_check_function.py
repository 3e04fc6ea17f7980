"""Rejects anything but a function."""

from typing import Any

from .._base import describe
from ..modules import find_adapter


def check_function(fun: Any, caller: str) -> None:
    """Refuses anything but a function.

    Args:
      fun: what a user gave.
      caller: the name of the function that it was given to.

    Raises:
      TypeError: it is something else.
    """
    adapter = find_adapter(fun)
    if adapter is None and callable(fun) and not isinstance(fun, type):
        return
    audited = "audit(train_step)(state, batch)" if adapter is None else adapter.audit_example
    example = audited.replace("audit", caller)
    raise TypeError(f"{caller} takes a function, got {describe(fun)}. For example: {example}.")
