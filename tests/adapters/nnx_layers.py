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
    """A module with Params in containers, layers in containers, and a child with Params of its own."""

    def __init__(self, dtype=None, *, rngs):
        self._by_hand = dtype
        self.weights = nnx.List([nnx.Param(jnp.full(4, 0.3, jnp.float32)), nnx.Param(jnp.full(4, 0.7, jnp.float32))])
        self.scale = Scale(dtype)
        self.layers = nnx.Dict(
            linear=nnx.Linear(4, 4, dtype=dtype, rngs=rngs), norm=nnx.LayerNorm(4, dtype=dtype, rngs=rngs)
        )

    def __call__(self, x):
        first, second = (w[...] if self._by_hand is None else w[...].astype(self._by_hand) for w in self.weights)
        return self.layers.norm(self.layers.linear(x * first) + self.scale(x) * second)


class SteadyCell(nnx.SimpleCell):
    """A SimpleCell that a scan takes in mixed precision, as an expert writes it: its carry keeps its dtype."""

    def __call__(self, carry, inputs):
        new_carry, output = super().__call__(carry, inputs)
        return new_carry.astype(carry.dtype), output


def simple_cell(dtype, rngs, **options):
    """A SimpleCell, whose default dtype is float32; with a dtype, by hand."""
    kind = nnx.SimpleCell if dtype is None else SteadyCell
    return kind(4, 5, dtype=dtype or jnp.float32, rngs=rngs, **options)


def make_cache(layer, dtype):
    """Makes the cache of an attention layer, which is float32 unless told otherwise."""
    layer.init_cache((2, 3, 4), *([] if dtype is None else [dtype]))


class Layer(NamedTuple):
    make: Callable[..., nnx.Module]  # (dtype, rngs) -> module; dtype is None for a policy, and else written by hand
    inputs: tuple[Any, ...]
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs)  # (module, *inputs) -> output
    prepare: Callable[..., None] = lambda layer, dtype: None
    platform: str = "cpu"  # to lower for
    drawn: bool = False  # made of arrays, not of their shapes


X = jnp.linspace(-2.0, 2.0, 24).reshape(2, 3, 4)
IMAGE = jnp.linspace(-2.0, 2.0, 2 * 4 * 4 * 2).reshape(2, 4, 4, 2)
TOKENS = jnp.arange(6).reshape(2, 3)
LENGTHS = jnp.array([2, 3])
CARRY = jnp.zeros((2, 3, 5))


def layer(kind, *args, inputs=(X,), **options):
    """A layer that takes `dtype` and `rngs` as keywords, as most do."""
    return Layer(lambda dtype, rngs: kind(*args, dtype=dtype, rngs=rngs, **options), inputs)


def linear(dtype, rngs):
    return nnx.Linear(4, 5, dtype=dtype, rngs=rngs)


def gru(dtype, rngs):
    return nnx.GRUCell(4, 5, dtype=dtype, rngs=rngs)


