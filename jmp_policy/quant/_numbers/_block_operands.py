"""Rounds the operands of block-scaled matmuls."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base import ROUNDING_SCOPE
from ...policy import MXFP8, NVFP4, BlockFormat
from ._block_numbers import Blocks, quantize_mx, quantize_nv


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
@jax.named_scope(ROUNDING_SCOPE)
def round_operand(
    x: jax.Array, key: jax.Array | None, format: BlockFormat, axis: int, role: Literal["input", "weight", "gradient"]
) -> Blocks:
    """Rounds an operand of a matmul in blocks along an axis; `key` is for stochastic rounding of gradients.

    An input is `(batch, rows, inputs)`, the gradient of an output `(batch, rows, outputs)`. A weight `(*stack, inputs,
    outputs)` is rounded along axis -2 in the forward pass, as `quantize` stores it, and along -1 in the backward pass.
    """
    if isinstance(format, NVFP4):
        # Without activations, no backward matmul sums over the outputs.
        is_square = role == "weight" and format.square_weights and format.activations
        square_axis = -3 - axis if is_square else None
        return quantize_nv(x, axis, format.block_size, square_axis=square_axis, tensor_axes=(-2, -1), key=key)
    dtype = jnp.float8_e4m3fn if isinstance(format, MXFP8) else jnp.float4_e2m1fn
    if role == "gradient" and isinstance(format, MXFP8) and format.gradients == "e5m2":
        dtype = jnp.float8_e5m2
    return quantize_mx(x, dtype, axis, format.block_size, rounding=format.scale_rounding)


@round_operand.defjvp
def _refuse_derivative(format: BlockFormat, axis: int, role: str, primals: Any, tangents: Any) -> Any:
    """Raises: JAX would silently differentiate the arithmetic on bits to zero."""
    raise TypeError(
        f"Block-scaled matmuls ({str(format)!r}) have no second derivative. For example, give layers that are "
        "differentiated twice the policy 'mixed_bfloat16'."
    )


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
