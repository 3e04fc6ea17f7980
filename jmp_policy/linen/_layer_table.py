"""The table of the layers of linen that multiply by a weight, and which of their functions a policy may replace."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from .._base import remember_weakly
from ..quant._layers import WeightedLayer, find_row, is_own
from ..quant._products import Einsum, label_einsum

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
    return value is None or is_own(value) or value is getattr(type(module), name, None)


def rewritten_by(module: nn.Module) -> str | None:
    """The method by which the author of a layer makes another weight of its parameter; `None` if there is none.

    That method takes and returns numbers, and is to have the same ones before and after the parameter is quantized.
    """
    if type(module).param is not nn.Module.param:
        return "param"
    is_table = isinstance(module, nn.Embed)
    return "setup" if is_table and inspect.unwrap(type(module).setup) is not inspect.unwrap(nn.Embed.setup) else None


def find_equation(module: nn.Einsum, einsum_str: str | None) -> str | None:
    """The equation of a call; `None` where there is not just one, of which Flax says what is wrong."""
    written_twice = module.einsum_str is not None and einsum_str is not None
    return None if written_twice else module.einsum_str or einsum_str


def find_bias_shape(module: nn.Einsum, equation: str, inputs: jax.Array) -> tuple[int, ...] | None:
    """The shape of its bias: the axes of its kernel that are in the result; `None` without one."""
    labels = label_einsum(inputs.ndim, len(module.shape), Einsum(equation))
    lengths = dict(zip(labels.right, module.shape, strict=True))
    return tuple(lengths[label] for label in labels.out if label in lengths) if module.use_bias else None


def compute_einsum(
    module: nn.Einsum, equation: str, inputs: jax.Array, kernel: Any, promote: Callable, multiply: Callable
) -> jax.Array:
    """What the module computes.

    Args:
      module: bound, whose method is running.
      equation: of the call.
      inputs: floating.
      kernel: its parameter.
      promote: as the module's `promote_dtype`.
      multiply: as `jnp.einsum`.
    """
    shape, bias = find_bias_shape(module, equation, inputs), None
    if shape is not None:
        bias = module.param("bias", module.bias_init, list(shape), module.param_dtype)
    labels = label_einsum(inputs.ndim, len(module.shape), Einsum(equation))
    lengths = dict(zip(labels.right, module.shape, strict=True))
    inputs, kernel, bias = promote(inputs, kernel, bias, dtype=module.dtype)
    options = {"precision": module.precision, "preferred_element_type": module.preferred_element_type}
    out = multiply(equation, inputs, kernel, **options)
    return out if bias is None else out + bias.reshape([lengths.get(label, 1) for label in labels.out])
