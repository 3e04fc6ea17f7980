"""What a type checker is told: what stands for a policy, and that what is given a policy stays of its type."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, overload

import numpy as np

from .._base import DTypeLike, P, R
from ._policy import Policy
from ._policy_map import PolicyMap

F = TypeVar("F", bound="Callable[..., Any] | classmethod[Any, Any, Any]")
"""A function, or a Flax module or class: Flax declares that each of these can be called."""

T_co = TypeVar("T_co", covariant=True)


class SupportsPolicy(Protocol[T_co]):
    """An object that stands for a policy."""

    def __jmp_policy__(self) -> T_co:
        """Anything that `get_policy` reads, but for the object itself."""
        ...


PolicySpec = Policy | PolicyMap | DTypeLike | Mapping[str, Any] | SupportsPolicy[Any] | None
"""A policy, a map, a dtype, a string, the config of a policy or map, `None`, or an object with `__jmp_policy__()`.

Such an object may be more than its policy, as one that carries a name and a loss scale is. With a `__jmp_key__()`,
which is hashable and tells it apart, it is what `default_origin` returns while it is the default policy.
"""

FirstSpec = str | Policy | PolicyMap | np.dtype[Any] | type[np.generic] | dict[str, Any] | SupportsPolicy[Any]
"""What is a policy where a target may stand too. Not all that has a dtype, as many a module does, and no `nnx.Dict`."""


class Jitted(Protocol[P, T_co]):
    """What `jax.jit` and `nnx.jit` return. Once it has a policy it is a plain function, without `lower`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Runs the compiled function."""
        ...

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the function for some arguments."""
        ...


class Decorator(Protocol):
    """A decorator that gives a policy, and returns what it is given."""

    @overload
    def __call__(self, target: Jitted[P, R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, target: F, /) -> F: ...
