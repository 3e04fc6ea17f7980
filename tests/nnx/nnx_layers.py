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

LAYERS = {
    "Linear": Layer(lambda dtype, rngs: nnx.Linear(4, 5, dtype=dtype, rngs=rngs), (X,)),
    "LinearGeneral": Layer(
        lambda dtype, rngs: nnx.LinearGeneral((3, 4), (2, 3), axis=(-2, -1), dtype=dtype, rngs=rngs), (X,)
    ),
    "Einsum": Layer(lambda dtype, rngs: nnx.Einsum("...a,ab->...b", (4, 5), (5,), dtype=dtype, rngs=rngs), (X,)),
    "Conv": Layer(lambda dtype, rngs: nnx.Conv(2, 3, (3, 3), dtype=dtype, rngs=rngs), (IMAGE,)),
    "ConvTranspose": Layer(lambda dtype, rngs: nnx.ConvTranspose(2, 3, (2, 2), dtype=dtype, rngs=rngs), (IMAGE,)),
    "Embed": Layer(lambda dtype, rngs: nnx.Embed(7, 4, dtype=dtype, rngs=rngs), (TOKENS,)),
    "Embed, attended to": Layer(
        lambda dtype, rngs: nnx.Embed(7, 4, dtype=dtype, rngs=rngs), (X,), lambda layer, x: layer.attend(x)
    ),
    "LayerNorm": Layer(lambda dtype, rngs: nnx.LayerNorm(4, dtype=dtype, rngs=rngs), (X,)),
    "RMSNorm": Layer(lambda dtype, rngs: nnx.RMSNorm(4, dtype=dtype, rngs=rngs), (X,)),
    "GroupNorm": Layer(lambda dtype, rngs: nnx.GroupNorm(4, num_groups=2, dtype=dtype, rngs=rngs), (X,)),
    "InstanceNorm": Layer(lambda dtype, rngs: nnx.InstanceNorm(2, dtype=dtype, rngs=rngs), (IMAGE,)),
    "BatchNorm": Layer(lambda dtype, rngs: nnx.BatchNorm(4, dtype=dtype, rngs=rngs), (X,)),
    "BatchNorm in evaluation": Layer(
        lambda dtype, rngs: nnx.BatchNorm(4, use_running_average=True, dtype=dtype, rngs=rngs), (X,)
    ),
    "WeightNorm": Layer(
        lambda dtype, rngs: nnx.WeightNorm(nnx.Linear(4, 5, dtype=dtype, rngs=rngs), rngs=rngs),
        (X,),
        drawn=True,  # older Flax keeps its scales in no Variable, and loses them where all is abstract
    ),
    "SpectralNorm": Layer(
        lambda dtype, rngs: nnx.SpectralNorm(nnx.Linear(4, 5, dtype=dtype, rngs=rngs), rngs=rngs), (X,)
    ),
    "SpectralNorm in evaluation": Layer(
        lambda dtype, rngs: nnx.SpectralNorm(
            nnx.Conv(2, 3, (2, 2), dtype=dtype, rngs=rngs), update_stats=False, rngs=rngs
        ),
        (IMAGE,),
    ),
    "MultiHeadAttention": Layer(
        lambda dtype, rngs: nnx.MultiHeadAttention(2, 4, dtype=dtype, attention_fn=attend, decode=False, rngs=rngs),
        (X,),
    ),
    "MultiHeadAttention as it comes": Layer(  # its product of float16 with sums in float32 is not for CPUs
        lambda dtype, rngs: nnx.MultiHeadAttention(2, 4, dtype=dtype, normalize_qk=True, decode=False, rngs=rngs),
        (X,),
        platform="cuda",
    ),
    "MultiHeadAttention with a cache": Layer(
        lambda dtype, rngs: nnx.MultiHeadAttention(2, 4, dtype=dtype, attention_fn=attend, rngs=rngs),
        (X[:, :1],),
        lambda layer, token: layer(token, decode=True),
        make_cache,
    ),
    "Dropout": Layer(lambda dtype, rngs: nnx.Dropout(0.5, rngs=rngs), (X,)),
    "Sequential": Layer(
        lambda dtype, rngs: nnx.Sequential(
            nnx.Linear(4, 3, dtype=dtype, rngs=rngs), nnx.relu, nnx.Linear(3, 2, dtype=dtype, rngs=rngs)
        ),
        (X,),
    ),
    "PReLU": Layer(lambda dtype, rngs: nnx.PReLU(dtype=dtype), (X,)),
    "LoRA": Layer(
        lambda dtype, rngs: nnx.LoRA(
            4, 2, 5, base_module=nnx.Linear(4, 5, dtype=dtype, rngs=rngs), dtype=dtype, rngs=rngs
        ),
        (X,),
    ),
    "LoRALinear": Layer(
        lambda dtype, rngs: nnx.LoRALinear(4, 5, lora_rank=2, dtype=dtype, lora_dtype=dtype, rngs=rngs), (X,)
    ),
    "GRUCell": Layer(lambda dtype, rngs: nnx.GRUCell(4, 5, dtype=dtype, rngs=rngs), (CARRY, X)),
    "LSTMCell": Layer(lambda dtype, rngs: nnx.LSTMCell(4, 5, dtype=dtype, rngs=rngs), ((CARRY, CARRY), X)),
    "OptimizedLSTMCell": Layer(
        lambda dtype, rngs: nnx.OptimizedLSTMCell(4, 5, dtype=dtype, rngs=rngs), ((CARRY, CARRY), X)
    ),
    "SimpleCell": Layer(simple_cell, (CARRY, X)),
    "RNN of GRU cells": Layer(lambda dtype, rngs: nnx.RNN(nnx.GRUCell(4, 5, dtype=dtype, rngs=rngs)), (X,)),
    "RNN of LSTM cells": Layer(lambda dtype, rngs: nnx.RNN(nnx.LSTMCell(4, 5, dtype=dtype, rngs=rngs)), (X,)),
    "RNN of optimized LSTM cells": Layer(
        lambda dtype, rngs: nnx.RNN(nnx.OptimizedLSTMCell(4, 5, dtype=dtype, rngs=rngs), return_carry=True), (X,)
    ),
    "RNN of simple cells": Layer(lambda dtype, rngs: nnx.RNN(simple_cell(dtype, rngs)), (X,)),
    "RNN of simple residual cells": Layer(
        lambda dtype, rngs: nnx.RNN(simple_cell(dtype, rngs, residual=True), reverse=True, keep_order=True), (X,)
    ),
    "RNN with lengths": Layer(
        lambda dtype, rngs: nnx.RNN(simple_cell(dtype, rngs), return_carry=True),
        (X, LENGTHS),
        lambda layer, x, lengths: layer(x, seq_lengths=lengths),
    ),
    "RNN with a carry": Layer(
        lambda dtype, rngs: nnx.RNN(nnx.GRUCell(4, 5, dtype=dtype, rngs=rngs)),
        (X, CARRY[:, 0]),
        lambda layer, x, carry: layer(x, initial_carry=carry),
    ),
    "Bidirectional": Layer(
        lambda dtype, rngs: nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(4, 5, dtype=dtype, rngs=rngs)), nnx.RNN(simple_cell(dtype, rngs))
        ),
        (X,),
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
