"""Fields of quantized formats: how they are checked, and how a string spells them."""

from typing import Any

from ._dtypes import did_you_mean
from ._messages import quote

DEFAULT_MIN_SIZE = 4096
"""The number of elements below which a product takes less time than the conversions around it."""


def check_count(format: Any, name: str, least: int, *, such_as: int = 128) -> None:
    """Raises unless a field is a whole number that is large enough.

    Raises:
      TypeError: it is no int; a bool is none.
      ValueError: it is less than `least`.
    """
    value = getattr(format, name)
    example = f"For example: {type(format).__name__}({name}={such_as})."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {quote(value)}. {example}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}. {example}")


def check_flag(format: Any, name: str) -> None:
    """Raises unless a field is a bool.

    Raises:
      TypeError: it is none.
    """
    value = getattr(format, name)
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, got {quote(value)}. For example: {type(format).__name__}().")


def check_word(format: Any, name: str, known: tuple[str, ...]) -> None:
    """Raises unless a field is one of some words.

    Raises:
      ValueError: it is none of them.
    """
    value = getattr(format, name)
    if not isinstance(value, str) or value not in known:
        example = f"For example: {type(format).__name__}({name}={known[-1]!r})."
        raise ValueError(f"Unknown {name} {quote(value)}. {did_you_mean(value, known)} {example}")


def spelled_options(format: Any, *names: str) -> str:
    """What differs from the defaults, as the options of a string: `"(activations=false)"`, or nothing."""
    default = type(format)()
    differing = [name for name in names if getattr(format, name) != getattr(default, name)]
    options = [f"{name}={str(getattr(format, name)).lower()}" for name in differing]
    return f"({','.join(options)})" if options else ""
