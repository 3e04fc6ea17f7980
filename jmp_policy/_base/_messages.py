"""How the library speaks to its user: what errors quote, and warnings at the line that they are about."""

import inspect
import warnings
import weakref
from typing import Any

_LONGEST_QUOTE = 500
_LONGEST_LINE = 100
_LIBRARIES = ("contextlib", "flax", "jax", "jmp_policy", "optax")

# Weak: what was given a policy, and is gone, is not kept alive by what was said of it.
_SAID: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def warn_user(message: str) -> None:
    """Warns at the innermost line that is not of this library, nor of those that call its functions for the user.

    A function that is traced is called by JAX, so that no number of frames says where the user's line is.
    """
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(escape_controls(message), stacklevel=level)


def warn_once(about: object, message: str) -> None:
    """Warns at the user's line, unless this was said of the same object before.

    Args:
      about: a map, or a class with a policy.
      message: what to say; up to a semicolon it tells whether it was said, and the rest may differ.
    """
    said, gist = _SAID.setdefault(about, set()), message.partition(";")[0]
    if gist not in said:
        said.add(gist)
        warn_user(message)


def forget_warnings(about: object) -> None:
    """Has warnings given again, as where an object is handed to `with_policy` once more."""
    _SAID.pop(about, None)


def escape_controls(text: str, keep: str = "\n") -> str:
    r"""Escapes the characters of a text that a terminal would obey, which the name of a module or a file may have.

    Args:
      text: what is to be shown.
      keep: the characters among them that stay.

    >>> escape_controls("head\x1b[31m")
    'head\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def quote(value: object) -> str:
    """What a user gave as an error repeats it: whole, unless it is long.

    >>> quote("bfloat17"), len(quote("x" * 1_000_000))
    ("'bfloat17'", 500)
    """
    return shorten(repr(value))


def describe(value: object) -> str:
    """A value on one line of an error message: a model or a train state may print on a thousand.

    >>> describe([1, 2]), describe("x" * 1_000)[-11:]
    ('[1, 2]', '... (a str)')
    """
    line = " ".join(repr(value).split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}... (a {type(value).__name__})"


def shorten(text: str) -> str:
    """A text, whole, or its beginning and its end.

    >>> shorten("bfloat17"), len(shorten("x" * 1_000_000))
    ('bfloat17', 500)
    """
    if len(text) <= _LONGEST_QUOTE:
        return text
    half = (_LONGEST_QUOTE - 5) // 2
    return f"{text[: half + 1]} ... {text[-half:]}"
