"""The registry of linen layers: each is made with a dtype, and takes these inputs. A law holds for every entry."""

import functools
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


def cell(kind, **dtypes):
    """A recurrent cell; by hand, its initializer is one that can draw in half precision, unlike the orthogonal one."""
    drawn_in_half = {"recurrent_kernel_init": nn.initializers.lecun_normal()} if "param_dtype" in dtypes else {}
    return kind(3, **drawn_in_half, **dtypes)


def simple_cell(*, residual=False, **dtypes):
    """A SimpleCell, and by hand the one of an expert."""
    return cell(functools.partial(SteadyCell if dtypes else nn.SimpleCell, residual=residual), **dtypes)


def wrapped(wrapper, layer):
    """A wrapper that stores the weights of a layer as that does; its own `dtype` is not for a computation."""
    return wrapper(layer, param_dtype=layer.param_dtype)


class Layer(NamedTuple):
    make: Callable[..., nn.Module]  # (dtype=, param_dtype=) -> module; without any for a policy, or by hand
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
    "Dense": Layer(lambda **dtypes: nn.Dense(5, **dtypes), (X,)),
    "Dense in float8": Layer(lambda **dtypes: nn.Dense(5, dot_general_cls=nn.Fp8DirectDotGeneralOp, **dtypes), (X,)),
    "DenseGeneral": Layer(lambda **dtypes: nn.DenseGeneral((2, 3), axis=(-2, -1), **dtypes), (X,)),
    "Einsum": Layer(lambda **dtypes: nn.Einsum((4, 5), "...a,ab->...b", **dtypes), (X,)),
    "Conv": Layer(lambda **dtypes: nn.Conv(3, (3, 3), **dtypes), (IMAGE,)),
    "ConvLocal": Layer(lambda **dtypes: nn.ConvLocal(3, (3, 3), **dtypes), (IMAGE,)),
    "ConvTranspose": Layer(lambda **dtypes: nn.ConvTranspose(3, (2, 2), **dtypes), (IMAGE,)),
    "Embed": Layer(lambda **dtypes: nn.Embed(7, 4, **dtypes), (TOKENS,)),
    "Embed, attended to": Layer(
        lambda **dtypes: nn.Embed(7, 4, **dtypes), (X,), method="attend", init_inputs=(TOKENS,)
    ),
    "PReLU": Layer(lambda dtype=None, **dtypes: nn.PReLU(**dtypes), (X,)),
    "Dropout": Layer(lambda **dtypes: nn.Dropout(0.5), (X,), {"deterministic": False}),
    "Sequential": Layer(lambda **dtypes: nn.Sequential([nn.Dense(3, **dtypes), nn.relu, nn.Dense(2, **dtypes)]), (X,)),
}

_NORMS = {
    "LayerNorm": Layer(lambda **dtypes: nn.LayerNorm(**dtypes), (X,)),
    "RMSNorm": Layer(lambda **dtypes: nn.RMSNorm(**dtypes), (X,)),
    "GroupNorm": Layer(lambda **dtypes: nn.GroupNorm(num_groups=2, **dtypes), (X,)),
    "InstanceNorm": Layer(lambda **dtypes: nn.InstanceNorm(**dtypes), (IMAGE,)),
    "BatchNorm": Layer(lambda **dtypes: nn.BatchNorm(use_running_average=False, **dtypes), (X,)),
    "BatchNorm in evaluation": Layer(lambda **dtypes: nn.BatchNorm(use_running_average=True, **dtypes), (X,)),
    "BatchNorm reducing in half": Layer(
        lambda **dtypes: nn.BatchNorm(use_running_average=False, force_float32_reductions=False, **dtypes), (X,)
    ),
    "WeightNorm": Layer(lambda **dtypes: wrapped(nn.WeightNorm, nn.Dense(5, **dtypes)), (X,)),
    "SpectralNorm": Layer(
        lambda **dtypes: wrapped(nn.SpectralNorm, nn.Dense(5, **dtypes)), (X,), {"update_stats": True}
    ),
    "SpectralNorm in evaluation": Layer(
        lambda **dtypes: wrapped(nn.SpectralNorm, nn.Conv(3, (2, 2), **dtypes)), (IMAGE,), {"update_stats": False}
    ),
}

