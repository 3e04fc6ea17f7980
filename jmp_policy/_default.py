"""Where the default policy is kept: a context that is part of the key of every `jit` cache."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax

from ._grammar import parse_policy


@dataclasses.dataclass(frozen=True)
class Given:
    """A default policy with the object of another library that it was made from.

    What is compiled while it holds is keyed by the object's `__jmp_key__()`, as it was then, and never by the object:
    one that is equal compiles nothing again, and one with another loss scale, say, is never answered for it.
    """

    policy: Any
    key: Hashable
    origin: Any = dataclasses.field(compare=False)


# Not a ContextVar or a module global: either, read while tracing, goes stale at the second call of a jitted function.
_CONTEXT = jax.make_user_context(parse_policy("float32"))


def read_default() -> Any:
    """The policy or map that is the default one."""
    value = _CONTEXT.value
    return value.policy if isinstance(value, Given) else value


def read_origin() -> Any:
    """The object that the default policy was made from; `None` if there is none, or if it has changed since."""
    value = _CONTEXT.value
    is_origin_kept = isinstance(value, Given) and value.origin.__jmp_key__() == value.key
    return value.origin if is_origin_kept else None


def set_default(policy: Any, spec: Any) -> None:
    """Makes a policy, and what it was made from, the default one."""
    _CONTEXT.set_global(_value(policy, spec))


def temporarily_set_default(policy: Any, spec: Any) -> Any:
    """A context manager in which a policy, and what it was made from, is the default one, in this thread."""
    return _CONTEXT(_value(policy, spec))


def _value(policy: Any, spec: Any) -> Any:
    return Given(policy, spec.__jmp_key__(), spec) if hasattr(spec, "__jmp_key__") else policy
