"""The table of the layers of linen that multiply by a weight, and which of their functions a policy may replace."""

import inspect

from flax import linen as nn

from .._memory import remember_weakly
from ..quant._float8_layer import Float8Multiply
from ..quant._layer import Multiply, Promote, WeightedLayer, find_row

LAYERS: dict[type, WeightedLayer] = {
    nn.Dense: WeightedLayer("kernel", "dot_general", field="dot_general"),
    nn.DenseGeneral: WeightedLayer("kernel", "dot_general", field="dot_general"),
    nn.Conv: WeightedLayer("kernel", "conv_general_dilated", field="conv_general_dilated"),
    nn.ConvLocal: WeightedLayer("kernel", "conv_general_dilated", field="conv_general_dilated"),
    nn.ConvTranspose: WeightedLayer("kernel"),
    nn.Einsum: WeightedLayer("kernel", "einsum"),
    nn.Embed: WeightedLayer("embedding"),
}
"""The layers whose weights a quantized policy knows; their subclasses have the same row."""


@remember_weakly
def layer_of(kind: type[nn.Module]) -> WeightedLayer | None:
    """The row of a class of layers; `None` if it is neither in the table nor derived from one that is."""
    return find_row(LAYERS, kind)


def open_layer(module: nn.Module) -> WeightedLayer | None:
    """The row of a layer with a field for its function, if its author left that and all places share its weight."""
    layer = layer_of(type(module))
    if layer is None or layer.field is None or not getattr(module, "shared_weights", True):
        return None
    return layer if all(is_default(module, name) for name in (layer.field, f"{layer.field}_cls")) else None


def is_default(module: nn.Module, name: str) -> bool:
    """Whether the author of a layer left a function in its fields as it was; what stands there may be ours."""
    value = getattr(module, name, None)
    is_ours = isinstance(value, Promote | Multiply | Float8Multiply)
    return value is None or is_ours or value is getattr(type(module), name, None)


def rewritten_by(module: nn.Module) -> str | None:
    """The method by which the author of a layer makes another weight of its parameter; `None` if there is none.

    That method takes and returns numbers, and is to have the same ones before and after the parameter is quantized.
    """
    if type(module).param is not nn.Module.param:
        return "param"
    is_table = isinstance(module, nn.Embed)
    return "setup" if is_table and inspect.unwrap(type(module).setup) is not inspect.unwrap(nn.Embed.setup) else None