_ATTENTION = {
    f"{kind.__name__}{ending}": layer
    for kind, queries in [(nn.MultiHeadDotProductAttention, 2), (nn.MultiHeadAttention, 2), (nn.SelfAttention, 1)]
    for ending, layer in {
        "": Layer(
            lambda kind=kind, **dtypes: kind(num_heads=2, attention_fn=attend, normalize_qk=True, **dtypes),
            (X,) * queries,
        ),
        " with a cache": Layer(
            lambda kind=kind, **dtypes: kind(num_heads=2, decode=True, **dtypes),
            (X[:, :1],) * queries,
            init_inputs=(X,) * queries,
        ),
    }.items()
}

_RECURRENT = {
    "SimpleCell": Layer(simple_cell, (CARRY, X)),
    "LSTMCell": Layer(lambda **dtypes: cell(nn.LSTMCell, **dtypes), ((CARRY, CARRY), X)),
    "OptimizedLSTMCell": Layer(lambda **dtypes: cell(nn.OptimizedLSTMCell, **dtypes), ((CARRY, CARRY), X)),
    "GRUCell": Layer(lambda **dtypes: cell(nn.GRUCell, **dtypes), (CARRY, X)),
    "MGUCell": Layer(lambda **dtypes: cell(nn.MGUCell, **dtypes), (CARRY, X)),
    "ConvLSTMCell": Layer(lambda **dtypes: nn.ConvLSTMCell(3, (2, 2), **dtypes), ((FRAMES, FRAMES), IMAGE)),
    "RNN of simple cells": Layer(lambda **dtypes: nn.RNN(simple_cell(**dtypes), return_carry=True), (X,)),
    "RNN of residual simple cells": Layer(
        lambda **dtypes: nn.RNN(simple_cell(residual=True, **dtypes), reverse=True, keep_order=True), (X,)
    ),
    "RNN of LSTM cells": Layer(lambda **dtypes: nn.RNN(cell(nn.LSTMCell, **dtypes), return_carry=True), (X,)),
    "RNN of optimized LSTM cells": Layer(lambda **dtypes: nn.RNN(cell(nn.OptimizedLSTMCell, **dtypes)), (X,)),
    "RNN of GRU cells": Layer(lambda **dtypes: nn.RNN(cell(nn.GRUCell, **dtypes)), (X,)),
    "RNN of MGU cells": Layer(lambda **dtypes: nn.RNN(cell(nn.MGUCell, **dtypes), time_major=True), (X,)),
    "RNN of ConvLSTM cells": Layer(lambda **dtypes: nn.RNN(nn.ConvLSTMCell(3, (2, 2), **dtypes)), (VIDEO,)),
    "RNN with lengths": Layer(
        lambda **dtypes: nn.RNN(simple_cell(**dtypes), return_carry=True), (X,), {"seq_lengths": LENGTHS}
    ),
    "RNN with a carry": Layer(lambda **dtypes: nn.RNN(simple_cell(**dtypes)), (X,), {"initial_carry": CARRY[:, 0]}),
    "Bidirectional": Layer(
        lambda **dtypes: nn.Bidirectional(nn.RNN(cell(nn.GRUCell, **dtypes)), nn.RNN(simple_cell(**dtypes))), (X,)
    ),
}

_FLOAT8 = {
    kind.__name__: Layer(
        lambda kind=kind, **dtypes: kind(), (X, KERNEL), method=lambda op, x, kernel: op(x, kernel, LAST_BY_FIRST)
    )
    for kind in (nn.Fp8DirectDotGeneralOp, nn.NANOOFp8DotGeneralOp)
}
_FLOAT8["Fp8Einsum"] = Layer(
    lambda **dtypes: nn.Fp8Einsum(), (X, KERNEL), method=lambda op, x, kernel: op("bta,ac->btc", x, kernel)
)

LAYERS = _LINEAR | _NORMS | _ATTENTION | _RECURRENT | _FLOAT8

EXEMPT = {
    "Module": "the base of all modules",
    "RNNCellBase": "the base of the recurrent cells",
    "Fp8DotGeneralOp": "Flax warns that it is deprecated; NANOOFp8DotGeneralOp is it in other formats",
}
"""Modules that Flax exports, and why the registry has no entry of theirs."""
