"""The plan of one layer: what a policy does to its weight, its matmul and its sums, and the reason for `explain`."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from ...policy import BlockFormat, Float8, Int4, Policy, StoredFormat
from .._products import why_sizes_wide
from .._weights import WHY_TABLES_WIDE, Layout, QuantizedArray, choose_format, layer_size, reason_unquantized
from ._layer import WeightedLayer

WHY_AS_NUMBERS = "no policy can replace the function that it multiplies by"


@dataclasses.dataclass(frozen=True, eq=False)
class LayerFacts:
    """Facts about one layer, which its adapter gathers once."""

    layer: WeightedLayer | None = None  # its row in the table of the adapter, or `None`
    weight: Any = None  # the value of its weight, if that has two or more axes
    layout: Layout | None = None  # of the weight
    groups: int = 1  # of a convolution
    is_matmul_open: bool = False  # true if a policy may replace its matmul: its author left it to Flax
    are_sums_open: bool = False  # true if a policy may change the output dtype of its matmul
    why_floating: str | None = None  # the reason why its weight cannot be stored in 8 or 4 bits


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What a policy does to one layer."""

    format: StoredFormat | Float8 | None = None  # the format in which it multiplies by its weight, or `None`
    accumulate: np.dtype | None = None  # the dtype in which it returns the sums of its matmul, or `None`
    quantization: str = ""  # the treatment of its weight, for `Row.quantization`


def plan_layer(facts: LayerFacts, policy: Policy) -> LayerPlan:
    """Decides what a policy does to a layer."""
    accumulate = find_accumulate_dtype(policy, policy.compute_dtype) if facts.are_sums_open else None
    format = policy.quantization
    if format is None or facts.weight is None or facts.layout is None:
        return LayerPlan(None, accumulate)
    left = _why_unquantized(facts, facts.layout, format)
    if left is not None:
        return LayerPlan(None, accumulate, f"left: {left}")
    if isinstance(format, Float8):
        return LayerPlan(format, accumulate, str(format))
    layer = facts.layer
    is_fixed = layer is not None and layer.operation is None and layer.weight == "kernel"
    text = spell_format(choose_format(format, facts.layout), layer, WHY_AS_NUMBERS if is_fixed else None)
    return LayerPlan(format, accumulate, text)


def _why_unquantized(facts: LayerFacts, layout: Layout, format: StoredFormat | Float8) -> str | None:
    """Returns the reason why a layer does not multiply by a quantized weight, or `None`."""
    shape = facts.weight.shape
    if isinstance(format, Float8):
        is_open, groups = facts.is_matmul_open, facts.groups
        return why_layer_wide(facts.layer, shape, layout, format, is_open=is_open, groups=groups)
    left = None if isinstance(facts.weight, QuantizedArray) else reason_unquantized(shape, layout, format)
    return left or facts.why_floating


def find_accumulate_dtype(policy: Policy, compute_dtype: Any = None) -> np.dtype | None:
    """Returns the accumulate dtype of a policy (float64 needs x64), unless a layer computes in it anyway."""
    if policy.accumulate_dtype is None:
        return None
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(policy.accumulate_dtype))
    return dtype if compute_dtype is None or np.dtype(compute_dtype).itemsize < dtype.itemsize else None


def why_layer_wide(
    layer: WeightedLayer | None, shape: tuple[int, ...], layout: Layout, format: Float8, *, is_open: bool, groups: int
) -> str | None:
    """Returns the reason why a layer does not compute in float8, whatever its inputs, or None."""
    if layer is not None and layer.weight == "embedding":
        return WHY_TABLES_WIDE
    if layer is None or not is_open:
        return "it multiplies by a function of its own"
    if groups != 1:
        return "its convolution is one of groups"
    inputs = layout.contracted[-1] if layer.operation == "conv_general_dilated" else layout.length
    return why_sizes_wide(layer_size(shape, layout), format, inputs, math.prod(shape[len(shape) - layout.channels :]))


def spell_format(format: StoredFormat, layer: WeightedLayer | None, why_as_numbers: str | None) -> str:
    """Describes a quantized weight, and the reason why the layer dequantizes it, for `Row.quantization`."""
    if isinstance(format, Int4) or not format.activations:  # their matmuls always dequantize
        return str(format)
    is_in_blocks = isinstance(format, BlockFormat)
    if why_as_numbers is None and is_in_blocks and layer is not None and layer.operation == "conv_general_dilated":
        why_as_numbers = "it is a convolution"
    if why_as_numbers is not None:
        return f"{format}, computed with as numbers: {why_as_numbers}"
    is_odd = is_in_blocks and format.block_size != type(format)().block_size
    return f"{format}, in blocks that no hardware multiplies" if is_odd else str(format)
