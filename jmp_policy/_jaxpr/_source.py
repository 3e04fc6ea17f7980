"""Where an equation comes from: the user's line, and the path of the module around it."""

import contextlib
import contextvars
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from .._base import Args, Kwargs
from ..modules import Adapter, ModuleCall, find_loaded_adapters
from ._program import PRODUCT_SCOPE, Step, name_stack, strip_transformations

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


ELSEWHERE = "^"
"""What starts the scope of a module that is called from one that it is not inside of, such as a tied embedding: its
path starts there."""

AUTOCAST = "jmp_autocast"
"""The scope of what autocast decided, which tells it from what an author wrote; no part of a path."""

RECORD = "jmp_record"
"""The scope of what a recorder measures, which is no part of the user's program."""

ROUNDING_SCOPE = "jmp_rounding"
"""The scope of what rounds the operands of a product into a quantized format, and back: conversions, which are no part
of what a layer computes in; no part of a path."""

_NO_SCOPES = frozenset({
    "", "rematted_computation", "checkpoint", "force_full_precision", AUTOCAST, RECORD, ROUNDING_SCOPE, PRODUCT_SCOPE,
})  # fmt: skip


class Modules(NamedTuple):
    """What tells module paths from the other names in a name stack.

    Attributes:
      types: the type of each module by its path, as pairs.
      roots: what the roots of linen models are called in name stacks: by their class, where a path leaves them out.
      methods: the paths of modules, each with the name of it and a method, such as `encoder.encode`.
    """

    types: tuple[tuple[str, type], ...] = ()
    roots: frozenset[str] = frozenset()
    methods: frozenset[tuple[str, str]] = frozenset()


class ModulePaths:
    """Reads the paths of equations.

    Args:
      modules: the modules that the program calls.
    """

    def __init__(self, modules: Modules):
        self._modules = modules
        self._with_methods: dict[str, list[str]] = {}
        for path, name in modules.methods:
            self._with_methods.setdefault(name, []).append(path)
        self._joined: dict[tuple[str, str], str] = {}

    def find(self, outer: str, eqn: JaxprEqn) -> str:
        """The path of an equation in a body whose own path is `outer`."""
        return self._join(outer, _list_names(name_stack(eqn)))

    def read_stack(self, stack: str) -> str:
        """The path that a name stack spells.

        >>> paths = ModulePaths(Modules(roots=frozenset(["Net"]), methods=frozenset([("encoder", "encoder.encode")])))
        >>> paths.read_stack("transpose(jvp(Net))/encoder/encoder.encode/dense")
        'encoder/dense'
        """
        return self._join("", _list_names(stack))

    def _join(self, outer: str, names: list[str]) -> str:
        key = outer, "/".join(names)
        if key not in self._joined:
            self._joined[key] = "/".join(self._follow(outer.split("/") if outer else [], names))
        return self._joined[key]

    def _follow(self, path: list[str], names: list[str]) -> list[str]:
        for name in names:
            if name in self._modules.roots:
                continue
            if name.startswith(ELSEWHERE):
                path = [name.removeprefix(ELSEWHERE)]
            elif name not in self._with_methods:
                path = [*path, name]
            elif not self._is_own_method(path, name):
                path = [*path, name.partition(".")[0]]
        return path

    def _is_own_method(self, path: list[str], name: str) -> bool:
        """Whether a method that is called in the module at `path` belongs to that module, not to one inside."""
        here = "/" + "/".join(path)
        return any(here.endswith(f"/{module}") for module in self._with_methods[name])


def _list_names(stack: str) -> list[str]:
    """The scopes in a name stack, without what transformations put around them: `transpose(jvp(a))/b` is `a/b`.

    The subscripts of `jnp.einsum`, which opens a scope of that name, are no module's name.
    """
    names = strip_transformations(stack).split("/")
    return [name for name in names if name not in _NO_SCOPES and "->" not in name]


