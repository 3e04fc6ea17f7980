"""Error messages: quoting values, suggestions, and warnings at the user's line."""

import difflib
import functools
import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import jax

_LONGEST_QUOTE = 500
_LONGEST_WORD = 100  # longer words are not compared with known names
_LONGEST_LINE = 100
_LIBRARIES = ("contextlib", "flax", "jax", "jmp_policy", "optax")

_PACKAGE = __name__.partition(".")[0]

F = TypeVar("F", bound=Callable[..., Any])

_SAID: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def warn_user(message: str) -> None:
    """Warns at the innermost line outside of this package and of the libraries that call it."""
    # JAX calls traced functions, so no fixed `stacklevel` points to the user's line.
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(escape_controls(message), stacklevel=level)


def warn_once(about: object, message: str) -> None:
    """Warns once about an object. Messages that agree up to the first semicolon count as the same."""
    said, gist = _SAID.setdefault(about, set()), message.partition(";")[0]
    if gist not in said:
        said.add(gist)
        warn_user(message)


def forget_warnings(about: object) -> None:
    """Makes `warn_once` warn again, as when an object is passed to `with_policy` again."""
    _SAID.pop(about, None)


def escape_controls(text: str, keep: str = "\n") -> str:
    """Escapes terminal control characters, as in names of modules or files, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def quote(value: object) -> str:
    """Returns the repr of a value, shortened if it is long."""
    try:
        return shorten(repr(value))
    except RecursionError:
        return f"a {type(value).__name__} with very many levels"


def describe(value: object) -> str:
    """Returns the repr of a value on one line, shortened: a model may print on a thousand lines."""
    line = " ".join(quote(value).split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}... (a {type(value).__name__})"


def shorten(text: str) -> str:
    """Keeps the beginning and end of a long text."""
    if len(text) <= _LONGEST_QUOTE:
        return text
    half = (_LONGEST_QUOTE - 5) // 2
    return f"{text[: half + 1]} ... {text[-half:]}"


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """Suggests the nearest of `choices`, or lists all of them if none is near."""
    choices = list(choices)
    text = str(word).strip().lower()
    near = difflib.get_close_matches(text, choices) if len(text) <= _LONGEST_WORD else []
    near.sort(key=lambda choice: sorted(choice) != sorted(text))  # swapped letters first
    return f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(map(repr, choices))}."


def hide_frames(fun: F) -> F:
    """Removes the frames of this package from the traceback of an error in a function, as JAX does for its own frames.

    The frame that raised the error stays. `JAX_TRACEBACK_FILTERING=off` keeps all frames, of JAX and of this package.
    """

    @functools.wraps(fun)
    def call_hiding_frames(*args: Any, **kwargs: Any) -> Any:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, RecursionError):  # one more call could raise another
                _remove_frames(error)
            raise

    # One wrapper to other code: what `fun` wraps, where it wraps something.
    call_hiding_frames.__wrapped__ = getattr(fun, "__wrapped__", fun)
    return cast(F, call_hiding_frames)


def _remove_frames(error: Exception) -> None:
    mode: Any = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    if mode == "off":
        return
    kept: list[types.TracebackType] = []
    step = error.__traceback__
    while step is not None:
        package = str(step.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if package != _PACKAGE or step.tb_next is None:
            kept.append(step)
        step = step.tb_next
    for outer, inner in zip(kept, [*kept[1:], None], strict=True):
        outer.tb_next = inner
    error.__traceback__ = kept[0]


class Check:
    """Checks a function once it is called with its arguments. It warns if it never is, and has no truth value.

    >>> bool(Check(lambda x: x > 0, "certify(fun, ranges)"))
    Traceback (most recent call last):
    TypeError: certify(fun, ranges) checks nothing until it is called with the arguments of the function. For example: \
certify(fun, ranges)(x).
    """

    def __init__(self, fun: Callable[..., Any], name: str):
        functools.update_wrapper(self, fun)
        self._fun, self._name, self._is_called = fun, name, False

    @hide_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._is_called = True
        return self._fun(*args, **kwargs)

    def __bool__(self) -> bool:
        self._is_called = True
        raise TypeError(self._explain())

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be gone then
        if not self._is_called and not is_finalizing():
            warn_user(self._explain())

    def _explain(self) -> str:
        return (
            f"{self._name} checks nothing until it is called with the arguments of the function. "
            f"For example: {self._name}(x)."
        )
