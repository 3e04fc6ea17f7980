"""Rounds the operands of block-scaled matmuls."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jaxpr import ROUNDING_SCOPE
from ...policy import MXFP4, MXFP8, NVFP4, BlockFormat
from ._block_numbers import Blocks, quantize_mx, quantize_nv


# These have no derivative: JAX would silently differentiate the arithmetic on bits to zero.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@jax.named_scope(ROUNDING_SCOPE)
def round_input(x: jax.Array, format: BlockFormat, axis: int) -> Blocks:
    """Rounds the input of a layer, `(batch, rows, inputs)`, in blocks along an axis."""
    if isinstance(format, NVFP4):
        return quantize_nv(x, axis, format.block_size, tensor_axes=(-2, -1))
    return _quantize_mx(x, format, axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@jax.named_scope(ROUNDING_SCOPE)
def round_weight(w: jax.Array, format: BlockFormat, axis: int) -> Blocks:
    """Rounds a weight, `(*stack, inputs, outputs)`, along axis -2 (as `quantize` stores it) or -1 (backward)."""
    if isinstance(format, NVFP4):
        # Without activations, no backward matmul sums over the outputs.
        square_axis = -3 - axis if format.square_weights and format.activations else None
        return quantize_nv(w, axis, format.block_size, square_axis=square_axis, tensor_axes=(-2, -1))
    return _quantize_mx(w, format, axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
@jax.named_scope(ROUNDING_SCOPE)
def round_gradient(g: jax.Array, key: jax.Array | None, format: BlockFormat, axis: int) -> Blocks:
    """Rounds the gradient of a layer's output, `(batch, rows, outputs)`; `key` is for stochastic rounding."""
    if isinstance(format, NVFP4):
        return quantize_nv(g, axis, format.block_size, tensor_axes=(-2, -1), key=key)
    return _quantize_mx(g, format, axis, format.gradients if isinstance(format, MXFP8) else "e4m3")


def _quantize_mx(x: jax.Array, format: MXFP8 | MXFP4, axis: int, kind: str = "e4m3") -> Blocks:
    float8 = jnp.float8_e5m2 if kind == "e5m2" else jnp.float8_e4m3fn
    dtype = float8 if isinstance(format, MXFP8) else jnp.float4_e2m1fn
    return quantize_mx(x, dtype, axis, format.block_size, rounding=format.scale_rounding)


def _refuse_derivative(*args: Any) -> Any:
    format = next(arg for arg in args if isinstance(arg, BlockFormat))
    raise TypeError(
        f"Block-scaled matmuls ({str(format)!r}) have no second derivative. For example, give layers that are "
        "differentiated twice the policy 'mixed_bfloat16'."
    )


for _round in (round_input, round_weight, round_gradient):
    _round.defjvp(_refuse_derivative)


def mix_rows(x: jax.Array, block: int) -> jax.Array:
    """Multiplies each block of rows of `(batch, rows, features)` by an orthonormal matrix that spreads outliers.

    A matmul that sums over rows gives the same result for two mixed operands.

    Source: NVIDIA, Pretraining Large Language Models with NVFP4, 2025, section 4 (random Hadamard transforms).
    """
    batch, rows, features = x.shape
    blocks = x.astype(jnp.float32).reshape(batch, rows // block, block, features)
    mixed = jnp.einsum("ij,bnjf->bnif", make_hadamard(block), blocks, precision=lax.Precision.HIGHEST)
    return mixed.reshape(x.shape)


@functools.cache
def make_hadamard(size: int) -> np.ndarray:
    """Returns Sylvester's orthonormal Hadamard matrix with fixed column signs."""
    # The signs are a bent function of the bits of the column: rows that are constant, or alternate like a row of the
    # matrix, are spread evenly. Without signs they would be concentrated in one row.
    rows, columns = np.arange(size)[:, None], np.arange(size)
    pairs = columns & (columns >> 1) & 0x55555555
    return ((-1.0) ** (np.bitwise_count(rows & columns) + np.bitwise_count(pairs)) / np.sqrt(size)).astype(np.float32)


def pad_axis(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Pads an axis with zeros to a multiple of `block`."""
    missing = -x.shape[axis] % block
    if not missing:
        return x
    widths = [(0, missing if n == axis % x.ndim else 0, 0) for n in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)
