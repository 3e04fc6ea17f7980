"""The decode cache of nnx attention layers, in the dtype of the layer or in the format of `Policy.cache`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._base import Kwargs, remember_on_class
from ..modules import make_subclass
from ..policy import Policy
from ..quant import CACHED, SCALE, CacheSlot, attend_to_slots
from ._shadow import pytree_options


def cache_format_of(base: type, policy: Policy) -> np.dtype | None:
    """Returns the format of the cache of a layer, or `None`: its dtype, or its author wrote how it is called."""
    is_flax = issubclass(base, nnx.MultiHeadAttention) and base.__call__ is nnx.MultiHeadAttention.__call__
    return policy.cache if is_flax else None


def check_layer_cache(module: nnx.MultiHeadAttention, dtype: np.dtype, format: np.dtype | None, kwargs: Kwargs) -> None:
    """Raises a `ValueError` if a call would read a cache that has another format than the policy."""
    cache = module.cached_key
    if not _is_decoding(module, kwargs) or cache is None:
        return
    found, has_scales = cache.get_value().dtype, hasattr(module, CACHED[0] + SCALE)
    if found == (dtype if format is None else format) and (format is None or has_scales):
        return
    stores = f"the layer computes in {dtype}" if format is None else f"its policy stores it in {format} with scales"
    inferred = (
        f"If the policy has no compute dtype, and only inputs tell it: layer.init_cache(input_shape, jnp.{dtype})."
    )
    raise ValueError(
        f"The cache of this attention layer is {found}, but {stores}. Make it anew under the policy: "
        f"layer.init_cache(input_shape). {inferred if format is None else ''}".rstrip()
    )


@remember_on_class
def make_cached_attention(base: type[nnx.MultiHeadAttention], format: np.dtype) -> type[nnx.MultiHeadAttention]:
    """Makes the subclass of an attention layer with its cache in a format."""

    def init_cache(self: Any, input_shape: Any, dtype: Any = format) -> None:
        base.init_cache(self, input_shape, dtype)
        for name in CACHED:
            shape = getattr(self, name).shape
            setattr(self, name + SCALE, nnx.Cache(jnp.zeros((*shape[:-1], 1), jnp.float32)))

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_decoding(self, kwargs) or self.cached_key is None:
            return base.__call__(self, *args, **kwargs)
        attributes = vars(self)
        own = {name: attributes[name] for name in (*CACHED, "attention_fn")}
        slots = {name: _make_slot(self, name) for name in CACHED}
        # Past `__setattr__`: a slot is not a Variable, and leaves before the call returns.
        attributes.update(slots, attention_fn=attend_to_slots(self.attention_fn, slots))
        try:
            return base.__call__(self, *args, **kwargs)
        finally:
            attributes.update(own)

    methods: dict[str, Callable[..., Any]] = {"init_cache": init_cache, "__call__": __call__}
    return make_subclass(base, methods, (make_cached_attention, (base, format)), **pytree_options(base))


def _is_decoding(module: nnx.MultiHeadAttention, kwargs: Kwargs) -> bool:
    decode = kwargs.get("decode")
    return bool(module.decode if decode is None else decode)


def _make_slot(module: nnx.MultiHeadAttention, name: str) -> CacheSlot:
    values, scale, index = (getattr(module, attribute) for attribute in (name, name + SCALE, "cache_index"))

    def store(new_values: Any, new_scale: Any) -> None:
        values[...], scale[...] = new_values, new_scale

    return CacheSlot(values[...], scale[...], index[...], module.dtype or jnp.float32, store)
