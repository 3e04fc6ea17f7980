"""`dot_product_attention`: attention whose two matmuls are in 8 bits."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._base import DTypeLike, at_least_float32, quote
from ..policy import MXFP8, Int8, Quantization
from ._numbers import pad_axes
from ._operations import check_floating, einsum, parse_product_format
from ._products import label_einsum


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
