"""PRNG keys for stochastic rounding in nnx layers."""

from typing import Any

import jax
from flax import nnx

from ..quant._layers import Multiply
from ..quant._products import ROUNDING
from ._layer_table import find_layer

_PAUSED = "deterministic"
"""The attribute that `model.eval()` sets and `model.train()` clears, as in `nnx.Dropout`."""


def set_rounding_rngs(model: nnx.Module, rngs: nnx.Rngs | nnx.RngStream | None) -> None:
    """Gives each layer with stochastic rounding its own stream of keys, as `nnx.Dropout` has one.

    The streams are state of the model: the attribute `rounding` of layers, whose count grows with each call. They are
    in `nnx.state` and in checkpoints. `nnx.split_rngs(..., only="rounding")` splits them for `nnx.vmap` and `nnx.scan`,
    and `nnx.reseed(model, rounding=0)` restarts them. After `model.eval()` no keys are drawn, until `model.train()`.
    The streams stay when a policy is attached again.

    Args:
      model: a model with a policy such as `"nvfp4(stochastic_rounding=true)_from_mixed_bfloat16"`; changed in place.
      rngs: the source to fork the streams from: its stream `rounding`, or `default`. `None` removes the streams.

    Raises:
      ValueError: no layer of the model uses stochastic rounding.

    >>> import jax, jmp_policy as jmp
    >>> from flax import nnx
    >>> policy = "nvfp4(stochastic_rounding=true)_from_mixed_bfloat16"
    >>> model = jmp.with_policy(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), policy)
    >>> jmp.nnx.set_rounding_rngs(model, nnx.Rngs(rounding=1))
    >>> out = model(jax.numpy.ones((16, 64)))
    >>> model.rounding.count[...].item()
    1
    """
    layers = [module for _, module in nnx.iter_modules(model) if _rounds_at_random(module)]
    if not layers:
        raise ValueError(
            "No layer of the model rounds at random. Give it such a policy first: "
            "with_policy(model, 'nvfp4(stochastic_rounding=true)_from_mixed_bfloat16')."
        )
    for layer in layers:
        if rngs is not None:
            stream: Any = rngs if isinstance(rngs, nnx.RngStream) else rngs[ROUNDING]
            setattr(layer, ROUNDING, stream.fork())
            setattr(layer, _PAUSED, getattr(layer, _PAUSED, False))
        elif ROUNDING in vars(layer):
            delattr(layer, ROUNDING)


def _rounds_at_random(module: Any) -> bool:
    layer = find_layer(type(module))
    function = vars(module).get(layer.field) if layer is not None and layer.field is not None else None
    return layer is not None and isinstance(function, Multiply) and layer.needs_rng(function.product.format)


def draw_key(layer: nnx.Module) -> jax.Array | None:
    """Draws a key from the stream of a layer, or returns `None` without a stream or after `model.eval()`."""
    stream = vars(layer).get(ROUNDING)
    return None if stream is None or getattr(layer, _PAUSED, False) else stream()
