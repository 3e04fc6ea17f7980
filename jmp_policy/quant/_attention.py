"""`dot_product_attention`, whose two matmuls are in 8 bits, and the decode cache in 8 bits."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._base import DTypeLike, at_least_float32, quote
from ..policy import MXFP8, Int8, Policy, PolicyMap, Quantization, list_policies
from ._bilinear import label_einsum
from ._block_numbers import pad_axes
from ._numbers import FLOAT8_E4M3, compute_current_scale, measure_amax, quantize_symmetric, saturate
from ._operations import check_floating, einsum, parse_product_format


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    quantization: Quantization | str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Any:
    """Computes `jax.nn.dot_product_attention` with both matmuls in 8 bits.

    `einsum` multiplies queries by keys, and probabilities by values: with `Int8`, each query and key has a scale, and
    so has each row of probabilities, and each feature of the values of a head. Logits, masks and softmax are float32,
    as in JAX. The logits are an array: this is not a fused kernel.

    Args:
      query: floating, of shape `(B, T, N, H)` or `(T, N, H)`.
      key: of shape `(B, S, K, H)` or `(S, K, H)`; `N` is a multiple of `K`. It has the dtype of `query`.
      value: has the shape and dtype of `key`.
      bias: as for JAX.
      mask: as for JAX.
      scale: as for JAX.
      is_causal: as for JAX.
      query_seq_lengths: as for JAX.
      key_value_seq_lengths: as for JAX. Keys and values after a sequence do not count in its scales.
      local_window_size: as for JAX.
      implementation: as for JAX; only `"xla"` or `None` with `quantization`.
      return_residual: as for JAX.
      quantization: `Int8`, `Float8` with `CurrentScaling`, `MXFP8`, or their string; `None` calls JAX's function.
        `Float8` leaves a matmul in the dtype of `query` if `S * H` is less than `min_size`, or if `H`, `S` or
        `T * N / K` is not a multiple of 16. `MXFP8` pads `H` and `S` to multiples of its blocks.
      preferred_element_type: the dtype of the output with `quantization`; by default the dtype of `query`.

    Returns:
      The output of JAX's function, or a tuple of output and residual. With `Float8` and `MXFP8`, all matmuls of the
      backward pass are quantized too; with `Int8` they multiply by the rounded operands in the dtype of `query`.

    Raises:
      TypeError: `query` is not floating, or a float8 or block-scaled matmul is differentiated twice.
      ValueError: shapes or dtypes do not match, the format multiplies no 8-bit operands, or the implementation is
        `"cudnn"`.

    Source: Shah et al., FlashAttention-3, NeurIPS 2024, section 3.3 (attention in float8); `jax.nn`.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> query, key, value = jnp.eye(32)[None, :, None], jnp.ones((1, 32, 1, 32)), jnp.ones((1, 32, 1, 32))
    >>> attend = jax.jit(lambda *x: jmp.quant.dot_product_attention(*x, is_causal=True, quantization="int8"))
    >>> attend(query, key, value)[0, :2, 0, 0].tolist()
    [1.0, 1.0]
    """
    format = parse_product_format(quantization, "dot_product_attention")
    options = {
        "scale": scale,
        "is_causal": is_causal,
        "local_window_size": local_window_size,
        "implementation": implementation,
        "return_residual": return_residual,
    }
    attend = functools.partial(jax.nn.dot_product_attention, **options)
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    if format is None and preferred_element_type is None:
        return attend(query, key, value, bias, mask, **lengths)
    if implementation not in (None, "xla"):
        raise ValueError(
            f"A quantized attention has no implementation {quote(implementation)}. For example: implementation='xla'."
        )
    check_floating(query, "dot_product_attention(query.astype('float32'), ...)")
    with jax.numpy_dtype_promotion("standard"):  # JAX's function promotes the dtype of the query to float32
        jax.eval_shape(attend, query, key, value, bias, mask, **lengths)  # checks shapes and dtypes
    shape, dtype = query.shape, query.dtype
    query, key, value = (x[None] if x.ndim == 3 else x for x in (query, key, value))
    batch, rows, heads, features = query.shape
    columns, groups = key.shape[1:3]
    query_lengths, lengths = (None if x is None else jnp.asarray(x) for x in lengths.values())
    query, key, value = _zero_after(query, query_lengths), _zero_after(key, lengths), _zero_after(value, lengths)

    multiply = functools.partial(multiply_padded, format)
    grouped = query.reshape(batch, rows, groups, heads // groups, features)
    logits = multiply("btkgh,bskh->bkgts", grouped, key, preferred_element_type=at_least_float32(dtype))
    logits = logits.reshape(batch, heads, rows, columns) * jnp.asarray(
        features**-0.5 if scale is None else scale, logits.dtype
    )
    if bias is not None:
        logits = logits + jnp.asarray(bias, logits.dtype)
    kept = _find_mask(rows, columns, mask, query_lengths, lengths, local_window_size, is_causal=is_causal)
    if kept is not None:
        logits = jnp.where(kept, logits, np.asarray(-0.7 * jnp.finfo(logits.dtype).max, logits.dtype))
    logits = logits.astype(np.float32)
    weights = jax.nn.softmax(logits, axis=-1).astype(dtype).reshape(batch, groups, heads // groups, rows, columns)
    out = multiply("bkgts,bskh->btkgh", weights, value, preferred_element_type=preferred_element_type)
    out = _zero_after(out.reshape(batch, rows, heads, features), query_lengths).reshape(shape)
    if not return_residual:
        return out
    residual = jnp.swapaxes(jax.nn.logsumexp(logits, axis=-1), 1, 2).astype(dtype)
    return out, jax.lax.stop_gradient(residual.reshape(shape[:-1]))


def multiply_padded(
    format: Quantization | None, equation: str, lhs: jax.Array, rhs: jax.Array, **options: Any
) -> jax.Array:
    """Computes `einsum`; operands of block formats are padded with zeros to whole blocks."""
    if isinstance(format, MXFP8):
        labels = label_einsum(lhs.ndim, rhs.ndim, equation)
        lhs = pad_axes(lhs, labels.summed_axes(labels.left), format.block_size)
        rhs = pad_axes(rhs, labels.summed_axes(labels.right), format.block_size)
    return einsum(equation, lhs, rhs, quantization=format, **options)


def attention_format_of(quantization: Quantization | None) -> Quantization | None:
    """Returns the format in which a policy multiplies in Flax's attention layers, or None for the compute dtype."""
    if not getattr(quantization, "attention", False):
        return None
    # Static scales are calibrated for the inputs of layers with weights.
    return dataclasses.replace(quantization, act_scale="dynamic") if isinstance(quantization, Int8) else quantization


