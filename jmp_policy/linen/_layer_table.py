"""The linen layers that multiply by a weight, and which of their functions a policy may replace."""

import functools
import inspect

from flax import linen as nn

from .._base import remember_weakly
from ..quant import WeightedLayer, find_layer_row, is_own

LAYERS: dict[type, WeightedLayer] = {
    nn.Dense: WeightedLayer("kernel", "dot_general", field="dot_general"),
    nn.DenseGeneral: WeightedLayer("kernel", "dot_general", field="dot_general"),
    nn.Conv: WeightedLayer("kernel", "conv_general_dilated", field="conv_general_dilated"),
    nn.ConvLocal: WeightedLayer("kernel", "conv_general_dilated", field="conv_general_dilated"),
    nn.ConvTranspose: WeightedLayer("kernel"),
    nn.Einsum: WeightedLayer("kernel", "einsum"),
    nn.Embed: WeightedLayer("embedding"),
}
"""Subclasses of a layer have the same row."""


layer_of = remember_weakly(functools.partial(find_layer_row, LAYERS))
"""Returns the row of a class of layers, or `None`."""


def open_layer(module: nn.Module) -> WeightedLayer | None:
    """Returns the row of a layer whose matmul is in a field that its author left at the default, or `None`."""
    layer = layer_of(type(module))
    if layer is None or layer.field is None or not getattr(module, "shared_weights", True):
        return None
    return layer if all(is_default(module, name) for name in (layer.field, f"{layer.field}_cls")) else None


def is_default(module: nn.Module, name: str) -> bool:
    """True if the author of a layer left a field with a function at its default. A policy may have replaced it."""
    value = getattr(module, name, None)
    return value is None or is_own(value) or value is getattr(type(module), name, None)


def rewritten_by(module: nn.Module) -> str | None:
    """Returns the name of the author's method that computes the weight from floating parameters, or `None`."""
    if type(module).param is not nn.Module.param:
        return "param"
    is_table = isinstance(module, nn.Embed)
    return "setup" if is_table and inspect.unwrap(type(module).setup) is not inspect.unwrap(nn.Embed.setup) else None


def is_promotion_open(module: nn.Module) -> bool:
    """True if the author left to Flax how a layer promotes its operands, and how its weight is made."""
    return is_default(module, "promote_dtype") and not rewritten_by(module)


def are_sums_open(module: nn.Module) -> bool:
    """True if the author of a layer left to Flax how it promotes its operands, and the output dtype of its matmul."""
    return getattr(module, "preferred_element_type", None) is None and is_promotion_open(module)
