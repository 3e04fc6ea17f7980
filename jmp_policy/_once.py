"""Warnings that are given once, however often what they are about is called or traced."""

import weakref
from typing import Any

from ._messages import warn_user

# Weak: what was given a policy, and is gone, is not kept alive by what was said of it.
_SAID: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def warn_once(about: Any, message: str) -> None:
    """Warns at the user's line, unless this was said of the same object before.

    Args:
      about: a map, or a class with a policy.
      message: what to say; up to a semicolon it tells whether it was said, and the rest may differ.
    """
    said, gist = _SAID.setdefault(about, set()), message.partition(";")[0]
    if gist not in said:
        said.add(gist)
        warn_user(message)


def forget_warnings(about: Any) -> None:
    """Has warnings given again, as where an object is handed to `with_policy` once more."""
    _SAID.pop(about, None)
