"""The table of the layers of nnx that multiply by a weight, and the weights of layers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from .._base import remember_weakly
from ..quant._layers import PromoteRounded, WeightedLayer, find_row, read_narrow
from ..quant._products import Einsum, label_einsum
from ..quant._weights import Layout, kernel_layout, table_layout
from ._quantized_embed import PromoteTable
from ._shadow import Attributes

Shape = tuple[int, ...]


class LayerWeight(NamedTuple):
    """The weight of a layer of Flax's.

    Attributes:
      value: what its Variable holds.
      layout: which of its axes are summed over.
    """

    value: Any
    layout: Layout


def find_weight(base: type, attributes: Attributes) -> LayerWeight | None:
    """The weight of two or more axes of a layer of Flax's; `None` if there is none."""
    layer = find_layer(base)
    variable = attributes.get(layer.weight) if layer else None
    value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
    shape = getattr(value, "shape", ())
    if layer is None or layer.layout is None or len(shape) < 2:
        return None
    return LayerWeight(value, layer.layout(attributes, shape))


def weight_name(base: type) -> str:
    """The attribute that holds the weight of a layer of Flax's."""
    layer = find_layer(base)
    assert layer is not None
    return layer.weight


def find_open_field(base: type, attributes: Attributes) -> str | None:
    """The attribute that holds the function a layer multiplies with, if its author left that at its default."""
    layer = find_layer(base)
    if layer is None or layer.field not in attributes or attributes.get("dot_general_cls") is not None:
        return None
    function = read_narrow(attributes[layer.field])
    return layer.field if function is None or function is layer.default else None


def _linear(attributes: Attributes, shape: Shape) -> Layout:
    return Layout(shape[-2:-1], 1)


def _linear_general(attributes: Attributes, shape: Shape) -> Layout:
    channels = len(attributes["out_features"])
    last = len(shape) - channels
    return Layout(shape[last - len(attributes["in_features"]) : last], channels)


def _convolution(attributes: Attributes, shape: Shape) -> Layout:
    return Layout(shape[len(shape) - len(attributes["kernel_shape"]) : -1], 1)


def _einsum(attributes: Attributes, shape: Shape) -> Layout:
    """All axes from the first that the equation sums over to the last; all but the channels, where that is open."""
    equation, own = attributes["einsum_str"], shape[len(shape) - len(attributes["kernel_shape"]) :]
    if equation is None or "..." in equation.partition("->")[0].split(",")[1]:
        return kernel_layout(own)
    left = equation.partition(",")[0].replace("...", "")
    labels = label_einsum(len(left), len(own), Einsum(equation))
    summed = labels.summed_axes(labels.right)
    return Layout(own[summed[0] : summed[-1] + 1], len(own) - 1 - summed[-1]) if summed else kernel_layout(own)


def _table(attributes: Attributes, shape: Shape) -> Layout:
    return table_layout(shape)


LAYERS: dict[type, WeightedLayer] = {
    nnx.Linear: WeightedLayer("kernel", "dot_general", "dot_general", _linear),
    nnx.LinearGeneral: WeightedLayer("kernel", "dot_general", "dot_general", _linear_general),
    nnx.Einsum: WeightedLayer("kernel", "einsum", "einsum_op", _einsum),
    nnx.Conv: WeightedLayer("kernel", "conv_general_dilated", "conv_general_dilated", _convolution),
    nnx.ConvTranspose: WeightedLayer("kernel", layout=_convolution, promote=PromoteRounded),
    nnx.Embed: WeightedLayer("embedding", layout=_table, promote=PromoteTable),
}
"""The layers whose weights a quantized policy knows; their subclasses have the same row."""


@remember_weakly
def find_layer(base: type) -> WeightedLayer | None:
    """The row of a class of layers; `None` if it is neither in the table nor derived from one that is."""
    return find_row(LAYERS, base)


@functools.cache
def default_promote() -> Callable[..., Any]:
    """The `promote_dtype` of layers whose author wrote none."""
    return inspect.signature(nnx.Linear.__init__).parameters["promote_dtype"].default
