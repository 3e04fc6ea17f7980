"""An MLP, a GPT of one block and a ConvNet, in linen and nnx, whose weights `autocast` is given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

IMAGES = jax.random.normal(jax.random.key(1), (16, 4, 4, 32))
TOKENS = jax.random.randint(jax.random.key(1), (2, 16), 0, 64)
ROWS = jax.random.normal(jax.random.key(1), (32, 64))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(64)(nn.relu(nn.Dense(128)(x)))


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(64)(nn.relu(nn.Conv(64, (3, 3))(x)).mean((1, 2)))


class GPT(nn.Module):
    """Its table is left by a rule, because `autocast` quantizes no lookups."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 64)(tokens)
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(64, use_bias=False)(nn.LayerNorm()(x))


class CastGPT(nn.Module):
    """The same with the casts that `autocast` makes in bfloat16: of the table, of norms, and of a softmax."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 64)(tokens).astype(jnp.bfloat16)
        x = x + nn.MultiHeadDotProductAttention(4, attention_fn=attend)(norm(x))
        x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(norm(x))))
        return nn.Dense(64, use_bias=False)(norm(x))


def norm(x):
    """Casts the input once, so that its gradient is a float32 sum; `nn.LayerNorm` casts for each use."""
    return nn.LayerNorm(dtype=jnp.float32)(x.astype(jnp.float32)).astype(x.dtype)


def attend(query, key, value, **options):
    query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key)), value)


@jax.custom_jvp
def softmax(x):
    """Computes in float32; its derivative reads the rounded output."""
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


@softmax.defjvp
def _differentiate_softmax(primals, tangents):
    out = softmax(*primals)
    normal = out.astype(jnp.float32)
    normal /= normal.sum(-1, keepdims=True)
    products = normal * tangents[0].astype(jnp.float32)
    return out, (products - normal * products.sum(-1, keepdims=True)).astype(out.dtype)


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class NnxConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.head = nnx.Conv(32, 64, (3, 3), rngs=rngs), nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.conv(x)).mean((1, 2)))


class NnxGPT(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.mlp = nnx.Embed(64, 64, rngs=rngs), NnxMLP(rngs)
        self.attend = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(64, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attend(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x))


INPUTS = {MLP: ROWS, ConvNet: IMAGES, GPT: TOKENS, NnxMLP: ROWS, NnxConvNet: IMAGES, NnxGPT: TOKENS}


def square(apply, params, x):
    return (apply(params, x).astype(jnp.float32) ** 2).mean()


def assert_equal(ours, theirs):
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.float32(a), np.float32(b), jax.tree_util.keystr(path))


def differentiate(apply):
    return jax.value_and_grad(functools.partial(square, apply))
