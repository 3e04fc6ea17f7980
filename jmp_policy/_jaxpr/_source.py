"""The source line of an equation, and the path of the module that it belongs to."""

import collections
import contextlib
import contextvars
import functools
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]

from .._base import PRODUCT_SCOPE, ROUNDING_SCOPE, Args, Kwargs, Note, TraceToken, list_paths_to
from ..modules import Adapter, ModuleCall, find_loaded_adapters
from ._program import Step, name_stack, strip_transformations

_JAX = ("jax", "jaxlib")
_LIBRARIES = ("flax", "optax", "chex", "haiku", "equinox", "numpy", "ml_dtypes")
_LOSSES = os.path.join("optax", "losses", "")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def find_origin(step: Step) -> JaxprEqn:
    """Finds the equation with the user's line. Equations in jitted functions of JAX have their caller's line."""
    eqn = step.eqn
    for call, body in reversed(step.around):
        if _is_inside_users_code(eqn, body):
            break
        eqn = call
    return eqn


def find_line(eqn: JaxprEqn) -> str:
    """Finds the innermost frame of the user's code, else of a library other than JAX, as `"file.py:12 (function)"`."""
    return choose_line(_list_frames(eqn))


def find_calling_line(eqn: JaxprEqn) -> str:
    """Finds the innermost frame outside JAX; returns the empty string without one."""
    return next((_spell_frame(f) for f in _list_frames(eqn) if not _is_from(_JAX, f.file_name)), "")


def list_callers(eqn: JaxprEqn) -> list[tuple[Any, int]]:
    """Lists the code outside JAX that called JAX, and where in it: the same for all equations of one call."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else zip(*traceback.raw_frames(), strict=True)
    return [*itertools.dropwhile(lambda frame: _is_from(_JAX, frame[0].co_filename), frames)]


def choose_line(frames: Sequence[Any]) -> str:
    """Returns the line for `find_line`, given frames with the innermost first."""
    own = (frame for frame in frames if not _is_library(frame.file_name))
    others = (frame for frame in frames if _is_from(_LIBRARIES, frame.file_name))
    frame = next(own, None) or next(others, None)
    return "" if frame is None else _spell_frame(frame)


def split_line(line: str) -> tuple[str, str]:
    """Splits a result of `find_line`: `"train.py:12 (loss)"` becomes `("train.py:12", "loss")`."""
    source, _, function = line.partition(" (")
    return source, function.removesuffix(")")


def is_called_by_library(eqn: JaxprEqn) -> bool:
    """True if a library, such as a layer of Flax, called JAX."""
    return _is_library(_find_caller(eqn))


def is_called_by_loss(eqn: JaxprEqn) -> bool:
    """True if a loss of optax called JAX."""
    return _LOSSES in _find_caller(eqn)


def is_from_custom_rule(eqn: JaxprEqn) -> bool:
    """True if differentiation wrote an equation from a custom derivative that is not JAX's own."""
    frames = _list_frames(eqn)
    names = [frame.function_name for frame in frames]
    if "custom_vjp.__call__" in names:
        return True
    inside = names.index("custom_jvp.__call__") if "custom_jvp.__call__" in names else 0
    return any(not _is_from(_JAX, frame.file_name) for frame in frames[:inside])


def list_functions(step: Step) -> set[str]:
    """Lists the names of the functions in the traceback of a step, and of the jitted functions around it."""
    eqns = [step.eqn, *(call for call, _ in step.around)]
    names = {frame.function_name for eqn in (step.eqn, find_origin(step)) for frame in _list_frames(eqn)}
    return names | {str(eqn.params.get("name")) for eqn in eqns}


def is_traced_in_loss(eqn: JaxprEqn) -> bool:
    """True if a loss of optax is in the traceback of an equation."""
    return any(_LOSSES in frame.file_name for frame in _list_frames(eqn))


def find_running_line() -> str:
    """Finds the innermost running frame of the user's code; returns the empty string without one."""
    for frame, number in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if not _is_library(code.co_filename):
            return f"{code.co_filename}:{number} ({code.co_name})"
    return ""