_LINEN: contextvars.ContextVar[str] = contextvars.ContextVar("_LINEN", default="")
_NNX: contextvars.ContextVar[str] = contextvars.ContextVar("_NNX", default="")
"""The paths of the linen and of the nnx module whose method is being traced; each begins at a root of its own."""

_CASTING: contextvars.ContextVar[bool] = contextvars.ContextVar("_CASTING", default=False)
"""True while `autocast` traces a function, which it then rewrites."""


@contextmanager
def note_casting() -> Iterator[None]:
    """Has `refuse_casting` raise inside."""
    token = _CASTING.set(True)
    try:
        yield
    finally:
        _CASTING.reset(token)


def refuse_casting(instrument: str) -> None:
    """Raises a `ValueError` where a program is measured that `autocast` then rewrites."""
    if _CASTING.get():
        raise ValueError(
            f"{instrument} inside of autocast would report the dtypes that the function was traced with, and not those "
            f"that it runs in: put it outside. For example: {instrument}(autocast(loss_fn, 'mixed_bfloat16'))."
        )


class Register:
    """The modules that were called in the traces of one function.

    Attributes:
      token: what stands for it in JAX's keys, which JAX never lets go of.
    """

    def __init__(self) -> None:
        find_loaded_adapters()  # loaded while a jitted function is traced, their contexts would have JAX trace it again
        self.token = object()
        self._types: dict[str, type] = {}
        self._roots: set[str] = set()
        self._methods: set[tuple[str, str]] = set()

    def list_modules(self) -> Modules:
        """Returns those that were entered."""
        return Modules(tuple(self._types.items()), frozenset(self._roots), frozenset(self._methods))

    def watch(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which enters the modules it calls, and runs each in a scope from which its path is read.

        Args:
          fun: a function whose arguments nobody else holds, as `Adapter.hook_calls` wants it.
        """
        for adapter in find_loaded_adapters():
            fun = self._watch_modules_of(adapter, fun)
        return fun

    def _watch_modules_of(self, adapter: Adapter, fun: Callable[..., Any]) -> Callable[..., Any]:
        hooked = adapter.hook_calls(fun, self._hook, setup=True)

        def call_watched(*args: Any, **kwargs: Any) -> Any:
            # A rule may be for a module that is not called, and decide for what is inside of it.
            self._types.update(adapter.find_modules((args, kwargs)))
            return hooked(*args, **kwargs)

        return call_watched

    def _hook(self, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        self._enter(call)
        called = _LINEN if call.scope else _NNX
        scope = _scope_of(call, called.get())
        token = called.set(call.path)
        try:
            with scope:
                return next_fun(*args, **kwargs)
        finally:
            called.reset(token)

    def _enter(self, call: ModuleCall) -> None:
        self._types[call.path] = call.type
        if call.scope and not call.path:
            self._roots.add(call.scope)
        elif call.scope and call.method != "__call__":
            self._methods.add((call.path, call.scope))


def _scope_of(call: ModuleCall, caller: str) -> AbstractContextManager[Any]:
    """The scope to open around a call, so that with what Flax opens the name stack says the path.

    Args:
      call: the call.
      caller: the path of the module that makes it; the empty string at a root, and outside of all modules.
    """
    if call.scope and not call.path:
        return nullcontext()
    if call.path == caller:
        # Flax opens a scope for a call by itself, as of a cell in a scan, as for one of a module of its name inside.
        is_again = call.scope and call.method == "__call__"
        return jax.named_scope(ELSEWHERE + call.path) if is_again else nullcontext()
    inside = call.path.removeprefix(f"{caller}/" if caller else "")
    if caller and inside == call.path:
        return jax.named_scope(ELSEWHERE + call.path)
    if not call.scope:
        return jax.named_scope(inside)
    # Flax opens a scope of the module's own name, which is all there is to say of one right inside of its caller.
    name = call.scope.removesuffix(f".{call.method}")
    return nullcontext() if inside == name else jax.named_scope(ELSEWHERE + call.path)
