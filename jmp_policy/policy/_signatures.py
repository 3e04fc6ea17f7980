"""Types of policy specs and of decorators that apply a policy."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, overload

import numpy as np

from .._base import DTypeLike, P, R
from ._policy import Policy
from ._policy_map import PolicyMap

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
