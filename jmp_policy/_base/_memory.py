"""Caches that end with their keys, and the JAX user contexts of lazily loaded packages."""

import collections
import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

# JAX contexts, because a jitted function that was traced under another value must be traced again. JAX keeps values
# forever, so they are references and tokens.
ACTIVE_POLICY = jax.make_user_context(None)  # the policy whose linen modules are running
IN_FULL_PRECISION = jax.make_user_context(False)  # true inside `force_full_precision`
INFERRED = jax.make_user_context(None)  # policy and dtype of the innermost nnx call that inferred a dtype
OBSERVING = jax.make_user_context(None)  # the running observation
REDUCING = jax.make_user_context(None)  # the reduce dtype that the innermost gradient function found; see `_UNMET`
TRACING = jax.make_user_context(None)  # the scope register of the function that is being traced


T = TypeVar("T")

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
        self._owner = None if owner is None else weakref.ref(owner)

    def __reduce__(self) -> tuple:
        return _Memory, ()

    def is_of(self, kind: type) -> bool:
        return self._owner is not None and self._owner() is kind


def _get_memory(kind: type) -> _Memory:
    found = vars(kind).get(_MEMORY)
    if found is None or not found.is_of(kind):
        with _LOCK:
            found = vars(kind).get(_MEMORY)
            if found is None or not found.is_of(kind):
                found = _Memory(kind)
                setattr(kind, _MEMORY, found)
    return found


# `REDUCING` is the name of the dtype that was found, "" while there is none, or "given" if the caller gave one. It is
# `None` outside of our gradient functions.
_UNMET, _GIVEN = "", "given"


class _Met(BaseException):
    """Ends a trace. Not an `Exception`, so that handlers in user code do not catch it."""

    def __init__(self, dtype: np.dtype):
        super().__init__(dtype)
        self.dtype = dtype


def meet_reduce_dtype(dtype: np.dtype | None) -> None:
    """Passes the reduce dtype of a policy that takes effect to the function that computes gradients, if there is one.

    Policies are found only by tracing. So the first boundary with a reduce dtype ends the trace, and the gradients are
    computed again with that dtype.
    """
    known = REDUCING.value
    if dtype is not None and known not in (None, _GIVEN) and (known == _UNMET or is_wider(dtype, np.dtype(known))):
        raise _Met(dtype)


def search_reduce_dtype(take_gradients: Callable[[np.dtype | None], T]) -> T:
    """Calls `take_gradients(None)`, and again with the widest reduce dtype of the policies that it meets, if any."""
    dtype: np.dtype | None = None
    while True:
        try:
            with REDUCING(_UNMET if dtype is None else dtype.name):
                made = take_gradients(dtype)
            break
        except _Met as met:
            dtype = met.dtype
    meet_reduce_dtype(dtype)  # for nested gradients
    return made


def is_searching() -> bool:
    """True if this package computes the gradients of the running code, and not JAX alone."""
    return REDUCING.value is not None


def hold_given() -> AbstractContextManager:
    """Returns the context for gradients in a reduce dtype that the caller gave."""
    return REDUCING(_GIVEN) if REDUCING.value is None else nullcontext()  # an outer search goes on


def is_wider(dtype: np.dtype, other: np.dtype) -> bool:
    """True if `dtype` has more bits, or as many and a longer mantissa."""
    info, other_info = jnp.finfo(dtype), jnp.finfo(other)
    return (info.bits, info.nmant) > (other_info.bits, other_info.nmant)
