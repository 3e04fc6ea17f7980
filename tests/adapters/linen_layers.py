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


def layer(kind, *args, inputs=(X,), kwargs=None, **options):
    """A layer that takes its dtypes as keywords, as most do."""
    return Layer(lambda **dtypes: kind(*args, **options, **dtypes), inputs, kwargs or {})


def rnn(make_cell, kwargs=None, inputs=(X,), **options):
    return Layer(lambda **dtypes: nn.RNN(make_cell(**dtypes), **options), inputs, kwargs or {})


lstm, gru = functools.partial(cell, nn.LSTMCell), functools.partial(cell, nn.GRUCell)

LAYERS = {
    "Dense": layer(nn.Dense, 5),
    "Dense in float8": layer(nn.Dense, 5, dot_general_cls=nn.Fp8DirectDotGeneralOp),
    "DenseGeneral": layer(nn.DenseGeneral, (2, 3), axis=(-2, -1)),
    "Einsum": layer(nn.Einsum, (4, 5), "...a,ab->...b"),
    "Conv": layer(nn.Conv, 3, (3, 3), inputs=(IMAGE,)),
    "ConvLocal": layer(nn.ConvLocal, 3, (3, 3), inputs=(IMAGE,)),
    "ConvTranspose": layer(nn.ConvTranspose, 3, (2, 2), inputs=(IMAGE,)),
    "Embed": layer(nn.Embed, 7, 4, inputs=(TOKENS,)),
    "Embed, attended to": layer(nn.Embed, 7, 4)._replace(method="attend", init_inputs=(TOKENS,)),
    "PReLU": Layer(lambda dtype=None, **dtypes: nn.PReLU(**dtypes), (X,)),
    "Dropout": Layer(lambda **dtypes: nn.Dropout(0.5), (X,), {"deterministic": False}),
    "Sequential": Layer(lambda **dtypes: nn.Sequential([nn.Dense(3, **dtypes), nn.relu, nn.Dense(2, **dtypes)]), (X,)),
    "LayerNorm": layer(nn.LayerNorm),
    "RMSNorm": layer(nn.RMSNorm),
    "GroupNorm": layer(nn.GroupNorm, num_groups=2),
    "InstanceNorm": layer(nn.InstanceNorm, inputs=(IMAGE,)),
    "BatchNorm": layer(nn.BatchNorm, use_running_average=False),
    "BatchNorm in evaluation": layer(nn.BatchNorm, use_running_average=True),
    "BatchNorm reducing in half": layer(nn.BatchNorm, use_running_average=False, force_float32_reductions=False),
    "WeightNorm": Layer(lambda **dtypes: wrapped(nn.WeightNorm, nn.Dense(5, **dtypes)), (X,)),
    "SpectralNorm": Layer(
        lambda **dtypes: wrapped(nn.SpectralNorm, nn.Conv(3, (2, 2), **dtypes)), (IMAGE,), {"update_stats": True}
    ),
}
for _kind, _queries in [(nn.MultiHeadDotProductAttention, 2), (nn.MultiHeadAttention, 2), (nn.SelfAttention, 1)]:
    _layer = layer(_kind, num_heads=2, attention_fn=attend, normalize_qk=True, inputs=(X,) * _queries)
    _cached = layer(_kind, num_heads=2, decode=True, inputs=(X[:, :1],) * _queries)
    LAYERS |= {_kind.__name__: _layer, f"{_kind.__name__} with a cache": _cached._replace(init_inputs=(X,) * _queries)}
LAYERS |= {
    "SimpleCell": Layer(simple_cell, (CARRY, X)),
    "LSTMCell": Layer(lstm, ((CARRY, CARRY), X)),
    "OptimizedLSTMCell": Layer(functools.partial(cell, nn.OptimizedLSTMCell), ((CARRY, CARRY), X)),
    "GRUCell": Layer(gru, (CARRY, X)),
    "MGUCell": Layer(functools.partial(cell, nn.MGUCell), (CARRY, X)),
    "ConvLSTMCell": layer(nn.ConvLSTMCell, 3, (2, 2), inputs=((FRAMES, FRAMES), IMAGE)),
    "RNN of residual simple cells": rnn(functools.partial(simple_cell, residual=True), reverse=True, keep_order=True),
    "RNN of LSTM cells": rnn(lstm, return_carry=True, time_major=True),
    "RNN of ConvLSTM cells": rnn(lambda **dtypes: nn.ConvLSTMCell(3, (2, 2), **dtypes), inputs=(VIDEO,)),
    "RNN with lengths": rnn(simple_cell, {"seq_lengths": LENGTHS}, return_carry=True),
    "RNN with a carry": rnn(simple_cell, {"initial_carry": CARRY[:, 0]}),
    "Bidirectional": Layer(
        lambda **dtypes: nn.Bidirectional(nn.RNN(gru(**dtypes)), nn.RNN(simple_cell(**dtypes))), (X,)
    ),
    "Fp8Einsum": Layer(
        lambda **dtypes: nn.Fp8Einsum(), (X, KERNEL), method=lambda op, x, kernel: op("bta,ac->btc", x, kernel)
    ),
}
for _kind in (nn.Fp8DirectDotGeneralOp, nn.NANOOFp8DotGeneralOp):
    multiply = lambda op, x, kernel: op(x, kernel, (((2,), (0,)), ((), ())))
    LAYERS[_kind.__name__] = Layer(lambda kind=_kind, **dtypes: kind(), (X, KERNEL), method=multiply)

EXEMPT = {
    "Module": "the base of all modules",
    "RNNCellBase": "the base of the recurrent cells",
    "Fp8DotGeneralOp": "Flax warns that it is deprecated; NANOOFp8DotGeneralOp is it in other formats",
}
"""Modules that Flax exports, and why the registry has no entry of theirs."""
