"""The one parser of everything that stands for a policy, and the default policy."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import numpy as np

from .._base import parse_dtype, quote
from ._grammar import parse_policy
from ._policy import Policy, read_default, read_origin, set_default, temporarily_set_default
from ._policy_map import PolicyMap
from ._signatures import PolicySpec, SupportsPolicy

F = TypeVar("F", bound=Callable[..., Any])


# The nearest answer first: the dtypes of a `Policy | PolicyMap` do not complete.
@overload
def get_policy(spec: str | Policy | np.dtype[Any] | type[np.generic] | SupportsPolicy[Policy]) -> Policy: ...
@overload
def get_policy(spec: PolicyMap | SupportsPolicy[PolicyMap]) -> PolicyMap: ...
@overload
def get_policy(spec: PolicySpec) -> Policy | PolicyMap: ...
def get_policy(spec: "PolicySpec") -> Policy | PolicyMap:
    """Reads a policy from anything that stands for one.

    Args:
      spec: a policy or map (returned as it is, a map without a default with the current one filled in); a dtype in
        any spelling, for all three dtypes; `None` for the default policy; a policy's or map's `get_config()`, as it
        comes back from JSON; an object whose `__jmp_policy__()` returns one of these; or a string:

        - a dtype name, `"full"` or `"half"`: all three dtypes;
        - `"mixed_float16"`, `"mixed_bfloat16"`: half compute and output over float32 parameters;
        - `"params=float32,compute=bfloat16,output=float32"`, or `p`, `c`, `o`: parameters default to float32, compute
          to parameters, output to compute; `none` leaves a dtype as found; `accumulate=float32`, or `a`, is the dtype
          in which products hand over their sums, and `reduce=float32`, or `r`, the one in which gradients are summed
          over devices;
        - Keras's `"infer"`, `"infer_with_float32_vars"`, `"bfloat16_with_float32_vars"`;
        - `"int8_from_mixed_bfloat16"`, `"int4/64_from_..."`, `"float8_from_..."`, `"mxfp8_from_..."` and so on: any of
          these, and quantized.

    Raises:
      ValueError: the string, dtype or config is none of these.

    >>> import jmp_policy as jmp
    >>> jmp.get_policy("p=f32,c=bf16") is jmp.get_policy("mixed_bfloat16")
    True
    >>> stored = jmp.PolicyMap({"head": "float32"}, "bfloat16").get_config()
    >>> jmp.get_policy(stored)["head"].name
    'float32'
    """
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, PolicyMap):
        return spec.with_default(default_policy())
    if spec is None:
        return default_policy()
    if isinstance(spec, str):
        return parse_policy(spec)
    if hasattr(spec, "__jmp_policy__"):
        return get_policy(_ask(spec))
    if isinstance(spec, Mapping):
        return get_policy(_from_config(spec))
    dtype: Any = spec
    return Policy(*[parse_dtype(dtype, example="'mixed_bfloat16'")] * 3)


def _ask(spec: Any) -> PolicySpec:
    answer = spec.__jmp_policy__()
    if answer is spec:
        raise ValueError(f"__jmp_policy__() of {quote(spec)} returns the object itself. For example: 'mixed_bfloat16'.")
    return answer


def _from_config(config: Mapping[str, Any]) -> Policy | PolicyMap:
    if "rules" in config:
        return PolicyMap.from_config(config)
    if "param_dtype" in config:
        return Policy.from_config(config)
    raise ValueError(
        f"{quote(config)} is not the config of a policy or map. "
        "For rules by path or type: PolicyMap({'head': 'float32'})."
    )


def is_policy_spec(value: Any) -> bool:
    """Whether `get_policy` reads a value; unlike functions and modules, which `with_policy` takes in the same place.

    >>> is_policy_spec("mixed_bfloat16"), is_policy_spec(float), is_policy_spec(lambda x: x)
    (True, False, False)
    """
    if isinstance(value, str):  # a string can be nothing else, so its error speaks of policies
        return True
    try:
        get_policy(value)
    except (ValueError, TypeError):
        return False
    return True


def default_policy() -> Policy | PolicyMap:
    """The policy that `None` stands for: float32 unless `set_default_policy` or `use_policy` says otherwise.

    It reaches only what `with_policy` or `autocast` is applied to, and is captured at that moment.

    >>> import jmp_policy as jmp
    >>> jmp.default_policy().name
    'float32'
    """
    return read_default()


def default_origin() -> Any:
    """The object with a `__jmp_key__()` that the default policy was made from; `None` if it was made from no such one.

    >>> with use_policy("mixed_bfloat16"):
    ...     default_origin() is None
    True
    """
    return read_origin()


def set_default_policy(spec: "PolicySpec") -> None:
    """Sets the default policy of the process, for every thread.

    Args:
      spec: anything that `get_policy` reads.

    >>> import jmp_policy as jmp
    >>> jmp.set_default_policy("float32")
    """
    set_default(get_policy(spec), spec)


def use_policy(spec: "PolicySpec") -> "TemporaryDefault":
    """A context manager in which the default policy is another one, in this thread; above a function, for each call.

    An asyncio task must leave it before it awaits anything that reads or sets the default in another task, which is an
    error there.

    Args:
      spec: anything that `get_policy` reads.

    >>> import jmp_policy as jmp
    >>> with jmp.use_policy("mixed_bfloat16"):
    ...     jmp.default_policy().name
    'mixed_bfloat16'
    """
    return TemporaryDefault(get_policy(spec), spec)


class TemporaryDefault(AbstractContextManager[None]):
    """What `use_policy` returns: a context manager, and a decorator as those of `contextlib.contextmanager` are."""

    def __init__(self, policy: "Policy | PolicyMap", spec: "PolicySpec"):
        self._given = policy, spec
        self._contexts: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = temporarily_set_default(*self._given)
        context.__enter__()
        self._contexts.append(context)

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)

    def __call__(self, fun: F) -> F:
        """Gives each call of a function the default policy, in whatever thread it is."""

        @functools.wraps(fun)
        def call_with_default(*args: Any, **kwargs: Any) -> Any:
            with temporarily_set_default(*self._given):
                return fun(*args, **kwargs)

        return call_with_default  # type: ignore[return-value]
