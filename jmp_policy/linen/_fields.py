"""The `dtype` field of linen modules: whether there is one, whether its author wrote it, and filling it in."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

# Their dtype is that of the parameters they rewrite, not of a computation: they are left to the layer they wrap.
_PARAMETER_WRAPPERS = (nn.WeightNorm, nn.SpectralNorm)


def has_dtype_field(kind: type[nn.Module]) -> bool:
    """Whether a module has a dtype of its own."""
    return _dtype_default(kind) is not _NO_FIELD


def casts_own_params(kind: type[nn.Module]) -> bool:
    """Whether a module sees to the dtype that it computes with its parameters in.

    All with a field `dtype` do, and Flax's own that have none: PReLU casts, the parts of an LSTM cell leave it to it.
    """
    return has_dtype_field(kind) or kind.__module__.startswith("flax.linen.")


def takes_dtype(module: nn.Module) -> bool:
    """Whether the dtype of a module is for a policy to fill in.

    It is not if its author wrote one, which is to say, a value other than the field's default; nor if the dtype came
    down from a module around it that a policy had filled in (`dtype=self.dtype`), because then nobody wrote it.
    """
    default = _dtype_default(type(module))
    if default is _NO_FIELD or isinstance(module, _PARAMETER_WRAPPERS):
        return False
    dtype: Any = module.dtype  # type: ignore[attr-defined]
    if dtype is None or is_filled_in(dtype):
        return True
    return default is not None and default is not dataclasses.MISSING and np.dtype(dtype) == np.dtype(default)


def filled_in(dtype: np.dtype) -> Any:
    """A dtype to write into a field, equal to `dtype` in every way but for `is_filled_in`.

    A subclass of JAX's scalar type: arrays have numpy's dtypes, so that none carries this mark away.
    """
    return _marked().get(dtype, dtype)


def is_filled_in(dtype: Any) -> bool:
    """Whether a policy, and no author, wrote this value of a `dtype` field."""
    return any(dtype is marked for marked in _marked().values())


_NO_FIELD = object()


@functools.cache
def _dtype_default(kind: type[nn.Module]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    return fields["dtype"].default if "dtype" in fields else _NO_FIELD


@functools.cache
def _marked() -> dict[np.dtype, Any]:
    scalar_type = type(jnp.float32)
    own = [t for t in vars(jnp).values() if isinstance(t, scalar_type) and jnp.issubdtype(t, jnp.floating)]
    return {np.dtype(t): scalar_type(t.__name__, (t,), {}) for t in own}
