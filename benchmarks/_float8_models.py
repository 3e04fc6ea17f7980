"""Models whose dense layers are computed in 8-bit floating point, in linen.

`dtype` and `dot_general_cls` are for the contestants that write them by hand; ours leave both unset.
"""

from typing import Any

import jax
from flax import linen as nn

from examples.gpt.model import causal_attention

LAYERS = r"(dense|qkv|project|expand|contract)"
"""The paths of the dense layers."""

HEADS = 4


class Layer(nn.Module):
    """One dense layer."""

    dtype: Any = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(x.shape[-1], dtype=self.dtype, dot_general_cls=self.dot_general_cls, name="dense")(x)


class MLP(nn.Module):
    """Two dense layers, four times as wide between them."""

    dtype: Any = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return _perceptron(x, dtype=self.dtype, dot_general_cls=self.dot_general_cls)


class Block(nn.Module):
    """Causal attention and a perceptron, each on a normalized copy of the residual stream."""

    dtype: Any = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = {"dtype": self.dtype, "dot_general_cls": self.dot_general_cls}
        x = x if self.dtype is None else x.astype(self.dtype)
        batch, length, width = x.shape
        normed = nn.LayerNorm(dtype=self.dtype, name="attention_norm")(x)
        qkv = nn.Dense(3 * width, name="qkv", **options)(normed).reshape(batch, length, 3, HEADS, width // HEADS)
        attended = causal_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).reshape(x.shape)
        x = x + nn.Dense(width, name="project", **options)(attended)
        return x + _perceptron(nn.LayerNorm(dtype=self.dtype, name="mlp_norm")(x), **options)


MODELS: dict[str, type[nn.Module]] = {"dense layer": Layer, "MLP": MLP, "transformer block": Block}


def _perceptron(x: jax.Array, **options: Any) -> jax.Array:
    expanded = nn.Dense(4 * x.shape[-1], name="expand", **options)(x)
    return nn.Dense(x.shape[-1], name="contract", **options)(nn.gelu(expanded))
