"""How each operand of a product is rounded in blocks, by the format of its policy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jaxpr import ROUNDING_SCOPE
from ...policy import MXFP8, NVFP4, BlockFormat
from ._block_numbers import Blocks, quantize_mx, quantize_nv

_MX_DTYPES = {
    "MXFP8": {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2},
    "MXFP4": {"e2m1": jnp.float4_e2m1fn},
}


# No operand passes a derivative on: JAX would find zero in the arithmetic on bits, and say nothing.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
@jax.named_scope(ROUNDING_SCOPE)
def round_input(x: jax.Array, format: BlockFormat, axis: int, block: int) -> Blocks:
    """Rounds the input of a layer in blocks along an axis.

    Args:
      x: floating, `(batch, rows, inputs)`.
      format: of the policy.
      axis: the axis that the product sums over, which blocks divide.
      block: how many numbers share a scale.

    Raises:
      TypeError: it is differentiated, which happens where the derivative of a product is differentiated once more.
    """
    if isinstance(format, NVFP4):
        return quantize_nv(x, axis, block, tensor_axes=(-2, -1))
    return quantize_mx(x, _narrow_dtype(format), axis, block, rounding=format.scale_rounding)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
@jax.named_scope(ROUNDING_SCOPE)
def round_weight(w: jax.Array, format: BlockFormat, axis: int, block: int) -> Blocks:
    """Rounds a weight in blocks along an axis: the numbers that `quantize` stores are these, along its inputs.

    Args:
      w: floating, `(*stack, inputs, outputs)`.
      format: of the policy.
      axis: the axis that the product sums over: -2 in the forward pass, -1 in the backward pass.
      block: how many numbers share a scale.

    Raises:
      TypeError: as `round_input`.
    """
    if isinstance(format, NVFP4):
        # Without activations no backward pass sums over the outputs.
        square_axis = -3 - axis if format.square_weights and format.activations else None
        return quantize_nv(w, axis, block, square_axis=square_axis, tensor_axes=(-2, -1))
    return quantize_mx(w, _narrow_dtype(format), axis, block, rounding=format.scale_rounding)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
@jax.named_scope(ROUNDING_SCOPE)
def round_gradient(g: jax.Array, key: jax.Array | None, format: BlockFormat, axis: int, block: int) -> Blocks:
    """Rounds the gradient of a layer's result in blocks along an axis.

    Args:
      g: floating, `(batch, rows, outputs)`.
      key: of the noise, with `stochastic_rounding`.
      format: of the policy.
      axis: the axis that the product sums over.
      block: how many numbers share a scale.

    Raises:
      TypeError: as `round_input`.
    """
    if isinstance(format, NVFP4):
        return quantize_nv(g, axis, block, tensor_axes=(-2, -1), key=key)
    dtype = _narrow_dtype(format, format.gradients if isinstance(format, MXFP8) else None)
    return quantize_mx(g, dtype, axis, block, rounding=format.scale_rounding)


def _narrow_dtype(format: BlockFormat, name: str | None = None) -> Any:
    dtypes = _MX_DTYPES[type(format).__name__]
    return dtypes[name] if name else next(iter(dtypes.values()))


def _refuse_derivative(*args: Any) -> Any:
    """Raises an error, as the casts of `Float8` do."""
    format = next(arg for arg in args if isinstance(arg, BlockFormat))
    raise TypeError(
        f"A product in blocks ({str(format)!r}) has a first derivative, and no second one. For example, give layers "
        "that are differentiated twice the policy 'mixed_bfloat16'."
    )


for _round in (round_input, round_weight, round_gradient):
    _round.defjvp(_refuse_derivative)


def mix_rows(x: jax.Array, block: int) -> jax.Array:
    """Multiplies each block of rows by a Hadamard matrix with fixed signs, in float32.

    It is orthonormal, so that a product of two operands that sums over rows is the same of mixed ones, while a number
    that is much larger than its neighbours is spread among all of them.

    Args:
      x: floating, `(batch, rows, features)`.
      block: how many rows are mixed, a power of two that divides their number.

    Source: NVIDIA, Pretraining Large Language Models with NVFP4, 2025, section 4 (random Hadamard transforms).
    """
    batch, rows, features = x.shape
    blocks = x.astype(jnp.float32).reshape(batch, rows // block, block, features)
    mixed = jnp.einsum("ij,bnjf->bnif", make_hadamard(block), blocks, precision=lax.Precision.HIGHEST)
    return mixed.reshape(x.shape)


@functools.cache
def make_hadamard(size: int) -> np.ndarray:
    """An orthonormal Hadamard matrix, Sylvester's, whose columns have fixed signs.

    The signs are a bent function of the bits of the column. Equal rows, and rows whose signs alternate in any way of
    Sylvester's, become rows of equal magnitudes; without signs all of them would come together in one.

    >>> (make_hadamard(4) * 2).astype(int).tolist()
    [[1, 1, 1, -1], [1, -1, 1, 1], [1, 1, -1, 1], [1, -1, -1, -1]]
    """
    rows, columns = np.arange(size)[:, None], np.arange(size)
    pairs = columns & (columns >> 1) & 0x55555555
    return ((-1.0) ** (np.bitwise_count(rows & columns) + np.bitwise_count(pairs)) / np.sqrt(size)).astype(np.float32)


def pad_axis(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Adds zeros behind an axis, so that blocks divide it: to a sum they add nothing."""
    missing = -x.shape[axis] % block
    if not missing:
        return x
    widths = [(0, missing if n == axis % x.ndim else 0, 0) for n in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)
