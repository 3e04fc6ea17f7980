"""The nnx layers that multiply by a weight."""

import functools
import inspect
from typing import Any, NamedTuple

from flax import nnx

from .._base import remember_weakly
from ..quant._layers import WeightedLayer, find_row
from ..quant._products import label_einsum
from ..quant._weights import Layout, kernel_layout, table_layout
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


find_layer = remember_weakly(functools.partial(find_row, LAYERS))
"""Returns the row of a class of layers, or `None`."""


class LayerWeight(NamedTuple):
    """The weight of a Flax layer: the row of the layer, the value in its Variable, and its layout."""

    layer: WeightedLayer
    value: Any
    layout: Layout


def find_weight(base: type, attributes: Attributes) -> LayerWeight | None:
    """Returns the weight of a Flax layer if it has two or more axes, else `None`."""
    layer = find_layer(base)
    variable = attributes.get(layer.weight) if layer else None
    value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
    shape = getattr(value, "shape", ())
    if layer is None or layer.layout is None or len(shape) < 2:
        return None
    return LayerWeight(layer, value, layer.layout(attributes, shape))


DEFAULT_PROMOTE = inspect.signature(nnx.Linear.__init__).parameters["promote_dtype"].default
"""The default `promote_dtype` of layers."""
