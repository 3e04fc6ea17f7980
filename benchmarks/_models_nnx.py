"""The benchmarked models in nnx. `dtype` is for the contestants that write it by hand; ours leave it unset."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.gpt.model import GPTConfig, causal_attention


class MLP(nnx.Module):
    """Three dense layers."""

    def __init__(self, features: int, dtype: Any = None, *, rngs: nnx.Rngs):
        self.dtype = dtype
        self.first = nnx.Linear(features, 512, dtype=dtype, rngs=rngs)
        self.second = nnx.Linear(512, 512, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(512, 16, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.dtype is None else x.astype(self.dtype)
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


class ResNetBlock(nnx.Module):
    """Two convolutions with BatchNorm around a residual stream, and a classifier on the mean."""

    def __init__(self, channels: int, dtype: Any = None, *, rngs: nnx.Rngs):
        self.dtype = dtype
        conv = lambda: nnx.Conv(channels, channels, (3, 3), use_bias=False, dtype=dtype, rngs=rngs)
        norm = lambda: nnx.BatchNorm(channels, use_running_average=False, dtype=dtype, rngs=rngs)
        self.first, self.first_norm = conv(), norm()
        self.second, self.second_norm = conv(), norm()
        self.classify = nnx.Linear(channels, 16, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = residual = x if self.dtype is None else x.astype(self.dtype)
        x = nnx.relu(self.first_norm(self.first(x)))
        x = self.second_norm(self.second(x))
        return self.classify(nnx.relu(x + residual).mean((1, 2)))


class HandGPT(nnx.Module):
    """The example's GPT with a dtype in each layer; the same parameters."""

    def __init__(self, config: GPTConfig, dtype: Any, *, rngs: nnx.Rngs):
        initializer = nnx.initializers.normal(0.02)
        embed = lambda size: nnx.Embed(size, config.width, dtype=dtype, embedding_init=initializer, rngs=rngs)
        self.embed, self.positions = embed(config.vocabulary), embed(config.context)
        self.blocks = nnx.List([_HandBlock(config, dtype, rngs=rngs) for _ in range(config.depth)])
        self.norm = nnx.LayerNorm(config.width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class _HandBlock(nnx.Module):
    def __init__(self, config: GPTConfig, dtype: Any, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(config.width, dtype=dtype, rngs=rngs)
        self.attention = _HandAttention(config, dtype, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.width, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(config.width, 4 * config.width, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * config.width, config.width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(nnx.gelu(self.expand(self.mlp_norm(x))))


class _HandAttention(nnx.Module):
    def __init__(self, config: GPTConfig, dtype: Any, *, rngs: nnx.Rngs):
        self.heads = config.heads
        self.qkv = nnx.Linear(config.width, 3 * config.width, use_bias=False, dtype=dtype, rngs=rngs)
        self.project = nnx.Linear(config.width, config.width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, self.heads, 3 * width // self.heads)
        attended = causal_attention(*jnp.split(qkv, 3, axis=-1))
        return self.project(attended.reshape(batch, length, width))
