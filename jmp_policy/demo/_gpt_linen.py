"""The byte-level GPT in Flax linen: the same model as the one in nnx, as free of dtypes."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from ._gpt import GPTConfig, causal_attention


class SelfAttention(nn.Module):
    """Causal self-attention."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, length, width)` to the same shape."""
        batch, length, width = x.shape
        heads = self.config.heads
        qkv = nn.Dense(3 * width, use_bias=False, name="qkv")(x).reshape(batch, length, heads, 3 * width // heads)
        attended = causal_attention(*jnp.split(qkv, 3, axis=-1))
        return nn.Dense(width, use_bias=False, name="project")(attended.reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normalised copy of the residual stream."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, length, width)` to the same shape."""
        width = self.config.width
        x = x + SelfAttention(self.config, name="attention")(nn.LayerNorm(name="attention_norm")(x))
        expanded = nn.Dense(4 * width, name="expand")(nn.LayerNorm(name="mlp_norm")(x))
        return x + nn.Dense(width, name="contract")(nn.gelu(expanded))


class GPT(nn.Module):
    """A byte-level GPT with learned positions; the output layer shares the table of the embedding."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps integers `(batch, length)` to logits `(batch, length, vocabulary)` of the next token."""
        config = self.config
        initializer = nn.initializers.normal(0.02)
        embed = nn.Embed(config.vocabulary, config.width, embedding_init=initializer, name="embed")
        positions = nn.Embed(config.context, config.width, embedding_init=initializer, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for index in range(config.depth):
            x = Block(config, name=f"blocks_{index}")(x)
        return embed.attend(nn.LayerNorm(name="norm")(x))
