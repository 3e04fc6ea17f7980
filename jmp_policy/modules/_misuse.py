"""What newcomers write by mistake, or by the habit of another library, and what to write instead."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

from .._base import describe, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])

DEVICES = ("cpu", "cuda", "gpu", "mps", "rocm", "tpu", "xla", "xpu")
"""The devices that torch's `autocast` takes in first place, and JAX's."""

_EXAMPLES = {
    "autocast": "autocast(loss_fn, 'params=float32,compute={dtype},output=none')",
    "with_policy": "with_policy(model, 'params=float32,compute={dtype},output=float32')",
}

_WHY_NO_CONTEXT = {
    "autocast": "it rewrites a function, and sees no operation outside of one",
    "with_policy": "it gives a policy to a function or a model",
}


class NoContext:
    """A decorator that says what to write where it stands after `with`.

    Args:
      decorate: the decorator, a function of the target.
      name: the function that made it, `"autocast"` or `"with_policy"`.
    """

    def __init__(self, decorate: Callable[[Any], Any], name: str):
        self._decorate = decorate
        self._name = name

    def __call__(self, target: Any, /) -> Any:
        """Decorates."""
        return self._decorate(target)

    def __enter__(self) -> NoReturn:
        example = _EXAMPLES[self._name].format(dtype="bfloat16")
        raise TypeError(
            f"{self._name} is no context manager: {_WHY_NO_CONTEXT[self._name]}. For example: {example}, or "
            f"@{self._name}('mixed_bfloat16') above a function. "
            f"`with use_policy('mixed_bfloat16'):` gives a policy to each {self._name} that is given none."
        )

    def __exit__(self, *_: object) -> None:  # never called; without it Python does not ask the other
        """Leaves."""


def refuse_unknown_arguments(fun: F) -> F:
    """Lets a function refuse keyword arguments that it does not have, such as those of torch's `autocast`.

    Its signature, which `help` shows, stays free of them.

    Raises:
      TypeError: when it is called with some.
    """
    known = inspect.signature(fun).parameters

    @functools.wraps(fun)
    def call_or_refuse(*args: Any, **kwargs: Any) -> Any:
        unknown = {name: value for name, value in kwargs.items() if name not in known}
        if unknown:
            raise TypeError(_explain_unknown(fun.__name__, unknown, known))
        return fun(*args, **kwargs)

    return call_or_refuse  # type: ignore[return-value]


def _explain_unknown(name: str, given: Mapping[str, Any], known: Collection[str]) -> str:
    words = ", ".join(map(repr, given))
    if "dtype" in given:
        why = f"The policy says which dtype goes where. For example: {_show(name, given['dtype'])}."
    elif "device_type" in given or "device" in given:
        why = f"It is the same on every device. For example: {_show(name)}."
    elif "enabled" in given:
        why = f"A policy of float32 leaves float32 as it is. For example: {name}(fun, 'float32')."
    else:
        why = f"{did_you_mean(next(iter(given)), known)} For example: {_show(name)}."
    return f"{name} has no argument {words}. {why}"


def refuse_device(name: str, target: object) -> None:
    """Refuses the name of a device where a function or a policy belongs, as torch's `autocast` takes it.

    Raises:
      TypeError: it is one.
    """
    if isinstance(target, str) and target.partition(":")[0].strip().lower() in DEVICES:
        raise TypeError(
            f"{name} takes a function and a policy, and is the same on every device, got {target!r}. "
            f"For example: {_show(name)}."
        )


def refuse_order(name: str, policy: object, target: object) -> NoReturn:
    """Refuses a policy in first place and what it is for in second.

    Raises:
      TypeError: always.
    """
    kind = getattr(target, "__qualname__", None) or f"a {type(target).__name__}"
    thing, spelling = _name_target(target), repr(policy) if isinstance(policy, str) else "policy"
    raise TypeError(
        f"{name} takes the policy in second place, got {describe(policy)} in first and {kind} in second. "
        f"For example: {name}({thing}, {spelling})."
    )


def refuse_rules(name: str, rules: object, target: object) -> NoReturn:
    """Refuses the rules of a map in first place and what they are for in second.

    Raises:
      TypeError: always.
    """
    raise TypeError(
        f"{name} takes the policy in second place, and rules in a PolicyMap, got {describe(rules)} in first. "
        f"For example: {name}({_name_target(target)}, PolicyMap({{'head': 'float32'}}, default='mixed_bfloat16'))."
    )


def _name_target(target: object) -> str:
    name = getattr(target, "__name__", "model")
    return name if name.isidentifier() else "loss_fn"


def _show(name: str, dtype: object = "bfloat16") -> str:
    found = re.search(r"b?float16|float32", str(getattr(dtype, "__name__", dtype)))
    return _EXAMPLES[name].format(dtype=found[0] if found else "bfloat16")
