"""The nnx layers that multiply by a weight, and their keys for stochastic rounding."""

import functools
import inspect
from typing import Any

import jax
from flax import nnx

from .._base import remember_weakly
from ..quant import (
    ROUNDING,
    LayerFacts,
    Layout,
    Multiply,
    WeightedLayer,
    find_layer_row,
    kernel_layout,
    label_einsum,
    table_layout,
)
from ._shadow import Attributes

Shape = tuple[int, ...]


def _linear_general(attributes: Attributes, shape: Shape) -> Layout:
    channels = len(attributes["out_features"])
    last = len(shape) - channels
    return Layout(shape[last - len(attributes["in_features"]) : last], channels)


def _convolution(attributes: Attributes, shape: Shape) -> Layout:
    return Layout(shape[len(shape) - len(attributes["kernel_shape"]) : -1], 1)


def _einsum(attributes: Attributes, shape: Shape) -> Layout:
    """Contracts all axes from the first that the equation sums over to the last; if unknown, all but the channels."""
    equation, own = attributes["einsum_str"], shape[len(shape) - len(attributes["kernel_shape"]) :]
    if equation is None or "..." in equation.partition("->")[0].split(",")[1]:
        return kernel_layout(own)
    left = equation.partition(",")[0].replace("...", "")
    labels = label_einsum(len(left), len(own), equation)
    summed = labels.summed_axes(labels.right)
    return Layout(own[summed[0] : summed[-1] + 1], len(own) - 1 - summed[-1]) if summed else kernel_layout(own)


LAYERS: dict[type, WeightedLayer] = {
    nnx.Linear: WeightedLayer("kernel", "dot_general", "dot_general", lambda _, shape: Layout(shape[-2:-1], 1)),
    nnx.LinearGeneral: WeightedLayer("kernel", "dot_general", "dot_general", _linear_general),
    nnx.Einsum: WeightedLayer("kernel", "einsum", "einsum_op", _einsum),
    nnx.Conv: WeightedLayer("kernel", "conv_general_dilated", "conv_general_dilated", _convolution),
    nnx.ConvTranspose: WeightedLayer("kernel", layout=_convolution),
    nnx.Embed: WeightedLayer("embedding", layout=lambda _, shape: table_layout(shape)),
}
"""Subclasses of a layer have the same row."""


find_layer = remember_weakly(functools.partial(find_layer_row, LAYERS))
"""Returns the row of a class of layers, or `None`."""


DEFAULT_PROMOTE = inspect.signature(nnx.Linear.__init__).parameters["promote_dtype"].default
"""The default `promote_dtype` of layers."""

WRITTEN = "its author wrote the functions that it computes with"


def read_layer(base: type, attributes: Attributes) -> LayerFacts:
    """Gathers the facts about a layer; `attributes` are those of its author."""
    layer, promotes = find_layer(base), attributes.get("promote_dtype") is DEFAULT_PROMOTE
    is_made = "promote_dtype" in attributes  # the `__init__` of a subclass may not call that of the layer
    if layer is None or not is_made:
        return LayerFacts(are_sums_open=promotes and issubclass(base, nnx.LoRA))
    variable = attributes.get(layer.weight)
    weight = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
    shape = getattr(weight, "shape", ())
    has_weight = layer.layout is not None and len(shape) > 1
    function = None if layer.field is None else attributes[layer.field]
    is_open = attributes.get("dot_general_cls") is None and (function is None or function is layer.default)
    sums_in = attributes.get("preferred_element_type")
    has_sums = layer.field is not None or issubclass(base, nnx.Embed)
    return LayerFacts(
        layer=layer,
        weight=weight if has_weight else None,
        layout=layer.layout(attributes, shape) if layer.layout is not None and has_weight else None,
        groups=attributes.get("feature_group_count", 1),
        is_matmul_open=is_open and layer.field is not None,
        are_sums_open=is_open and promotes and has_sums and sums_in is None,
        why_floating=None if is_open and promotes else WRITTEN,
    )


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