def _zero_after(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Sets the positions of `(batch, positions, heads, features)` after the end of each sequence to zero."""
    if lengths is None:
        return x
    return jnp.where(jnp.arange(x.shape[1])[:, None, None] < lengths[:, None, None, None], x, jnp.zeros((), x.dtype))


def _find_mask(
    rows: int,
    columns: int,
    mask: ArrayLike | None,
    query_lengths: jax.Array | None,
    lengths: jax.Array | None,
    window: int | tuple[int, int] | None,
    *,
    is_causal: bool,
) -> jax.Array | None:
    """Returns a mask that broadcasts to `(batch, heads, rows, columns)`, true where a query sees a key."""
    query, key = np.arange(rows)[:, None], np.arange(columns)
    masks: list[Any] = [] if mask is None else [mask]
    if is_causal:
        masks.append(key <= query)
    if window is not None:
        before, after = (window, window) if isinstance(window, int) else window
        masks.append((query - before <= key) & (key <= query + after))
    if query_lengths is not None:
        masks.append(query < query_lengths[:, None, None, None])
    if lengths is not None:
        masks.append(key < lengths[:, None, None, None])
    return functools.reduce(jnp.logical_and, map(jnp.asarray, masks)) if masks else None


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
    scale = compute_current_scale(amax, FLOAT8_E4M3, margin=0)
    return saturate(x, scale, FLOAT8_E4M3), scale
