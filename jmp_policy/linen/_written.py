"""The layers of a model that are called, and the dtypes that its author wrote on them."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import linen as nn

from .._policy import Policy
from ..explanation._written import explain_written, wider_dtype
from ..quant._layer import WEIGHT_NAMES
from ._fields import has_dtype_field, written_dtype
from ._path import path_of

AUTOCAST_EXAMPLE = "autocast(model.apply, 'mixed_bfloat16')"

# By path: the dtype that is written on a layer, if it is wider than its policy's. No cache may depend on it.
_LAYERS: contextvars.ContextVar[dict[str, np.dtype | None]] = contextvars.ContextVar("_LAYERS")


@contextlib.contextmanager
def layers_noted() -> Iterator[None]:
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
        _LAYERS.get()["/".join(path_of(module))] = wider_dtype(written_dtype(module), policy)


def written_explained() -> list[str]:
    """A sentence, if what is written on the layers that were called keeps most of them out of their policy's dtype."""
    return explain_written(_LAYERS.get(), AUTOCAST_EXAMPLE)
