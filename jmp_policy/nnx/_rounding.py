"""The keys by which nnx's layers round gradients at random."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from .._base import remember_on_class
from ..modules.common import make_subclass
from ..policy import Quantization
from ..quant._layers import Multiply, MultiplyWide, read_narrow
from ..quant._products import ROUNDING
from ._layer_table import find_layer
from ._shadow import Attributes

_PAUSED = "deterministic"
"""The attribute that `model.eval()` sets and `model.train()` clears, as of `nnx.Dropout`."""


def set_rounding(model: nnx.Module, rngs: nnx.Rngs | nnx.RngStream | None) -> None:
    """Gives each layer that rounds gradients at random a stream of keys of its own, as `nnx.Dropout` has one.

    The streams are state of the model: the attribute `rounding` of layers, whose count grows with each call. They are
    in `nnx.state` and in checkpoints; `nnx.split_rngs(..., only="rounding")` splits them for `nnx.vmap` and `nnx.scan`,
    and `nnx.reseed(model, rounding=0)` starts anew. After `model.eval()` no keys are drawn, until `model.train()`: what
    is not differentiated needs none. A policy that is attached again finds the streams there.

    Args:
      model: a model with a policy such as `"nvfp4(stochastic_rounding=true)_from_mixed_bfloat16"`. It is changed.
      rngs: what to fork the streams from: its stream `rounding`, or `default`. `None` takes streams away.

    Raises:
      ValueError: no layer of the model rounds at random.

    >>> import jax, jmp_policy as jmp
    >>> from flax import nnx
    >>> policy = "nvfp4(stochastic_rounding=true)_from_mixed_bfloat16"
    >>> model = jmp.with_policy(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), policy)
    >>> jmp.nnx.set_rounding(model, nnx.Rngs(rounding=1))
    >>> out = model(jax.numpy.ones((16, 64)))
    >>> model.rounding.count[...].item()
    1
    """
    layers = [module for _, module in nnx.iter_modules(model) if find_rounding_field(type(module)) is not None]
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


def draws_keys(base: type, attributes: Attributes, quantization: Quantization | None) -> bool:
    """Whether a layer with the attributes that a policy gives it multiplies with noise."""
    layer = find_layer(base)
    return layer is not None and layer.field in attributes and layer.draws_noise(quantization)


@remember_on_class
def make_rounding_layer(base: type[nnx.Module]) -> type[nnx.Module]:
    """A subclass of a layer whose products draw from the stream of the layer that is called; one for equal classes."""
    layer = find_layer(base)
    assert layer is not None
    assert layer.field is not None
    name = layer.field

    def multiply(self: nnx.Module) -> Callable[..., Any]:
        function = vars(self)[name]
        own = read_narrow(function)
        if not isinstance(own, Multiply):
            return function
        own = dataclasses.replace(own, key=lambda: _draw_key(self))
        return dataclasses.replace(function, own=own) if isinstance(function, MultiplyWide) else own

    def keep(self: nnx.Module, function: Callable[..., Any]) -> None:  # when nnx makes the layer again out of its parts
        vars(self)[name] = function

    namespace = {name: property(multiply, keep), _FIELD: name}
    return make_subclass(base, namespace, (make_rounding_layer, (base,)))


_FIELD = "_jmp_rounding_field"


def find_rounding_field(kind: type) -> str | None:
    """The attribute with the function by which a class of layers multiplies with noise; `None` if it has none."""
    return getattr(kind, _FIELD, None)


def draw_nothing() -> None:
    """The key of a layer that no stream was given to."""


def _draw_key(layer: nnx.Module) -> jax.Array | None:
    stream = vars(layer).get(ROUNDING)
    return None if stream is None or getattr(layer, _PAUSED, False) else stream()
