"""What the two byte-level GPTs have in common: sizes and causal attention."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from ._baselines import VOCABULARY


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of a byte-level GPT.

    Attributes:
      width: the size of the residual stream.
      depth: the number of blocks.
      heads: the number of attention heads; it divides `width`.
      context: the number of bytes that the model sees at once.
      vocabulary: the number of distinct tokens; 256 for bytes.
    """

    width: int = 64
    depth: int = 3
    heads: int = 4
    context: int = 64
    vocabulary: int = VOCABULARY


def causal_attention(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attends to the position itself and to those before it.

    Written out, because the fused one of JAX asks for float32 sums of float16 products, which XLA:CPU lacks.

    Args:
      queries: `(batch, length, heads, width of a head)`.
      keys: as `queries`.
      values: as `queries`.

    Returns:
      As `queries`, in the dtype of `queries`.

    >>> x = jnp.arange(6.0).reshape(1, 3, 1, 2)
    >>> causal_attention(x, x, x)[0, 0, 0].tolist()
    [0.0, 1.0]
    """
    length = queries.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
    visible = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, values)
