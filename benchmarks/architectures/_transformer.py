"""A pre-norm transformer in linen that is trained with teacher forcing and decodes with a cache."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks._loss import cross_entropy


def dot_product_attention(query: Any, key: Any, value: Any, mask: Any = None, **_: Any) -> jax.Array:
    """Attention written out: the fused one of JAX asks for float32 sums of float16 products, which XLA:CPU lacks."""
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), value)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normalised copy of the residual stream."""

    heads: int
    decode: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        width = x.shape[-1]
        attention = nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, decode=self.decode, attention_fn=dot_product_attention
        )
        x = x + attention(nn.LayerNorm(dtype=self.dtype)(x), mask=mask)
        y = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(y))


class Transformer(nn.Module):
    """A language model: `(batch, length)` tokens to logits of the next; with `decode`, one token a call."""

    vocabulary: int
    width: int
    depth: int
    heads: int
    max_length: int
    decode: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="embed")
        positions = nn.Embed(self.max_length, self.width, dtype=self.dtype, name="positions")
        x = embed(tokens) + positions(self._position(tokens.shape[1]))
        mask = None if self.decode else nn.make_causal_mask(tokens)
        for layer in range(self.depth):
            x = Block(self.heads, self.decode, self.dtype, name=f"block_{layer}")(x, mask)
        return nn.Dense(self.vocabulary, dtype=self.dtype, name="logits")(nn.LayerNorm(dtype=self.dtype)(x))

    def _position(self, length: int) -> jax.Array:
        if not self.decode:
            return jnp.arange(length)
        is_initialized = self.has_variable("cache", "position")
        position = self.variable("cache", "position", lambda: jnp.zeros((), jnp.int32))
        start = position.value
        if is_initialized:
            position.value = start + length
        return start + jnp.arange(length)


def loss_fn(apply_fn: Callable[..., Any], variables: Any, batch: Any) -> tuple[jax.Array, Any]:
    """The cross-entropy of the next tokens."""
    tokens = batch["tokens"]
    return cross_entropy(apply_fn(variables, tokens[:, :-1]), tokens[:, 1:]), {}
