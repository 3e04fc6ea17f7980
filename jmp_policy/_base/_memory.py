"""Caches that end with their keys, and the JAX user contexts of lazily loaded packages."""

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

# JAX contexts, because a jitted function that was traced under another value must be traced again. JAX keeps values
# forever, so they are references and tokens.
ACTIVE_POLICY = jax.make_user_context(None)  # the policy whose linen modules are running
IN_FULL_PRECISION = jax.make_user_context(False)  # true inside `force_full_precision`
INFERRED = jax.make_user_context(None)  # policy and dtype of the innermost nnx call that inferred a dtype
OBSERVING = jax.make_user_context(None)  # the running observation
REDUCING = jax.make_user_context(None)  # the search of the innermost gradient function
REWRITING = jax.make_user_context(False)  # true inside a model whose matmuls by its weights are rewritten
TRACING = jax.make_user_context(None)  # the scope register of the function that is being traced


T = TypeVar("T")


class Note(NamedTuple):
    """A text about a piece of traced code, for the observer that traces it."""

    kind: str
    scope: str  # the name stack
    name: str
    text: str


class TraceToken:
    """Identity of a trace in the keys of `jit`, with the texts that traced code notes for its observer."""

    def __init__(self) -> None:
        self.notes: list[Note] = []


def note_for_observer(kind: str, list_texts: Callable[[], Iterable[tuple[str, str]]]) -> None:
    """Notes pairs of a name and a text, if an observer traces this code."""
    token = TRACING.value
    if isinstance(token, TraceToken):
        from jax.extend import source_info_util  # loads Pallas, which `import jmp_policy` does not

        scope = str(source_info_util.current_name_stack())
        token.notes += [Note(kind, scope, name, text) for name, text in list_texts()]


def is_in_full_precision() -> bool:
    """Reads `IN_FULL_PRECISION` for wrappers that are pickled by value with their globals, as no context can be."""
    return bool(IN_FULL_PRECISION.value)


_MEMORY = "_jmp_memory"
_RECENT = 16  # the last results that `remember_recent` keeps on a class
_LOCK = threading.Lock()
_UNKNOWN = object()


def remember_weakly(fun: Callable[[Any], T]) -> Callable[[Any], T]:
    """Memoizes a function of a class, or of another weakly referenced object. Results must not refer to it."""
    results: dict[weakref.ref[Any], T] = {}  # a WeakKeyDictionary makes two more calls per lookup

    @functools.wraps(fun)
    def look_up(key: object) -> T:
        try:
            return results[weakref.ref(key)]
        except KeyError:
            found = results[weakref.ref(key, forget)] = fun(key)
            return found

    def forget(reference: weakref.ref[Any]) -> None:
        results.pop(reference, None)

    return look_up


def remember_on_class(fun: Callable[..., T]) -> Callable[..., T]:
    """Memoizes `fun(kind, *args)` on the class: results refer to it, so a weak dictionary would keep both alive."""

    @functools.wraps(fun)
    def look_up(kind: type, *args: Any) -> T:
        results = _get_memory(kind)
        key = (fun, *args)
        found = results.get(key, _UNKNOWN)
        return results.setdefault(key, fun(kind, *args)) if found is _UNKNOWN else found

    return look_up


def remember_recent(fun: Callable[..., T]) -> Callable[..., T]:
    """Like `remember_on_class`, but keeps only those results that are in use, and the last few others."""

    @functools.wraps(fun)
    def look_up(kind: type, *args: Any) -> T:
        new = weakref.WeakValueDictionary(), collections.deque(maxlen=_RECENT)
        results, recent = _get_memory(kind).setdefault((fun,), new)
        found = results.get(args)
        made = fun(kind, *args) if found is None else found
        with _LOCK:
            found = results.setdefault(args, made)
            if found in recent:
                recent.remove(found)
            recent.append(found)
        return found

    return look_up


class _Memory(dict[tuple, Any]):
    """Results of functions by their arguments; not pickled."""

    def __init__(self, owner: type | None = None):
        super().__init__()
        # `dataclass(slots=True)` copies a memory into another class.
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)

    def __reduce__(self) -> tuple:
        return _Memory, ()


def _get_memory(kind: type) -> _Memory:
    found = vars(kind).get(_MEMORY)
    if found is None or found.owner() is not kind:
        with _LOCK:
            found = vars(kind).get(_MEMORY)
            if found is None or found.owner() is not kind:
                found = _Memory(kind)
                setattr(kind, _MEMORY, found)
    return found


def meet_policy(compute_dtype: np.dtype | None, reduce_dtype: np.dtype | None) -> None:
    """Shows the dtypes of a policy that takes effect to the running gradient function, if there is one."""
    if REDUCING.value is not None:
        REDUCING.value.meet(compute_dtype, reduce_dtype)
