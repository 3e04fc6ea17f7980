"""The decoding cache of an attention layer: made in the dtype of its layer, and refused in another."""

from typing import Any

import numpy as np
from flax import nnx


def cache_arguments(
    module: nnx.Module, method: Any, dtype: np.dtype | None, args: tuple, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The keyword arguments for a method of an attention layer; those of any other module as they are.

    Flax makes the cache in float32 unless told otherwise, and then fails to write keys of another dtype into it.

    Raises:
      ValueError: the call decodes, and there is a cache of another dtype than the layer's.
    """
    if not isinstance(module, nnx.MultiHeadAttention) or dtype is None:
        return kwargs
    name = getattr(method, "__name__", "")
    if name == "init_cache" and len(args) < 2:
        return {"dtype": dtype} | kwargs
    cache = module.cached_key
    if name == "__call__" and _decodes(module, kwargs) and cache is not None and cache.get_value().dtype != dtype:
        raise ValueError(
            f"The cache of this attention layer is {cache.get_value().dtype}, but the layer computes in {dtype}. "
            "Make it anew under the policy: layer.init_cache(input_shape). "
            f"If the policy has no compute dtype, and only inputs tell it: layer.init_cache(input_shape, jnp.{dtype})."
        )
    return kwargs


def _decodes(module: nnx.MultiHeadAttention, kwargs: dict[str, Any]) -> bool:
    decode = kwargs.get("decode")
    return bool(module.decode if decode is None else decode)