def find_raising_line(error: BaseException) -> str:
    """Finds the innermost frame of the user's code in a traceback; returns the empty string without one."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = (f"{frame.filename}:{frame.lineno} ({frame.name})" for frame in frames if not _is_library(frame.filename))
    return next(lines, "")


def _is_inside_users_code(eqn: JaxprEqn, body: Jaxpr) -> bool:
    """True if a user wrote the function of `body`, or code that it called to make `eqn`."""
    function, _, place = (body.debug_info.func_src_info or "").partition(" at ")
    file = place.rpartition(":")[0]
    for frame in _list_frames(eqn):
        if not _is_library(frame.file_name):
            return True
        if frame.function_name == function and frame.file_name == file:
            return False
    return not file or not _is_library(file)


def _find_caller(eqn: JaxprEqn) -> str:
    return next((frame.file_name for frame in _list_frames(eqn) if not _is_from(_JAX, frame.file_name)), "")


def _spell_frame(frame: Any) -> str:
    return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"


def _list_frames(eqn: JaxprEqn) -> list[Any]:
    traceback = eqn.source_info.traceback
    return [] if traceback is None else traceback.frames


@functools.cache
def _is_library(file: str) -> bool:
    """True for a file of this package, of a library that models are written with, or of Python."""
    from_library = file.startswith(_OWN) or _is_from(_JAX + _LIBRARIES, file)
    return from_library or os.path.dirname(file) == _PYTHON or file.startswith("<frozen")


def _is_from(packages: tuple[str, ...], file: str) -> bool:
    folders = [getattr(sys.modules.get(name), "__file__", None) for name in packages]
    return file.startswith(tuple(os.path.dirname(folder) + os.sep for folder in folders if folder))


_PYTHON = os.path.dirname(os.path.abspath(contextlib.__file__))


ELSEWHERE = "^"
"""Prefix of the scope of a module that is called from outside its parent, such as a tied embedding."""

AUTOCAST = "jmp_autocast"
"""The scope of equations that autocast wrote; not part of a module path."""

ROUNDED = "jmp_rounded"
"""The scope of casts that autocast wrote because a rule of the user says so; not part of a module path."""

LIST_WEIGHTS = "_jmp_list_weights"
"""The attribute of a function of autocast that describes the weights of a call, for `explain`."""

RECORD = "jmp_record"
"""The scope of a recorder's measurements; not part of a module path."""

_NO_SCOPES = frozenset({
    "", "rematted_computation", "checkpoint", "force_full_precision",
    AUTOCAST, ROUNDED, RECORD, ROUNDING_SCOPE, PRODUCT_SCOPE,
})  # fmt: skip


_EINSUM = re.compile(r"[A-Za-z.]*(,[A-Za-z.]*)*->[A-Za-z.]*|[A-Za-z.]{2,}(,[A-Za-z.]{2,})+")
"""A scope of `jnp.einsum`, without an arrow if both operands have two axes."""


class Modules(NamedTuple):
    """The modules of a program, which distinguish module paths from other scopes in a name stack."""

    types: tuple[tuple[str, type], ...] = ()  # pairs of the path and type of each module
    roots: frozenset[str] = frozenset()  # scopes of root linen modules: class names, which paths leave out
    # Pairs of a module path and a scope with a method name, such as `encoder.encode`.
    methods: frozenset[tuple[str, str]] = frozenset()
    policied: frozenset[str] = frozenset()  # paths of the modules that have a policy, or a rule of one, of their own


def make_module_finder(modules: Iterable[str]) -> Callable[[str], str]:
    """Returns a function that drops the `jax.named_scope`s around, between and inside of the modules of a path.

    >>> make_module_finder(["", "layers/0", "layers/0/query"])("outer/layers/0/attention/query/scores")
    'layers/0/query'
    """
    known = {outer for module in modules for outer in list_paths_to(module)}

    @functools.cache
    def find_module(path: str) -> str:
        found = ""
        for name in path.split("/"):
            longer = f"{found}/{name}" if found else name
            found = longer if longer in known else found
        return found

    return find_module


