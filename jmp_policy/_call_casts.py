"""What a boundary casts: the arguments of a call, and its result."""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from ._flax_objects import is_flax_object
from ._messages import quote, shorten
from ._policy import Policy
from ._trees import PyTree, cast_floating, floating_leaves


def cast_arguments(
    policy: Policy, fun: Callable[..., Any], keep: Collection[str], args: tuple, kwargs: dict[str, Any]
) -> tuple[Policy, tuple, dict[str, Any]]:
    """Casts what enters a boundary to compute dtype.

    Args:
      policy: the policy of the boundary; a missing compute dtype is taken from the arguments.
      fun: what is about to be called, for the names of positional arguments.
      keep: names of arguments that are left alone.
      args: positional arguments of `fun`.
      kwargs: keyword arguments of `fun`.

    Returns:
      The resolved policy and the arguments to call `fun` with. Flax modules and Variables among them are as they were.
    """
    kept = [i for i, name in enumerate(_positional_names(fun, len(args))) if name in keep] if keep else []
    named = {name: x for name, x in kwargs.items() if name not in keep} if kwargs else {}
    if policy.compute_dtype is None:
        policy = resolve_policy(policy, ([x for i, x in enumerate(args) if i not in kept], named))

    # One argument at a time: most are arrays, which are cast without walking a tree.
    cast = functools.partial(cast_floating, dtype=policy.compute_dtype, is_leaf=is_flax_object)
    entering = [x if i in kept else cast(x) for i, x in enumerate(args)] if kept else map(cast, args)
    return policy, tuple(entering), kwargs | cast(named) if named else kwargs


def resolve_policy(policy: Policy, inputs: PyTree) -> Policy:
    """A policy whose missing compute dtype is that of the first floating input of a call, Flax's objects excepted."""
    return policy.resolve(floating_leaves(inputs, is_leaf=is_flax_object)) if policy.compute_dtype is None else policy


def cast_result(policy: Policy, out: Any) -> Any:
    """Casts what leaves a boundary to output dtype; Flax modules and Variables in it are as they were.

    Raises:
      TypeError: it is a generator or a coroutine, whose body has yet to run.
    """
    if isinstance(out, Generator | Coroutine | AsyncGenerator):
        if not isinstance(out, AsyncGenerator):
            out.close()  # never run: Python warns of a coroutine that was not awaited
        raise TypeError(
            f"{name_function(out)} returned a {type(out).__name__}, and would run when its policy holds no more. "
            "Return arrays instead. For example: [*rows], not (row for row in rows)."
        )
    return cast_floating(out, policy.output_dtype, is_leaf=is_flax_object)


def matmul_precision(policy: Policy) -> AbstractContextManager:
    """The context in which matmuls have the policy's precision."""
    return nullcontext() if policy.precision is None else jax.default_matmul_precision(policy.precision)


def check_keep(fun: Callable[..., Any], keep: Collection[str]) -> None:
    """Checks that `keep` names arguments of `fun`.

    Raises:
      ValueError: it does not, or it is a string, which is a collection of letters.
    """
    if isinstance(keep, str):
        raise ValueError(
            f"keep must be a collection of argument names, got the string {quote(keep)}; write [{quote(keep)}]."
        )
    if not keep:
        return
    try:
        parameters = inspect.signature(fun).parameters
    except ValueError:
        raise ValueError(
            f"keep names {quote(sorted(keep))}, but Python knows no argument names of {name_function(fun)}. Give the "
            "policy to a function that calls it. For example: lambda x, position: f(x, position)."
        ) from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in keep:
        if name not in parameters and not takes_any:
            known = ", ".join(map(repr, parameters)) or "none"
            raise ValueError(
                f"keep names {quote(name)}, which is no argument of {name_function(fun)}. Its arguments are {known}."
            )


def _positional_names(fun: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional parameters; a `*args` gives its name to all it takes."""
    parameters = inspect.signature(fun).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    return (names + [rest] * count)[:count]


def name_function(fun: Any) -> str:
    return shorten(getattr(fun, "__qualname__", repr(fun)))
