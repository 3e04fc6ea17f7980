"""The user's line that an equation comes from."""

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from ._walk import Step

_JAX = ("jax", "jaxlib")
_LIBRARIES = ("flax", "optax", "chex", "haiku", "equinox", "numpy", "ml_dtypes")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def find_origin(step: Step) -> JaxprEqn:
    """Finds the equation whose traceback shows where in the user's code a step comes from.

    JAX traces a jitted function of its own once for all calls. In the tracebacks of its equations, the frames below
    the function show its first caller. So a step inside such a function belongs to the equation that calls it.
    """
    eqn = step.eqn
    for call, body in reversed(step.around):
        if _is_inside_users_code(eqn, body):
            break
        eqn = call
    return eqn


def find_line(eqn: JaxprEqn) -> str:
    """Finds the innermost frame of the user's code, `"file.py:12 (function)"`.

    Where there is none, as for a library's function that was given as it is, it is the innermost frame of a library
    other than JAX, and the empty string where there is none of those.
    """
    return choose_line(_list_frames(eqn))


def find_calling_line(eqn: JaxprEqn) -> str:
    """Finds the innermost frame that is not JAX's own, be it a library's; none is the empty string."""
    return next((_write_line(f) for f in _list_frames(eqn) if not _is_from(_JAX, f.file_name)), "")


def choose_line(frames: Sequence[Any]) -> str:
    """Chooses the line that `find_line` returns from frames, innermost first."""
    others = (_write_line(frame) for frame in frames if _is_from(_LIBRARIES, frame.file_name))
    return next(_list_user_lines(frames), None) or next(others, "")


def split_line(line: str) -> tuple[str, str]:
    """The line and the function of what `find_line` returns.

    >>> split_line("train.py:12 (loss)")
    ('train.py:12', 'loss')
    """
    source, _, function = line.partition(" (")
    return source, function.removesuffix(")")


def is_called_by_library(eqn: JaxprEqn) -> bool:
    """Whether a library, such as a layer of Flax, called JAX, and not the user's code."""
    return _is_library(_find_caller(eqn))


def is_called_by(eqn: JaxprEqn, package: str) -> bool:
    """Whether a file of a package, such as `"optax.losses"`, called JAX."""
    return _make_folder(package) in _find_caller(eqn)


def list_functions(step: Step) -> set[str]:
    """The names of the functions that a step was traced in, and of the jitted functions around it."""
    eqns = [step.eqn, *(call for call, _ in step.around)]
    names = {frame.function_name for eqn in (step.eqn, find_origin(step)) for frame in _list_frames(eqn)}
    return names | {str(eqn.params.get("name")) for eqn in eqns}


def is_traced_in(eqn: JaxprEqn, package: str) -> bool:
    """Whether an equation was traced in a function of a package, such as `"optax.losses"`."""
    folder = _make_folder(package)
    return any(folder in frame.file_name for frame in _list_frames(eqn))


def find_running_line() -> str:
    """Finds the innermost frame of the user's code that is running."""
    frame = sys._getframe(1)
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return next((f"{file}:{number} ({name})" for file, number, name in frames if not _is_library(file)), "")


def find_raising_line(error: BaseException) -> str:
    """Finds the innermost frame of the user's code that an error came through; none is the empty string."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = (f"{frame.filename}:{frame.lineno} ({frame.name})" for frame in frames if not _is_library(frame.filename))
    return next(lines, "")


def _is_inside_users_code(eqn: JaxprEqn, body: Jaxpr) -> bool:
    """Whether the function of a body is the user's, or has called code of the user's that made an equation."""
    function, _, place = (body.debug_info.func_src_info or "").partition(" at ")
    file = place.rpartition(":")[0]
    for frame in _list_frames(eqn):
        if not _is_library(frame.file_name):
            return True
        if frame.function_name == function and frame.file_name == file:
            return False
    return not file or not _is_library(file)


def _find_caller(eqn: JaxprEqn) -> str:
    """The file whose code called JAX."""
    return next((frame.file_name for frame in _list_frames(eqn) if not _is_from(_JAX, frame.file_name)), "")


@functools.cache
def _make_folder(package: str) -> str:
    return os.path.join(*package.split("."), "")


def _list_user_lines(frames: Iterable[Any]) -> Iterator[str]:
    for frame in frames:
        if not _is_library(frame.file_name):
            yield _write_line(frame)


def _write_line(frame: Any) -> str:
    return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"


def _list_frames(eqn: JaxprEqn) -> list[Any]:
    traceback = eqn.source_info.traceback
    return [] if traceback is None else traceback.frames


@functools.cache
def _is_library(file: str) -> bool:
    """Whether a file belongs to a library that models are written with, or to Python itself."""
    from_library = file.startswith(_OWN) or _is_from(_JAX + _LIBRARIES, file)
    return from_library or os.path.dirname(file) == _PYTHON or file.startswith("<frozen")


@functools.cache
def _is_from(packages: tuple[str, ...], file: str) -> bool:
    folders = [getattr(sys.modules.get(name), "__file__", None) for name in packages]
    return file.startswith(tuple(os.path.dirname(folder) + os.sep for folder in folders if folder))


_PYTHON = os.path.dirname(os.path.abspath(contextlib.__file__))
