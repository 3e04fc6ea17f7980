"""A decode cache must have the dtype its layer computes in: Flax itself fails deep inside `dynamic_update_slice`."""

import numpy as np
from flax import linen as nn

from ._path import path_of


def check_cache(module: nn.Module) -> None:
    """Checks the decode cache of an attention module against its dtype.

    Raises:
      ValueError: there is a cache, and it has another dtype.
    """
    if not isinstance(module, nn.MultiHeadDotProductAttention) or not module.has_variable("cache", "cached_key"):
        return
    found, dtype = module.get_variable("cache", "cached_key").dtype, module.dtype
    if dtype is not None and found != np.dtype(dtype):
        path, computed = "/".join(path_of(module)) or type(module).__name__, np.dtype(dtype).name
        raise ValueError(
            f"The cache of {path!r} is {found}, but under its policy the layer computes in {computed}. Make the cache "
            "under the same policy, model.init(...)['cache'], or cast it, "
            f"jmp_policy.cast_floating(cache, {computed!r})."
        )
