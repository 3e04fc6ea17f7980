"""The dtype fields of linen modules: finding them, and filling them in."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import Scope

from .._base import at_least_float32, remember_weakly

AUTOCAST_EXAMPLE = "autocast(model.apply, 'mixed_bfloat16')"

PARAMETER_WRAPPERS = (nn.WeightNorm, nn.SpectralNorm)
"""Modules that rewrite parameters of another one. No policy fills in their dtype: it is that of these parameters."""


@remember_weakly
def find_dtype_fields(kind: type[nn.Module]) -> dict[str, Any]:
    """Returns the defaults of the fields `dtype` and `param_dtype`, if a class of modules has them."""
    return {field.name: field.default for field in dataclasses.fields(kind) if field.name in ("dtype", "param_dtype")}


def has_open_dtype(module: nn.Module) -> bool:
    """True if a policy fills in the dtype of a module: it has the default, or a filled-in dtype handed down to it."""
    defaults = find_dtype_fields(type(module))
    if "dtype" not in defaults or isinstance(module, PARAMETER_WRAPPERS):
        return False
    dtype: Any = module.dtype  # type: ignore[attr-defined]
    if dtype is None or hasattr(dtype, _AUTHOR):
        return True
    default = defaults["dtype"]
    return default is not None and default is not dataclasses.MISSING and np.dtype(dtype) == np.dtype(default)


def is_widening_params(module: nn.Module, param_dtype: np.dtype | None) -> bool:
    """True if a wrapper with an open dtype would upcast a half-precision weight to float32, the dtype of its state."""
    if not isinstance(module, PARAMETER_WRAPPERS) or module.dtype is not None or param_dtype is None:
        return False
    return param_dtype != at_least_float32(param_dtype)


def written_dtype(module: nn.Module) -> Any:
    """Returns the dtype that the author of a module wrote, or `None`."""
    is_for_policy = "dtype" not in find_dtype_fields(type(module)) or has_open_dtype(module)
    return None if is_for_policy or isinstance(module, PARAMETER_WRAPPERS) else module.dtype  # type: ignore[attr-defined]


_AUTHOR = "_jmp_author"
_SCALAR_TYPE = type(jnp.float32)


@functools.cache
def mark_dtype(dtype: np.dtype | None, author: np.dtype | None = None) -> Any:
    """Returns a value for a dtype field of a module, which may hand it on, with the author's dtype as an attribute."""
    # A scalar type that equals the dtype. Arrays never have it.
    scalar_type = None if dtype is None else getattr(jnp, dtype.name, None)
    if scalar_type is None:
        return dtype
    attributes = {_AUTHOR: author}
    return _SCALAR_TYPE(scalar_type.__name__, (scalar_type,), attributes)  # pyright: ignore[reportCallIssue]


def mark_param_dtype(module: nn.Module, dtype: np.dtype) -> Any:
    """Returns a value for the `param_dtype` field of a module that remembers the author's dtype, for initializers."""
    author = read_authors_dtype(module.param_dtype)  # type: ignore[attr-defined]
    return mark_dtype(dtype, author if author is None else np.dtype(author))


def needs_param_dtype(module: nn.Module, dtype: np.dtype) -> bool:
    """True if the `param_dtype` field of a module has another dtype."""
    if "param_dtype" not in find_dtype_fields(type(module)):
        return False
    found: Any = module.param_dtype  # type: ignore[attr-defined]
    return found is None or is_filled_in(found) or np.dtype(found) != dtype


def is_filled_in(dtype: Any) -> bool:
    """True if a policy wrote this value of a field."""
    return hasattr(dtype, _AUTHOR)


def read_authors_dtype(dtype: Any) -> Any:
    """Returns the author's dtype for one that a policy wrote, and any other value unchanged."""
    return getattr(dtype, _AUTHOR, dtype)


@contextlib.contextmanager
def temporarily_set(module: nn.Module | Scope, values: dict[str, Any]) -> Iterator[None]:
    """Sets attributes of a module or scope for a `with` block, past `__setattr__`, which is frozen outside of setup."""
    attributes = vars(module)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            attributes.pop(name, None)
        attributes.update(before)
