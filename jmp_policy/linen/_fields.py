"""The dtype fields of linen modules: whether there are any, whether their author wrote them, and filling them in."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import Scope

from .._dtypes import at_least_float32
from .._memory import remember_weakly
from .._policy import Policy
from ..explanation._written import describe_written_dtypes, find_wider_dtype
from ..quant._weight import WEIGHT_NAMES
from ._place import path_of

AUTOCAST_EXAMPLE = "autocast(model.apply, 'mixed_bfloat16')"

# Their dtype is that of the parameters they rewrite, not of a computation: they are left to the layer they wrap.
_PARAMETER_WRAPPERS = (nn.WeightNorm, nn.SpectralNorm)

# By path: the dtype that is written on a layer, if it is wider than its policy's. No cache may depend on it.
_LAYERS: contextvars.ContextVar[dict[str, np.dtype | None]] = contextvars.ContextVar("_LAYERS")


def has_dtype_field(kind: type[nn.Module]) -> bool:
    """Whether a module has a dtype of its own."""
    return _find_dtype_default(kind) is not _NO_FIELD


def casts_own_params(kind: type[nn.Module]) -> bool:
    """Whether a module sees to the dtype that it computes with its parameters in.

    All with a field `dtype` do, and Flax's own that have none: PReLU casts, the parts of an LSTM cell leave it to it.
    """
    return has_dtype_field(kind) or kind.__module__.startswith("flax.linen.")


def has_open_dtype(module: nn.Module) -> bool:
    """Whether the dtype of a module is for a policy to fill in.

    It is not if its author wrote one, which is to say, a value other than the field's default; nor if the dtype came
    down from a module around it that a policy had filled in (`dtype=self.dtype`), because then nobody wrote it.
    """
    default = _find_dtype_default(type(module))
    if default is _NO_FIELD or is_parameter_wrapper(module):
        return False
    dtype: Any = module.dtype  # type: ignore[attr-defined]
    if dtype is None or is_filled_in(dtype):
        return True
    return default is not None and default is not dataclasses.MISSING and np.dtype(dtype) == np.dtype(default)


def is_parameter_wrapper(module: nn.Module) -> bool:
    """Whether a module rewrites the parameters of another one before that computes with them."""
    return isinstance(module, _PARAMETER_WRAPPERS)


def widens_params(module: nn.Module, param_dtype: np.dtype | None) -> bool:
    """Whether a wrapper would store a narrow weight wide: its open dtype is what the weight and float32 state give."""
    if not is_parameter_wrapper(module) or module.dtype is not None or param_dtype is None:
        return False
    return param_dtype != at_least_float32(param_dtype)


def written_dtype(module: nn.Module) -> Any:
    """The dtype that the author of a module wrote, or `None`."""
    if not has_dtype_field(type(module)) or has_open_dtype(module) or is_parameter_wrapper(module):
        return None
    return module.dtype  # type: ignore[attr-defined]


def mark_dtype(dtype: np.dtype | None) -> Any:
    """What to write into the `dtype` field of a module, which may hand it on to the modules inside."""
    return None if dtype is None else _make_marked_dtype(dtype, None)


def mark_param_dtype(module: nn.Module, dtype: np.dtype) -> Any:
    """What to write into the `param_dtype` field of a module: its author's dtype, which draws, can be told from it."""
    author = read_authors_dtype(module.param_dtype)  # type: ignore[attr-defined]
    return _make_marked_dtype(dtype, author if author is None else np.dtype(author))


def has_other_param_dtype(module: nn.Module, dtype: np.dtype) -> bool:
    """Whether a module has a field for the dtype of its parameters that does not say this one already."""
    if not _has_param_dtype_field(type(module)):
        return False
    found: Any = module.param_dtype  # type: ignore[attr-defined]
    return found is None or is_filled_in(found) or np.dtype(found) != dtype


def is_filled_in(dtype: Any) -> bool:
    """Whether a policy, and no author, wrote this value of a field."""
    return hasattr(dtype, _AUTHOR)


def read_authors_dtype(dtype: Any) -> Any:
    """The dtype that the author wrote where a policy wrote this one, and anything else as it is."""
    return getattr(dtype, _AUTHOR, dtype)


@contextlib.contextmanager
def temporarily_set(module: nn.Module | Scope, values: dict[str, Any]) -> Iterator[None]:
    """A context in which these attributes are written on a module, or on its scope.

    Past the module's own __setattr__, which is frozen outside of setup. A clone would lose what its method stores on
    self, and its place among its parent's children.
    """
    attributes = vars(module)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            attributes.pop(name, None)
        attributes.update(before)


@contextlib.contextmanager
def collect_layers() -> Iterator[None]:
    """The context of the call of a module with a policy, in which no layer was called yet."""
    before = _LAYERS.set({})
    try:
        yield
    finally:
        _LAYERS.reset(before)


def note_layer(module: nn.Module, policy: Policy) -> None:
    """Notes what is written on a module inside, if it is a layer with a weight."""
    scope: Any = module.scope
    if has_dtype_field(type(module)) and any(scope.has_variable("params", name) for name in WEIGHT_NAMES):
        _LAYERS.get()["/".join(path_of(module))] = find_wider_dtype(written_dtype(module), policy)


def explain_written_dtypes() -> list[str]:
    """A sentence, if what is written on the layers that were called keeps most of them out of their policy's dtype."""
    return describe_written_dtypes(_LAYERS.get(), AUTOCAST_EXAMPLE)


_NO_FIELD = object()
_AUTHOR = "_jmp_author"
_SCALAR_TYPE = type(jnp.float32)


@remember_weakly
def _has_param_dtype_field(kind: type[nn.Module]) -> bool:
    return any(field.name == "param_dtype" for field in dataclasses.fields(kind))


@remember_weakly
def _find_dtype_default(kind: type[nn.Module]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    return fields["dtype"].default if "dtype" in fields else _NO_FIELD


@functools.cache
def _make_marked_dtype(dtype: np.dtype, author: np.dtype | None) -> Any:
    """A dtype equal to another in every way but that it says who wrote it.

    A subclass of JAX's scalar type: arrays have numpy's dtypes, so that none carries this mark away.
    """
    scalar_type = getattr(jnp, dtype.name, None)
    return dtype if scalar_type is None else _SCALAR_TYPE(dtype.name, (scalar_type,), {_AUTHOR: author})
