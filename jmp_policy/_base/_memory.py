"""Caches whose entries live as long as their keys, and JAX user contexts that load when first needed."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax

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