LAYERS = {
    "Linear": Layer(linear, (X,)),
    "LinearGeneral": layer(nnx.LinearGeneral, (3, 4), (2, 3), axis=(-2, -1)),
    "Einsum": layer(nnx.Einsum, "...a,ab->...b", (4, 5), (5,)),
    "Conv": layer(nnx.Conv, 2, 3, (3, 3), inputs=(IMAGE,)),
    "ConvTranspose": layer(nnx.ConvTranspose, 2, 3, (2, 2), inputs=(IMAGE,)),
    "Embed": layer(nnx.Embed, 7, 4, inputs=(TOKENS,)),
    "Embed, attended to": layer(nnx.Embed, 7, 4)._replace(call=lambda layer, x: layer.attend(x)),
    "LayerNorm": layer(nnx.LayerNorm, 4),
    "RMSNorm": layer(nnx.RMSNorm, 4),
    "GroupNorm": layer(nnx.GroupNorm, 4, num_groups=2),
    "InstanceNorm": layer(nnx.InstanceNorm, 2, inputs=(IMAGE,)),
    "BatchNorm": layer(nnx.BatchNorm, 4),
    "BatchNorm in evaluation": layer(nnx.BatchNorm, 4, use_running_average=True),
    "WeightNorm": Layer(
        lambda dtype, rngs: nnx.WeightNorm(linear(dtype, rngs), rngs=rngs),
        (X,),
        drawn=True,  # older Flax keeps its scales in no Variable, and loses them where all is abstract
    ),
    "SpectralNorm": Layer(lambda dtype, rngs: nnx.SpectralNorm(linear(dtype, rngs), rngs=rngs), (X,)),
    "MultiHeadAttention": layer(nnx.MultiHeadAttention, 2, 4, attention_fn=attend, decode=False),
    # Its matmul of float16 with sums in float32 is not for CPUs.
    "MultiHeadAttention as it comes": layer(nnx.MultiHeadAttention, 2, 4, normalize_qk=True, decode=False)._replace(
        platform="cuda"
    ),
    "MultiHeadAttention with a cache": layer(
        nnx.MultiHeadAttention, 2, 4, attention_fn=attend, inputs=(X[:, :1],)
    )._replace(call=lambda layer, token: layer(token, decode=True), prepare=make_cache),
    "Dropout": Layer(lambda dtype, rngs: nnx.Dropout(0.5, rngs=rngs), (X,)),
    "Sequential": Layer(
        lambda dtype, rngs: nnx.Sequential(linear(dtype, rngs), nnx.relu, nnx.LayerNorm(5, dtype=dtype, rngs=rngs)),
        (X,),
    ),
    "PReLU": Layer(lambda dtype, rngs: nnx.PReLU(dtype=dtype), (X,)),
    "LoRA": Layer(lambda dtype, rngs: nnx.LoRA(4, 2, 5, base_module=linear(dtype, rngs), dtype=dtype, rngs=rngs), (X,)),
    "LoRALinear": Layer(
        lambda dtype, rngs: nnx.LoRALinear(4, 5, lora_rank=2, dtype=dtype, lora_dtype=dtype, rngs=rngs), (X,)
    ),
    "GRUCell": Layer(gru, (CARRY, X)),
    "LSTMCell": layer(nnx.LSTMCell, 4, 5, inputs=((CARRY, CARRY), X)),
    "OptimizedLSTMCell": layer(nnx.OptimizedLSTMCell, 4, 5, inputs=((CARRY, CARRY), X)),
    "SimpleCell": Layer(simple_cell, (CARRY, X)),
    "RNN of LSTM cells": Layer(
        lambda dtype, rngs: nnx.RNN(nnx.LSTMCell(4, 5, dtype=dtype, rngs=rngs), return_carry=True), (X,)
    ),
    "RNN of simple residual cells": Layer(
        lambda dtype, rngs: nnx.RNN(simple_cell(dtype, rngs, residual=True), reverse=True, keep_order=True), (X,)
    ),
    "RNN with lengths": Layer(
        lambda dtype, rngs: nnx.RNN(simple_cell(dtype, rngs), return_carry=True),
        (X, LENGTHS),
        lambda layer, x, lengths: layer(x, seq_lengths=lengths),
    ),
    "RNN with a carry": Layer(
        lambda dtype, rngs: nnx.RNN(gru(dtype, rngs)),
        (X, CARRY[:, 0]),
        lambda layer, x, carry: layer(x, initial_carry=carry),
    ),
    "Bidirectional": Layer(
        lambda dtype, rngs: nnx.Bidirectional(nnx.RNN(gru(dtype, rngs)), nnx.RNN(simple_cell(dtype, rngs))), (X,)
    ),
    "module with Params": Layer(lambda dtype, rngs: Scale(dtype), (X,)),
    "module of modules": Layer(lambda dtype, rngs: Blend(dtype, rngs=rngs), (X,)),
}

if hasattr(nnx, "RoPE"):  # of newer Flax
    LAYERS["RoPE"] = Layer(lambda dtype, rngs: nnx.RoPE(), (X,))

EXEMPT = {
    "Module": "the base of all modules",
    "RNNCellBase": "the base of the recurrent cells",
    "List": "a container, which nothing calls; the module of modules has one",
    "Dict": "a container, which nothing calls; the module of modules has one",
    "ToNNX": "a linen module, which the linen adapter gives its policy; the tests of transforms have it",
}
"""Modules that Flax exports, and why the registry has no entry of theirs."""
