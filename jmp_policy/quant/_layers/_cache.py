"""The decode cache of attention layers in int8 or float8, with a scale for each head at each position."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...policy import Policy, PolicyMap, list_policies
from .._numbers import E4M3, compute_current_scale, measure_amax, quantize_symmetric, saturate

CACHED = ("cached_key", "cached_value")
"""The names that Flax gives to the arrays of a cache, of shape `(*batch, position, head, feature)`."""

SCALE = "_scale"
"""Ends the name of the scales of such an array: float32, of shape `(*batch, position, head, 1)`."""

_POSITIONS = -3


def explain_unused_cache(given: Policy | PolicyMap) -> list[str]:
    """Returns a warning, in a list, if a policy or map has a `cache`; for a model where no attention layer has it."""
    formats = [policy.cache for policy in list_policies(given) if policy.cache is not None]
    return [
        f"The policy says cache={str(format)!r}, but no attention layer of Flax has that policy, so it has no effect. "
        "Leave it out, or build the model of attention layers of Flax. For example: nnx.MultiHeadAttention(...)."
        for format in formats[:1]
    ]


class CacheSlot:
    """Stands for the keys or values of a cache during one call of an attention layer, which decodes one position.

    Flax puts the new position among those that it read. A slot says that the cache has this position alone, so that
    Flax writes the new one, unrounded: an update of all positions in the compute dtype would stay in the program.
    """

    def __init__(self, values: jax.Array, scale: jax.Array, index: jax.Array, dtype: Any, store: Callable[..., None]):
        self.index, self.length = index, values.shape[_POSITIONS]
        # A slice has the sharding that Flax's update needs on explicit axes. All of its elements are overwritten.
        self._place = lax.slice_in_dim(values, 0, 1, axis=values.ndim + _POSITIONS).astype(dtype)
        self.shape = self._place.shape
        self._stored, self._dtype, self._store = (values, scale), dtype, store

    def read(self) -> jax.Array:
        """Returns all positions in the compute dtype."""
        values, scale = self._stored
        return (values.astype(jnp.float32) * scale).astype(self._dtype)

    def _write(self, position: jax.Array) -> None:
        # Integers pass no gradient on to the next call, so there is none at all.
        rounded = _round_rows(lax.stop_gradient(position), self._stored[0].dtype)
        axis = position.ndim + _POSITIONS
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=self.index, axis=axis)
        self._stored = put(self._stored[0], rounded[0]), put(self._stored[1], rounded[1])
        self._store(*self._stored)

    # As linen and nnx read and write their variables.
    value = property(lambda self: self._place, _write)
    __getitem__ = lambda self, _: self.value
    __setitem__ = lambda self, _, position: self._write(position)


def attend_to_slots(attend: Callable[..., Any], slots: Mapping[str, CacheSlot]) -> Callable[..., Any]:
    """Wraps the attention function of a layer, so that it attends to all positions of the slots, if there are any."""

    @functools.wraps(attend)  # Flax looks at the signature
    def attend_cached(query: jax.Array, key: jax.Array, value: jax.Array, *args: Any, **options: Any) -> Any:
        if slots:
            key, value = (slots[name].read() for name in CACHED)
            if options.get("mask") is not None:
                slot, mask = slots[CACHED[0]], options["mask"]
                is_written = jnp.arange(slot.length) <= slot.index
                options["mask"] = jnp.where(is_written, mask, jnp.zeros((), mask.dtype))
        return attend(query, key, value, *args, **options)

    return attend_cached


def _round_rows(x: jax.Array, format: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Rounds `x` with a scale for each row of its last axis; returns values in `format` and float32 scales.

    Errors are at most half of a scale in int8, the largest magnitude divided by 127. In float8 they are at most 1/16 of
    each value, and 2**-10 of the scale, the largest magnitude divided by 448.
    """
    amax = measure_amax(x, (x.ndim - 1,))
    if format == np.int8:
        return quantize_symmetric(x, amax)[:2]
    scale = compute_current_scale(amax, E4M3, margin=0)
    return saturate(x, scale, E4M3), scale
