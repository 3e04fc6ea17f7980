"""The registry of linen layers: each is made with a dtype, and takes these inputs. A law holds for every entry."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn


def attend(query, key, value, **_):
    """float16 attention that XLA's CPU backend can compile: products in the inputs' dtype, and no more."""
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", query, key))
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


class SteadyCell(nn.SimpleCell):
    """A SimpleCell that a scan takes in mixed precision, as an expert writes it: its carry keeps its dtype."""

    @nn.compact
    def __call__(self, carry, inputs):
        new_carry, output = super().__call__(carry, inputs)
        return new_carry.astype(carry.dtype), output


def simple_cell(dtype, **options):
    """A SimpleCell; by hand, with a dtype."""
    return (nn.SimpleCell if dtype is None else SteadyCell)(3, dtype=dtype, **options)


class Layer(NamedTuple):
    make: Callable[..., nn.Module]  # (dtype) -> module; dtype is None for a policy, and else written by hand
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never changed
    method: Any = None
    init_inputs: tuple[Any, ...] | None = None  # where they are others, and for `__call__`


X = jnp.linspace(-2.0, 2.0, 24).reshape(2, 3, 4)
IMAGE = jnp.linspace(-2.0, 2.0, 2 * 4 * 4 * 2).reshape(2, 4, 4, 2)
VIDEO = jnp.linspace(-2.0, 2.0, 2 * 3 * 2 * 2 * 2).reshape(2, 3, 2, 2, 2)
TOKENS = jnp.arange(6).reshape(2, 3)
LENGTHS = jnp.array([2, 3])
CARRY, FRAMES = jnp.zeros((2, 3, 3)), jnp.zeros((2, 4, 4, 3))
KERNEL = jnp.linspace(-1.0, 1.0, 20).reshape(4, 5)
LAST_BY_FIRST = (((2,), (0,)), ((), ()))

_LINEAR = {
    "Dense": Layer(lambda dtype: nn.Dense(5, dtype=dtype), (X,)),
    "Dense in float8": Layer(
        lambda dtype: nn.Dense(5, dtype=dtype, dot_general_cls=nn.Fp8DirectDotGeneralOp), (X,)
    ),
    "DenseGeneral": Layer(lambda dtype: nn.DenseGeneral((2, 3), axis=(-2, -1), dtype=dtype), (X,)),
    "Einsum": Layer(lambda dtype: nn.Einsum((4, 5), "...a,ab->...b", dtype=dtype), (X,)),
    "Conv": Layer(lambda dtype: nn.Conv(3, (3, 3), dtype=dtype), (IMAGE,)),
    "ConvLocal": Layer(lambda dtype: nn.ConvLocal(3, (3, 3), dtype=dtype), (IMAGE,)),
    "ConvTranspose": Layer(lambda dtype: nn.ConvTranspose(3, (2, 2), dtype=dtype), (IMAGE,)),
    "Embed": Layer(lambda dtype: nn.Embed(7, 4, dtype=dtype), (TOKENS,)),
    "Embed, attended to": Layer(
        lambda dtype: nn.Embed(7, 4, dtype=dtype), (X,), method="attend", init_inputs=(TOKENS,)
    ),
    "PReLU": Layer(lambda dtype: nn.PReLU(), (X,)),
    "Dropout": Layer(lambda dtype: nn.Dropout(0.5), (X,), {"deterministic": False}),
    "Sequential": Layer(
        lambda dtype: nn.Sequential([nn.Dense(3, dtype=dtype), nn.relu, nn.Dense(2, dtype=dtype)]), (X,)
    ),
}

_NORMS = {
    "LayerNorm": Layer(lambda dtype: nn.LayerNorm(dtype=dtype), (X,)),
    "RMSNorm": Layer(lambda dtype: nn.RMSNorm(dtype=dtype), (X,)),
    "GroupNorm": Layer(lambda dtype: nn.GroupNorm(num_groups=2, dtype=dtype), (X,)),
    "InstanceNorm": Layer(lambda dtype: nn.InstanceNorm(dtype=dtype), (IMAGE,)),
    "BatchNorm": Layer(lambda dtype: nn.BatchNorm(use_running_average=False, dtype=dtype), (X,)),
    "BatchNorm in evaluation": Layer(lambda dtype: nn.BatchNorm(use_running_average=True, dtype=dtype), (X,)),
    "BatchNorm reducing in half": Layer(
        lambda dtype: nn.BatchNorm(use_running_average=False, dtype=dtype, force_float32_reductions=False), (X,)
    ),
    "WeightNorm": Layer(lambda dtype: nn.WeightNorm(nn.Dense(5, dtype=dtype)), (X,)),
    "SpectralNorm": Layer(
        lambda dtype: nn.SpectralNorm(nn.Dense(5, dtype=dtype)), (X,), {"update_stats": True}
    ),
    "SpectralNorm in evaluation": Layer(
        lambda dtype: nn.SpectralNorm(nn.Conv(3, (2, 2), dtype=dtype)), (IMAGE,), {"update_stats": False}
    ),
}

_ATTENTION = {
    f"{kind.__name__}{ending}": layer
    for kind, queries in [(nn.MultiHeadDotProductAttention, 2), (nn.MultiHeadAttention, 2), (nn.SelfAttention, 1)]
    for ending, layer in {
        "": Layer(
            lambda dtype, kind=kind: kind(num_heads=2, dtype=dtype, attention_fn=attend, normalize_qk=True),
            (X,) * queries,
        ),
        " with a cache": Layer(
            lambda dtype, kind=kind: kind(num_heads=2, dtype=dtype, decode=True),
            (X[:, :1],) * queries,
            init_inputs=(X,) * queries,
        ),
    }.items()
}

_RECURRENT = {
    "SimpleCell": Layer(simple_cell, (CARRY, X)),
    "LSTMCell": Layer(lambda dtype: nn.LSTMCell(3, dtype=dtype), ((CARRY, CARRY), X)),
    "OptimizedLSTMCell": Layer(lambda dtype: nn.OptimizedLSTMCell(3, dtype=dtype), ((CARRY, CARRY), X)),
    "GRUCell": Layer(lambda dtype: nn.GRUCell(3, dtype=dtype), (CARRY, X)),
    "MGUCell": Layer(lambda dtype: nn.MGUCell(3, dtype=dtype), (CARRY, X)),
    "ConvLSTMCell": Layer(lambda dtype: nn.ConvLSTMCell(3, (2, 2), dtype=dtype), ((FRAMES, FRAMES), IMAGE)),
    "RNN of simple cells": Layer(lambda dtype: nn.RNN(simple_cell(dtype), return_carry=True), (X,)),
    "RNN of residual simple cells": Layer(
        lambda dtype: nn.RNN(simple_cell(dtype, residual=True), reverse=True, keep_order=True), (X,)
    ),
    "RNN of LSTM cells": Layer(lambda dtype: nn.RNN(nn.LSTMCell(3, dtype=dtype), return_carry=True), (X,)),
    "RNN of optimized LSTM cells": Layer(lambda dtype: nn.RNN(nn.OptimizedLSTMCell(3, dtype=dtype)), (X,)),
    "RNN of GRU cells": Layer(lambda dtype: nn.RNN(nn.GRUCell(3, dtype=dtype)), (X,)),
    "RNN of MGU cells": Layer(lambda dtype: nn.RNN(nn.MGUCell(3, dtype=dtype), time_major=True), (X,)),
    "RNN of ConvLSTM cells": Layer(lambda dtype: nn.RNN(nn.ConvLSTMCell(3, (2, 2), dtype=dtype)), (VIDEO,)),
    "RNN with lengths": Layer(
        lambda dtype: nn.RNN(simple_cell(dtype), return_carry=True), (X,), {"seq_lengths": LENGTHS}
    ),
    "RNN with a carry": Layer(
        lambda dtype: nn.RNN(simple_cell(dtype)), (X,), {"initial_carry": CARRY[:, 0]}
    ),
    "Bidirectional": Layer(
        lambda dtype: nn.Bidirectional(nn.RNN(nn.GRUCell(3, dtype=dtype)), nn.RNN(simple_cell(dtype))), (X,)
    ),
}

_FLOAT8 = {
    kind.__name__: Layer(
        lambda dtype, kind=kind: kind(), (X, KERNEL), method=lambda op, x, kernel: op(x, kernel, LAST_BY_FIRST)
    )
    for kind in (nn.Fp8DirectDotGeneralOp, nn.NANOOFp8DotGeneralOp)
}
_FLOAT8["Fp8Einsum"] = Layer(
    lambda dtype: nn.Fp8Einsum(), (X, KERNEL), method=lambda op, x, kernel: op("bta,ac->btc", x, kernel)
)

LAYERS = _LINEAR | _NORMS | _ATTENTION | _RECURRENT | _FLOAT8

EXEMPT = {
    "Module": "the base of all modules",
    "RNNCellBase": "the base of the recurrent cells",
    "Fp8DotGeneralOp": "Flax warns that it is deprecated; NANOOFp8DotGeneralOp is it in other formats",
}
"""Modules that Flax exports, and why the registry has no entry of theirs."""
