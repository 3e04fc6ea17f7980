"""The registry of nnx layers: each is made with a dtype, and takes these inputs. A law holds for every entry."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


def attend(query, key, value, **_):
    """float16 attention that XLA's CPU backend can compile: products in the inputs' dtype, and no more."""
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", query, key))
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


class Scale(nnx.Module):
    """A module without a `dtype`: its policy reads its Param in compute dtype; by hand, its author casts it."""

    def __init__(self, dtype=None):
        self._by_hand = dtype
        self.scale = nnx.Param(jnp.linspace(0.9, 1.1, 4))

    def __call__(self, x):
        scale = self.scale[...] if self._by_hand is None else self.scale[...].astype(self._by_hand)
        return x * scale + scale


class Blend(nnx.Module):
    """A module with Params in containers, a layer, and a child with Params of its own."""

    def __init__(self, dtype=None, *, rngs):
        self._by_hand = dtype
        self.weights = nnx.List([nnx.Param(jnp.full(4, 0.3, jnp.float32)), nnx.Param(jnp.full(4, 0.7, jnp.float32))])
        self.scale = Scale(dtype)
        self.linear = nnx.Linear(4, 4, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(4, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        first, second = (w[...] if self._by_hand is None else w[...].astype(self._by_hand) for w in self.weights)
        return self.norm(self.linear(x * first) + self.scale(x) * second)


class Layer(NamedTuple):
    make: Callable[..., nnx.Module]  # (dtype, rngs) -> module
    inputs: tuple[Any, ...]


X = jnp.linspace(-2.0, 2.0, 24).reshape(2, 3, 4)
IMAGE = jnp.linspace(-2.0, 2.0, 2 * 4 * 4 * 2).reshape(2, 4, 4, 2)
TOKENS = jnp.arange(6).reshape(2, 3)
CARRY = jnp.zeros((2, 3, 5))

LAYERS = {
    "Linear": Layer(lambda dtype, rngs: nnx.Linear(4, 5, dtype=dtype, rngs=rngs), (X,)),
    "LinearGeneral": Layer(
        lambda dtype, rngs: nnx.LinearGeneral((3, 4), (2, 3), axis=(-2, -1), dtype=dtype, rngs=rngs), (X,)
    ),
    "Einsum": Layer(lambda dtype, rngs: nnx.Einsum("...a,ab->...b", (4, 5), (5,), dtype=dtype, rngs=rngs), (X,)),
    "Conv": Layer(lambda dtype, rngs: nnx.Conv(2, 3, (3, 3), dtype=dtype, rngs=rngs), (IMAGE,)),
    "ConvTranspose": Layer(lambda dtype, rngs: nnx.ConvTranspose(2, 3, (2, 2), dtype=dtype, rngs=rngs), (IMAGE,)),
    "Embed": Layer(lambda dtype, rngs: nnx.Embed(7, 4, dtype=dtype, rngs=rngs), (TOKENS,)),
    "LayerNorm": Layer(lambda dtype, rngs: nnx.LayerNorm(4, dtype=dtype, rngs=rngs), (X,)),
    "RMSNorm": Layer(lambda dtype, rngs: nnx.RMSNorm(4, dtype=dtype, rngs=rngs), (X,)),
    "GroupNorm": Layer(lambda dtype, rngs: nnx.GroupNorm(4, num_groups=2, dtype=dtype, rngs=rngs), (X,)),
    "BatchNorm": Layer(lambda dtype, rngs: nnx.BatchNorm(4, dtype=dtype, rngs=rngs), (X,)),
    "BatchNorm in evaluation": Layer(
        lambda dtype, rngs: nnx.BatchNorm(4, use_running_average=True, dtype=dtype, rngs=rngs), (X,)
    ),
    "MultiHeadAttention": Layer(
        lambda dtype, rngs: nnx.MultiHeadAttention(
            2, 4, dtype=dtype, attention_fn=attend, decode=False, rngs=rngs
        ),
        (X,),
    ),
    "Dropout": Layer(lambda dtype, rngs: nnx.Dropout(0.5, rngs=rngs), (X,)),
    "Sequential": Layer(
        lambda dtype, rngs: nnx.Sequential(
            nnx.Linear(4, 3, dtype=dtype, rngs=rngs), nnx.relu, nnx.Linear(3, 2, dtype=dtype, rngs=rngs)
        ),
        (X,),
    ),
    "PReLU": Layer(lambda dtype, rngs: nnx.PReLU(dtype=dtype), (X,)),
    "LoRALinear": Layer(
        lambda dtype, rngs: nnx.LoRALinear(4, 5, lora_rank=2, dtype=dtype, lora_dtype=dtype, rngs=rngs), (X,)
    ),
    "GRUCell": Layer(lambda dtype, rngs: nnx.GRUCell(4, 5, dtype=dtype, rngs=rngs), (CARRY, X)),
    "OptimizedLSTMCell": Layer(
        lambda dtype, rngs: nnx.OptimizedLSTMCell(4, 5, dtype=dtype, rngs=rngs), ((CARRY, CARRY), X)
    ),
    "SimpleCell": Layer(lambda dtype, rngs: nnx.SimpleCell(4, 5, dtype=dtype or jnp.float32, rngs=rngs), (CARRY, X)),
    "module with Params": Layer(lambda dtype, rngs: Scale(dtype), (X,)),
    "module of modules": Layer(lambda dtype, rngs: Blend(dtype, rngs=rngs), (X,)),
}
