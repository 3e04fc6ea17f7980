"""Numbers in 8-bit floating point, e4m3 and e5m2, and the scales by which they fit."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

E4M3 = np.dtype(jnp.float8_e4m3fn)
"""For inputs and weights: 3 bits of mantissa, up to 448."""
E5M2 = np.dtype(jnp.float8_e5m2)
"""For the gradients of outputs: 2 bits of mantissa, up to 57344."""

_TINY = float(np.finfo(np.float32).tiny)


class Scaled(NamedTuple):
    """Numbers of an 8-bit format, and what they are multiples of.

    Attributes:
      values: e4m3 or e5m2.
      scale: float32, a scalar, or of the axes of `values` with length 1 on those that share one; not finite where
        a number that went in was not, which clipping would hide.
    """

    values: jax.Array
    scale: jax.Array


def current_scale(amax: jax.Array, dtype: np.dtype, margin: int) -> jax.Array:
    """The scale by which `amax` becomes the largest number of a format, or `2**margin` below it.

    Of zeros it is tiny, by which they stay zeros. Where `amax` is not finite it is not either, and the product is nan.

    Args:
      amax: float32 of any shape, of the numbers that are scaled.
      dtype: e4m3 or e5m2.
      margin: the room to leave.
    """
    return jnp.maximum(amax / _largest(dtype, margin), _TINY)


def scale_of(amax: jax.Array, otherwise: jax.Array | float, dtype: np.dtype, margin: int) -> jax.Array:
    """As `current_scale`, of earlier numbers.

    Args:
      amax: float32 of any shape.
      otherwise: the scale where `amax` is zero or not finite, a scalar.
      dtype: e4m3 or e5m2.
      margin: the room to leave.

    Source: `compute_scale` of NVIDIA's Transformer Engine, of whose scales this is the reciprocal. The order of the
    operations is that of Flax and Keras too, so that the scales agree in every bit.
    """
    usable = (amax > 0) & jnp.isfinite(amax)
    return jnp.maximum(1 / select(usable, _largest(dtype, margin) / amax, 1 / otherwise), _TINY)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def saturated(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x / scale` in an 8-bit format, clipped to its largest number: beyond 448 a cast to e4m3 is nan.

    Args:
      x: floating.
      scale: float32, a scalar or broadcastable to `x`.
      dtype: e4m3 or e5m2.

    Raises:
      TypeError: it is differentiated, as a product is whose derivative is differentiated once more.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3.1 (saturation).
    """
    limit = _largest(dtype)
    return lax.clamp(-limit, x.astype(jnp.float32) / scale, limit).astype(dtype)


@saturated.defjvp
def _refused(dtype: np.dtype, primals: Any, tangents: Any) -> Any:
    """JAX would cast the tangents too, to 8 bits and without a scale: they would be nan, or a third of them lost."""
    raise TypeError(
        "A product in 8-bit floating point has a first derivative, and no second one. For example, give layers that "
        "are differentiated twice the policy 'mixed_bfloat16'."
    )


def select(which: jax.Array, x: jax.Array, otherwise: jax.Array | float) -> jax.Array:
    """`jnp.where` without the function that each of its calls adds to a program."""
    return lax.select(which, x, lax.full_like(x, otherwise))


def _largest(dtype: np.dtype, margin: int = 0) -> np.float32:
    return np.float32(jnp.finfo(dtype).max) / np.float32(2.0**margin)
