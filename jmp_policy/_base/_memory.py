"""Caches whose entries live as long as their keys, and the JAX user contexts of packages that load lazily."""

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

ACTIVE_POLICY = jax.make_user_context(None)
"""What refers to the policy whose linen modules are running."""

IN_FULL_PRECISION = jax.make_user_context(False)
"""Whether a call of `force_full_precision` runs. A policy inside computes in float32."""

INFERRED = jax.make_user_context(None)
"""The policy of the innermost nnx call that inferred a dtype, and the dtype.

A context, because a call may not write on modules that other threads call at the same time: each thread has its own,
and a jitted function inside the call is traced for each dtype."""

OBSERVING = jax.make_user_context(None)
"""What stands for the observation that is being made, to which it does not refer, as JAX never lets go of a key.

A context, because a function that was traced before would not call its modules again, and none would be seen."""

REDUCING = jax.make_user_context(None)
"""The reduce dtype that the innermost function that takes gradients knows of, by name; `""` while it knows none.

A context, because a jitted function that was traced before would not meet its policies again."""

TRACING = jax.make_user_context(None)
"""The token of the register of the function that is being traced by its scopes.

A context, because a jitted function that was traced before would not call its modules again, and none would be entered.
"""


T = TypeVar("T")

_MEMORY = "_jmp_memory"
_LOCK = threading.Lock()
_UNKNOWN = object()


def remember_weakly(fun: Callable[[Any], T]) -> Callable[[Any], T]:
    """Remembers the results of a function of a class, or of another object, that they do not refer to.

    >>> name_of = remember_weakly(lambda kind: kind.__name__)
    >>> name_of(dict), name_of(dict)
    ('dict', 'dict')
    """
    results: dict[weakref.ref[Any], T] = {}  # where a WeakKeyDictionary would call two functions more at each look

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
    """Remembers the results of `fun(kind, *args)` on the class `kind`: for results that refer to it, as subclasses do.

    They are kept in an attribute of the class, for a weak dictionary would keep both alive. All calls with equal
    arguments return one object.

    >>> class Base: pass
    >>> subclass_of = remember_on_class(lambda base, name: type(name, (base,), {}))
    >>> subclass_of(Base, "A") is subclass_of(Base, "A"), subclass_of(Base, "B").__name__
    (True, 'B')
    """

    @functools.wraps(fun)
    def look_up(kind: type, *args: Any) -> T:
        results = _get_memory(kind)
        key = (fun, *args)
        found = results.get(key, _UNKNOWN)
        return results.setdefault(key, fun(kind, *args)) if found is _UNKNOWN else found

    return look_up


class _Memory(dict[tuple, Any]):
    """Results of functions by their arguments; nothing that goes into a pickle with its class.

    It knows its class: one that is made of the attributes of another, as `dataclass(slots=True)` makes it, has the
    memory of that among them.
    """

    def __init__(self, owner: type | None = None):
        super().__init__()
        self._owner = None if owner is None else weakref.ref(owner)

    def __reduce__(self) -> tuple:
        return _Memory, ()

    def is_of(self, kind: type) -> bool:
        """Whether this is the memory of a class."""
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


_UNMET, _GIVEN = "", "given"
"""Values of the context: before a policy with a reduce dtype was met, and where the caller gave one. Otherwise it is
the name of the dtype that was met, or `None` where nobody takes gradients but JAX."""


class _Met(BaseException):
    """Ends a trace. Not an `Exception`, so that no handler of a user's errors catches it."""

    def __init__(self, dtype: np.dtype):
        super().__init__(dtype)
        self.dtype = dtype


def meet_reduce_dtype(dtype: np.dtype | None) -> None:
    """Hands the reduce dtype of a policy that takes effect to the function that takes gradients, if there is one.

    Only tracing tells which policies a loss function meets, and by then it is too late to take its gradients otherwise.
    So the first boundary with a reduce dtype ends the trace, and the gradients are taken once more in that dtype.
    """
    if dtype is not None:
        _hand_over(dtype)


def search_reduce_dtype(take_gradients: Callable[[np.dtype | None], T]) -> T:
    """Takes gradients, and once more where a policy has a reduce dtype: in the widest one that is met.

    Args:
      take_gradients: traces the loss function; its argument is the reduce dtype, or `None` while none is known.
    """
    dtype: np.dtype | None = None
    while True:
        try:
            with REDUCING(_UNMET if dtype is None else dtype.name):
                made = take_gradients(dtype)
            break
        except _Met as met:
            dtype = met.dtype
    if dtype is not None:  # these may be gradients inside of a function whose own gradients are taken
        _hand_over(dtype)
    return made


def is_searching() -> bool:
    """True if the gradients of what runs here are taken by this package, and not by JAX alone."""
    return REDUCING.value is not None


def hold_given() -> AbstractContextManager:
    """The context in which gradients are taken in a reduce dtype that the caller gave."""
    return REDUCING(_GIVEN) if REDUCING.value is None else nullcontext()  # gradients around these may be searching


def _hand_over(dtype: np.dtype) -> None:
    known = REDUCING.value
    if known not in (None, _GIVEN) and (known == _UNMET or is_wider(dtype, np.dtype(known))):
        raise _Met(dtype)


def is_wider(dtype: np.dtype, other: np.dtype) -> bool:
    """True if a dtype has more bits than another, or as many and a longer mantissa."""
    return _measure(dtype) > _measure(other)


def _measure(dtype: np.dtype) -> tuple[int, int]:
    info = jnp.finfo(dtype)
    return info.bits, info.nmant