def find_policy_keys(paths: Iterable[str], scopes: Iterable[str], modules: Modules) -> dict[str, str] | None:
    """Returns the key of a rule for each path; None without autocast and modules, where no rule reaches the program.

    `scopes` are the name stacks of the program. Under autocast, keys are paths with all scopes, else paths of modules.
    """
    if any(AUTOCAST in scope for scope in scopes):
        return {path: path for path in paths}
    types = dict(modules.types)
    find_module = make_module_finder(types)
    return {path: _find_relative_path(find_module(path), modules.policied) for path in paths} if types else None


def _find_relative_path(module: str, policied: Collection[str]) -> str:
    """Returns the path of a module inside of the module that has the policy."""
    outer = next((outer for outer in list_paths_to(module) if outer in policied), "")
    return module.removeprefix(outer).removeprefix("/")


class ModulePaths:
    """Reads module paths from name stacks."""

    def __init__(self, modules: Modules):
        self._modules = modules
        self._with_methods: dict[str, list[str]] = {}
        for path, name in modules.methods:
            self._with_methods.setdefault(name, []).append(path)

    def find(self, outer: str, eqn: JaxprEqn) -> str:
        """Returns the path of an equation in a sub-jaxpr that has the path `outer`."""
        return self._follow(outer.split("/") if outer else [], name_stack(eqn))

    def read_stack(self, stack: str) -> str:
        """Returns the module path of a name stack.

        >>> paths = ModulePaths(Modules(roots=frozenset(["Net"]), methods=frozenset([("encoder", "encoder.encode")])))
        >>> paths.read_stack("transpose(jvp(Net))/encoder/encoder.encode/dense")
        'encoder/dense'
        """
        return self._follow([], stack)

    def _follow(self, path: list[str], stack: str) -> str:
        for name in strip_transformations(stack).split("/"):
            # `jnp.einsum` opens scopes, too, such as `ij,jk->ik` or `ij,jk`.
            if name in _NO_SCOPES or name in self._modules.roots or _EINSUM.fullmatch(name):
                continue
            if name.startswith(ELSEWHERE):
                path = [name.removeprefix(ELSEWHERE)]
            elif name not in self._with_methods:
                path = [*path, name]
            elif not any(f"/{'/'.join(path)}".endswith(f"/{module}") for module in self._with_methods[name]):
                path = [*path, name.partition(".")[0]]
        return self._hoisted.get("/".join(path), "/".join(path))

    @functools.cached_property
    def _hoisted(self) -> dict[str, str]:
        """The whole paths of modules by their ends, for ends of two names or more that belong to one module only.

        JAX moves what does not depend on the carry out of a scan, and forgets the scopes around the scan.
        """
        parts = [path.split("/") for path in dict(self._modules.types)]
        ends = [("/".join(names[i:]), "/".join(names)) for names in parts for i in range(1, len(names) - 1)]
        outermost, count = {names[0] for names in parts}, collections.Counter(end for end, _ in ends)
        return {end: path for end, path in ends if count[end] == 1 and end.partition("/")[0] not in outermost}


class _TracedCall(NamedTuple):
    """The path of the module whose method is being traced, and the ids of the registers that have seen the call."""

    path: str = ""
    seen_by: frozenset[int] = frozenset()


_NO_CALL = _TracedCall()
_LINEN: contextvars.ContextVar[_TracedCall] = contextvars.ContextVar("_LINEN", default=_NO_CALL)
_NNX: contextvars.ContextVar[_TracedCall] = contextvars.ContextVar("_NNX", default=_NO_CALL)


_UNUSED: list[TraceToken] = []
"""Tokens under which JAX has cached no function with modules or notes. It keeps what it cached under any other."""


