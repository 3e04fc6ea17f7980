"""The benchmarked models in linen. `dtype` is for the contestants that write it by hand; ours leave it unset."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from examples.gpt.model import GPTConfig, causal_attention


class MLP(nn.Module):
    """Three dense layers."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.dtype is None else x.astype(self.dtype)
        for width in (512, 512):
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(16, dtype=self.dtype)(x)


class ResNetBlock(nn.Module):
    """Two convolutions with BatchNorm around a residual stream, and a classifier on the mean."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = residual = x if self.dtype is None else x.astype(self.dtype)
        x = nn.relu(self._norm()(self._conv(x.shape[-1])(x)))
        x = self._norm()(self._conv(x.shape[-1])(x))
        return nn.Dense(16, dtype=self.dtype)(nn.relu(x + residual).mean((1, 2)))

    def _conv(self, channels: int) -> nn.Module:
        return nn.Conv(channels, (3, 3), use_bias=False, dtype=self.dtype)

    def _norm(self) -> nn.Module:
        return nn.BatchNorm(use_running_average=False, dtype=self.dtype)


class HandGPT(nn.Module):
    """The example's GPT with a dtype in each layer; the same parameters."""

    config: GPTConfig
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        embed, positions = (
            nn.Embed(size, config.width, dtype=self.dtype, embedding_init=nn.initializers.normal(0.02), name=name)
            for size, name in ((config.vocabulary, "embed"), (config.context, "positions"))
        )
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for index in range(config.depth):
            x = _HandBlock(config, self.dtype, name=f"blocks_{index}")(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype, name="norm")(x))


class _HandBlock(nn.Module):
    config: GPTConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = self.config.width
        norm = nn.LayerNorm(dtype=self.dtype, name="attention_norm")
        x = x + _HandAttention(self.config, self.dtype, name="attention")(norm(x))
        normed = nn.LayerNorm(dtype=self.dtype, name="mlp_norm")(x)
        expanded = nn.Dense(4 * width, dtype=self.dtype, name="expand")(normed)
        return x + nn.Dense(width, dtype=self.dtype, name="contract")(nn.gelu(expanded))


class _HandAttention(nn.Module):
    config: GPTConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        heads = self.config.heads
        qkv = nn.Dense(3 * width, use_bias=False, dtype=self.dtype, name="qkv")(x)
        qkv = qkv.reshape(batch, length, heads, 3 * width // heads)
        attended = causal_attention(*jnp.split(qkv, 3, axis=-1)).reshape(batch, length, width)
        return nn.Dense(width, use_bias=False, dtype=self.dtype, name="project")(attended)
