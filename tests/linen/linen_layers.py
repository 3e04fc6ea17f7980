"""The registry of linen layers: each is made with a dtype, and takes these inputs. A law holds for every entry."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn


def _attend(query, key, value, **_):
    """float16 attention that XLA's CPU backend can compile: products in the inputs' dtype, and no more."""
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", query, key))
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


class Layer(NamedTuple):
    make: Callable[..., nn.Module]  # (dtype) -> module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never changed


X = jnp.linspace(-2.0, 2.0, 24).reshape(2, 3, 4)
IMAGE = jnp.linspace(-2.0, 2.0, 2 * 4 * 4 * 2).reshape(2, 4, 4, 2)
TOKENS = jnp.arange(6).reshape(2, 3)

LAYERS = {
    "Dense": Layer(lambda dtype: nn.Dense(5, dtype=dtype), (X,)),
    "DenseGeneral": Layer(lambda dtype: nn.DenseGeneral((2, 3), axis=(-2, -1), dtype=dtype), (X,)),
    "Einsum": Layer(lambda dtype: nn.Einsum((4, 5), "...a,ab->...b", dtype=dtype), (X,)),
    "Conv": Layer(lambda dtype: nn.Conv(3, (3, 3), dtype=dtype), (IMAGE,)),
    "ConvTranspose": Layer(lambda dtype: nn.ConvTranspose(3, (2, 2), dtype=dtype), (IMAGE,)),
    "Embed": Layer(lambda dtype: nn.Embed(7, 4, dtype=dtype), (TOKENS,)),
    "LayerNorm": Layer(lambda dtype: nn.LayerNorm(dtype=dtype), (X,)),
    "RMSNorm": Layer(lambda dtype: nn.RMSNorm(dtype=dtype), (X,)),
    "GroupNorm": Layer(lambda dtype: nn.GroupNorm(num_groups=2, dtype=dtype), (X,)),
    "BatchNorm": Layer(lambda dtype: nn.BatchNorm(use_running_average=False, dtype=dtype), (X,)),
    "BatchNorm in evaluation": Layer(lambda dtype: nn.BatchNorm(use_running_average=True, dtype=dtype), (X,)),
    "MultiHeadDotProductAttention": Layer(
        lambda dtype: nn.MultiHeadDotProductAttention(num_heads=2, dtype=dtype, attention_fn=_attend), (X, X)
    ),
    "Dropout": Layer(lambda dtype: nn.Dropout(0.5), (X,), {"deterministic": False}),
    "Sequential": Layer(
        lambda dtype: nn.Sequential([nn.Dense(3, dtype=dtype), nn.relu, nn.Dense(2, dtype=dtype)]), (X,)
    ),
    "RNN of LSTM cells": Layer(lambda dtype: nn.RNN(nn.OptimizedLSTMCell(3, dtype=dtype)), (X,)),
}