class Register:
    """Collects the modules that one function calls while it is traced."""

    def __init__(self) -> None:
        find_loaded_adapters()  # if loaded while a function is traced, their contexts would make JAX trace it again
        self._token: TraceToken | None = None
        self.notes: list[Note] = []  # of the traced code
        self._types, self._roots, self._methods = dict[str, type](), set[str](), set[tuple[str, str]]()
        self._policied = set[str]()

    def take_token(self) -> TraceToken:
        """Returns the token that represents the register in the keys of JAX.

        JAX traces jitted functions of users again, so that the register sees their modules.
        """
        if self._token is None:
            with contextlib.suppress(IndexError):
                self._token = _UNUSED.pop()
        self._token = self._token or TraceToken()
        return self._token

    def release_token(self, program: Jaxpr) -> None:
        """Takes the notes. Leaves the token to another register if JAX has cached nothing under it that it must see."""
        if self._token is None:
            return
        self.notes = [*self._token.notes]
        self._token.notes.clear()
        # A user's function under `jax.jit(..., inline=True)` is cached too, and leaves no jaxpr here.
        if not (self._types or self.notes) or all(map(_is_of_jax, _list_bodies(program))):
            _UNUSED.append(self._token)
            self._token = None

    def list_modules(self) -> Modules:
        types = tuple(self._types.items())
        return Modules(types, frozenset(self._roots), frozenset(self._methods), frozenset(self._policied))

    def watch(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function to collect its modules and give each a scope. No other code may refer to its arguments."""
        for adapter in find_loaded_adapters():
            fun = self._watch_modules_of(adapter, fun)
        return fun

    def _watch_modules_of(self, adapter: Adapter, fun: Callable[..., Any]) -> Callable[..., Any]:
        hooked = adapter.hook_calls(fun, functools.partial(self._hook, adapter), setup=True)

        def call_watched(*args: Any, **kwargs: Any) -> Any:
            # A rule may name a module that is not called, to apply to its submodules.
            self._types.update(adapter.find_modules((args, kwargs)))
            return hooked(*args, **kwargs)

        return call_watched

    def _hook(
        self, adapter: Adapter, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> Any:
        self._types[call.path] = call.type
        if adapter.policy_of(call.module) is not None:
            self._policied.add(call.path)
        if call.scope and not call.path:
            self._roots.add(call.scope)
        elif call.scope and call.method != "__call__":
            self._methods.add((call.path, call.scope))
        called = _LINEN if call.scope else _NNX
        caller, own = called.get(), {id(self)}
        # A register inside of another one sees the same call, for which the outer one has opened the scope.
        is_seen = call.path == caller.path and bool(caller.seen_by) and own.isdisjoint(caller.seen_by)
        scope = nullcontext() if is_seen else _scope_of(call, caller.path)
        token = called.set(_TracedCall(call.path, caller.seen_by.union(own) if is_seen else frozenset(own)))
        try:
            with scope:
                return next_fun(*args, **kwargs)
        finally:
            called.reset(token)


def _list_bodies(program: Jaxpr) -> Iterator[Jaxpr]:
    for eqn in program.eqns:
        for body in jaxprs_in_params(eqn.params):
            yield body
            yield from _list_bodies(body)


def _is_of_jax(body: Jaxpr) -> bool:
    place = (body.debug_info.func_src_info or "").partition(" at ")[2]
    return _is_from((*_JAX, "optax"), place)


def _scope_of(call: ModuleCall, caller: str) -> AbstractContextManager[Any]:
    """Returns the scope to open around a call so that the name stack spells its path. `caller` is the caller's path."""
    if call.scope and not call.path:
        return nullcontext()
    if call.path == caller:
        # For a module that calls itself, such as a cell in a scan, Flax opens the same scope as for a submodule.
        is_again = call.scope and call.method == "__call__"
        return jax.named_scope(ELSEWHERE + call.path) if is_again else nullcontext()
    inside = call.path.removeprefix(f"{caller}/" if caller else "")
    if caller and inside == call.path:
        return jax.named_scope(ELSEWHERE + call.path)
    if not call.scope:
        return jax.named_scope(inside)
    # Flax opens a scope with the module's own name, which is enough for a direct child of the caller.
    name = call.scope.removesuffix(f".{call.method}")
    return nullcontext() if inside == name else jax.named_scope(ELSEWHERE + call.path)
