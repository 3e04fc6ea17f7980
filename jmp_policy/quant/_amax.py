"""The largest magnitude of an array, from which scales are made."""

import jax
import jax.numpy as jnp
from jax import lax


def amax_of(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """The largest magnitude, and infinity where a number is not finite; zero of an empty array.

    Args:
      x: floating, any shape.
      axes: those to reduce, which stay with length 1; by default all of them, to a scalar.

    Returns:
      float32.

    >>> amax_of(jnp.array([[1.0, -3.0], [jnp.nan, 0.0]]), (1,)).tolist()
    [[3.0], [inf]]
    """
    # A nan becomes an infinity first: on CPUs XLA's float32 `max` of some thousand numbers loses a nan.
    magnitudes = lax.select(jnp.isnan(x), lax.full_like(x, jnp.inf), jnp.abs(x))
    least = None if x.size else 0
    return jnp.max(magnitudes, axis=axes, keepdims=axes is not None, initial=least).astype(jnp.float32)
