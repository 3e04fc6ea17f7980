"""Types of policy specs and of decorators that apply a policy, `get_policy`, and the default policy."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, overload

import numpy as np

from .._base import DTypeLike, P, R, describe, find_dtype, quote
from ._grammar import parse_policy
from ._policy import Policy, set_default, temporarily_set_default
from ._policy_map import PolicyMap, default_policy

F = TypeVar("F", bound="Callable[..., Any] | classmethod[Any, Any, Any]")
"""A function, or a Flax module or class: all of them are declared as callable."""

T_co = TypeVar("T_co", covariant=True)


class SupportsPolicy(Protocol[T_co]):
    """Object that can be converted to a policy."""

    def __jmp_policy__(self) -> T_co:
        """Returns a policy spec other than the object itself."""
        ...


PolicySpec = Policy | PolicyMap | DTypeLike | Mapping[str, Any] | SupportsPolicy[Any] | None
"""A policy, a map, a dtype, a string, the config of a policy or map, `None`, or an object with `__jmp_policy__()`.

If such an object also has a `__jmp_key__()`, a hashable identity, then `default_origin` returns it while it is the
default policy.
"""

FirstSpec = str | Policy | PolicyMap | np.dtype[Any] | type[np.generic] | dict[str, Any] | SupportsPolicy[Any]
"""Types read as a policy in the first positional argument, where a module is also allowed. Excludes objects that merely
have a `dtype`, and `nnx.Dict`."""


class Jitted(Protocol[P, T_co]):
    """Result of `jax.jit` and `nnx.jit`. With a policy it is a plain function, without `lower`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Runs the compiled function."""
        ...

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the function for some arguments."""
        ...


class Decorator(Protocol):
    """Decorator that applies a policy; it keeps the type of its target."""

    @overload
    def __call__(self, target: Jitted[P, R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, target: F, /) -> F: ...


# The nearest answer first: the dtypes of a `Policy | PolicyMap` do not complete.
@overload
def get_policy(spec: str | Policy | np.dtype[Any] | type[np.generic] | SupportsPolicy[Policy]) -> Policy: ...
@overload
def get_policy(spec: PolicyMap | SupportsPolicy[PolicyMap]) -> PolicyMap: ...
@overload
def get_policy(spec: PolicySpec) -> Policy | PolicyMap: ...
def get_policy(spec: PolicySpec) -> Policy | PolicyMap:
    """Reads a policy from a policy spec.

    Args:
      spec: a policy (returned unchanged); a map (a missing default is filled in with the current default policy); a
        dtype in any spelling, for all three dtypes; `None` for the default policy; the `get_config()` of a policy or
        map, also after JSON; an object whose `__jmp_policy__()` returns one of these; or a string:

        - a dtype name, `"full"` or `"half"`: all three dtypes;
        - `"mixed_float16"`, `"mixed_bfloat16"`: half-precision compute and output, float32 parameters;
        - `"params=float32,compute=bfloat16,output=float32"`, or `p`, `c`, `o`: parameters default to float32, compute
          to parameters, output to compute; `none` leaves a dtype unchanged; `accumulate=float32`, or `a`, is the output
          dtype of matmuls; `reduce=float32`, or `r`, the dtype in which gradients are summed over devices; and
          `cache=int8` the format of the decode cache of attention;
        - Keras's `"infer"`, `"infer_with_float32_vars"`, `"bfloat16_with_float32_vars"`;
        - `"int8_from_mixed_bfloat16"`, `"int4/64_from_..."`, `"float8_from_..."`, `"mxfp8_from_..."` and so on: any of
          these, quantized.

    Raises:
      ValueError: the spec is none of these.

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
        convertible: Any = spec
        answer = convertible.__jmp_policy__()
        if answer is spec:
            raise ValueError(
                f"__jmp_policy__() of {quote(spec)} returns the object itself. For example: 'mixed_bfloat16'."
            )
        return get_policy(answer)
    if not isinstance(spec, Mapping):
        dtype = find_dtype(spec)
        if dtype is None:
            raise ValueError(
                f"{describe(spec)} is not a policy or a floating dtype. A policy comes after the function or model. "
                "For example: with_policy(model, 'mixed_bfloat16')."
            )
        return Policy(dtype, dtype, dtype)
    if "rules" in spec:
        return PolicyMap.from_config(spec).with_default(default_policy())
    if "param_dtype" in spec:
        return Policy.from_config(spec)
    raise ValueError(
        f"{describe(spec)} is not the config of a policy or map. For rules by path or type: "
        "PolicyMap({'head': 'float32'}). A policy comes after variables: quantize(variables, 'int8_from_float32')."
    )


def is_policy_spec(value: Any) -> bool:
    """True if `get_policy` accepts a value. `with_policy` takes functions and modules in the same position."""
    is_config = isinstance(value, Mapping) and ("rules" in value or "param_dtype" in value)
    if is_config or hasattr(value, "__jmp_policy__"):
        try:
            get_policy(value)
        except (ValueError, TypeError):
            return False
        return True
    # A misspelled string counts, so that its error is about policies. `get_policy` would print other values in its
    # error, which copies every parameter of a model to the host.
    return value is None or isinstance(value, str | Policy | PolicyMap) or find_dtype(value) is not None


def set_default_policy(spec: PolicySpec) -> None:
    """Sets the default policy of the process, for every thread.

    Args:
      spec: anything that `get_policy` reads.

    >>> import jmp_policy as jmp
    >>> jmp.set_default_policy("float32")
    """
    set_default(get_policy(spec), spec)


def use_policy(spec: PolicySpec) -> "contextlib._GeneratorContextManager[None]":
    """Sets the default policy of this thread in a `with` block, or for each call of a decorated function.

    An asyncio task must leave it before it awaits: while it is inside, other tasks that read or set the default raise
    an error.

    Args:
      spec: anything that `get_policy` reads.

    >>> import jmp_policy as jmp
    >>> with jmp.use_policy("mixed_bfloat16"):
    ...     jmp.default_policy().name
    'mixed_bfloat16'
    """
    return temporarily_set_default(get_policy(spec), spec)
