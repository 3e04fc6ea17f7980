"""The decode cache of linen attention layers, in the dtype of the layer or in the format of `Policy.cache`."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from ..quant._layers import CACHED, SCALE, CacheSlot, attend_to_slots
from ._active_policy import CURRENT
from ._fields import temporarily_set
from ._place import path_text

_COLLECTION = "cache"


def check_cache(module: nn.MultiHeadDotProductAttention, format: np.dtype | None) -> None:
    """Raises a `ValueError` if the decode cache of a bound attention module has another format, or dtype, than it."""
    if not module.has_variable(_COLLECTION, CACHED[0]):
        return
    found = module.get_variable(_COLLECTION, CACHED[0]).dtype
    has_scales = module.has_variable(_COLLECTION, CACHED[0] + SCALE)
    dtype = module.dtype if format is None else format
    if dtype is None or (found == np.dtype(dtype) and has_scales == (format is not None)):
        return
    name, path = np.dtype(dtype).name, path_text(module) or type(module).__name__
    stores = f"the layer computes in {name}" if format is None else f"it is stored in {name} with scales"
    is_castable = format is None and not has_scales
    cast = f", or cast it, jmp_policy.cast_floating(cache, {name!r})" if is_castable else ""
    raise ValueError(
        f"The cache of {path!r} is {found}{' with scales' if has_scales else ''}, but under its policy {stores}. Make "
        f"the cache under the same policy, model.init(...)['cache']{cast}."
    )


def attend_by_cache(
    module: nn.MultiHeadDotProductAttention, format: np.dtype | None, next_fun: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the method of an attention layer with its cache in a format."""
    if format is None:
        return next_fun
    CURRENT.value.note_cache()
    if not module.decode:
        return next_fun

    def call_attention(*args: Any, **kwargs: Any) -> Any:
        check_cache(module, format)
        slots: dict[str, CacheSlot] = {}
        is_made = module.has_variable(_COLLECTION, CACHED[0])
        declare = functools.partial(_declare_cache, module, module.variable, format, slots if is_made else None)
        attend = attend_to_slots(module.attention_fn, slots)
        with temporarily_set(module, {"variable": declare, "attention_fn": attend}):
            return next_fun(*args, **kwargs)

    return call_attention


def _declare_cache(
    module: nn.Module,
    variable: Callable[..., Any],
    format: np.dtype,
    slots: dict[str, CacheSlot] | None,
    collection: str,
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
) -> Any:
    """Replaces `Module.variable`: makes keys and values in a format, with scales beside them; later reads them."""
    if collection != _COLLECTION or name not in CACHED:
        return variable(collection, name, init_fn, *init_args)
    shape, dtype = init_args  # of the zeros that Flax would store
    values = variable(collection, name, jnp.zeros, shape, format)
    scale = variable(collection, name + SCALE, jnp.zeros, (*shape[:-1], 1), jnp.float32)
    if slots is None:
        return values

    def store(new_values: Any, new_scale: Any) -> None:
        values.value, scale.value = new_values, new_scale

    index = module.get_variable(collection, "cache_index")
    slots[name] = CacheSlot(values.value, scale.value, index, dtype, store)
    return slots[name]
