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

_WHY_FIXED = "no policy can replace the function that it multiplies by"


@dataclasses.dataclass(frozen=True, eq=False)
class LayerFacts:
    """Facts about one layer, which its adapter gathers once."""

    layer: WeightedLayer | None = None  # its row in the table of the adapter, or `None`
    weight: Any = None  # the value of its weight, if that has two or more axes
    layout: Layout | None = None  # of the weight
    groups: int = 1  # of a convolution
    is_matmul_open: bool = False  # true if a policy may replace its matmul: its author left it to Flax
    are_sums_open: bool = False  # true if a policy may change the output dtype of its matmul
    lacks_state: bool = False  # true if it cannot keep the state that a float8 format needs
    why_floating: str | None = None  # the reason why its weight cannot be stored in 8 or 4 bits
    why_as_numbers: str | None = None  # the reason why it dequantizes its weight before its matmul


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What a policy does to one layer."""

    format: StoredFormat | Float8 | None = None  # the format in which it multiplies by its weight, or `None`
    accumulate: np.dtype | None = None  # the dtype in which it returns the sums of its matmul, or `None`
    quantization: str = ""  # the treatment of its weight, for `Row.quantization`


def plan_layer(facts: LayerFacts, policy: Policy, compute_dtype: Any) -> LayerPlan:
    """Decides what a policy does to a layer that computes in a dtype; `None` if only its inputs tell it."""
    accumulate = find_accumulate_dtype(policy, compute_dtype) if facts.are_sums_open else None
    format, layout, layer = policy.quantization, facts.layout, facts.layer
    if format is None or facts.weight is None or layout is None:
        return LayerPlan(None, accumulate)
    if isinstance(format, Float8):
        left = _why_not_float8(facts, layout, format)
    else:
        is_stored = isinstance(facts.weight, QuantizedArray)
        left = None if is_stored else reason_unquantized(facts.weight.shape, layout, format)
        left = left or facts.why_floating
    if left is not None:
        return LayerPlan(None, accumulate, f"left: {left}")
    if isinstance(format, Float8):
        return LayerPlan(format, accumulate, str(format))
    is_fixed = layer is not None and layer.operation is None and layer.weight == "kernel"
    why_as_numbers = _WHY_FIXED if is_fixed else facts.why_as_numbers
    return LayerPlan(format, accumulate, spell_format(choose_format(format, layout), layer, why_as_numbers))


def _why_not_float8(facts: LayerFacts, layout: Layout, format: Float8) -> str | None:
    """Returns the reason why a layer does not compute in float8, whatever its inputs, or `None`."""
    layer, shape = facts.layer, facts.weight.shape
    if layer is not None and layer.weight == "embedding":
        return WHY_TABLES_WIDE
    if facts.lacks_state:
        return "it runs through .apply without state to scale by, and would lose what it made"
    if layer is None or not facts.is_matmul_open:
        return "it multiplies by a function of its own"
    if facts.groups != 1:
        return "its convolution is one of groups"
    inputs = layout.contracted[-1] if layer.operation == "conv_general_dilated" else layout.length
    return why_sizes_wide(layer_size(shape, layout), format, inputs, math.prod(shape[len(shape) - layout.channels :]))


def find_accumulate_dtype(policy: Policy, compute_dtype: Any = None) -> np.dtype | None:
    """Returns the accumulate dtype of a policy (float64 needs x64), unless a layer computes in it anyway."""
    if policy.accumulate_dtype is None:
        return None
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(policy.accumulate_dtype))
    return dtype if compute_dtype is None or np.dtype(compute_dtype).itemsize < dtype.itemsize else None


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
