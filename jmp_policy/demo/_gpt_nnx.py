"""The byte-level GPT in Flax nnx, written without a thought about dtypes: `with_policy` brings them."""

import jax
import jax.numpy as jnp
from flax import nnx

from ._gpt import GPTConfig, causal_attention


class SelfAttention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.heads = config.heads
        self.qkv = nnx.Linear(config.width, 3 * config.width, use_bias=False, rngs=rngs)
        self.project = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, length, width)` to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, self.heads, 3 * width // self.heads)
        attended = causal_attention(*jnp.split(qkv, 3, axis=-1))
        return self.project(attended.reshape(batch, length, width))


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each on a normalised copy of the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = SelfAttention(config, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.expand = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.contract = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, length, width)` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(nnx.gelu(self.expand(self.mlp_norm(x))))


class GPT(nnx.Module):
    """A byte-level GPT with learned positions; the output layer shares the table of the embedding."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        initializer = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(config.vocabulary, config.width, embedding_init=initializer, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, embedding_init=initializer, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.depth)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps integers `(batch, length)` to logits `(batch, length, vocabulary)` of the next token."""
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))
