"""Weights of quantized layers: stored, or floating and rounded when they are used."""

import dataclasses
import functools
from typing import Any

import jax

from ..._base import ROUNDING_SCOPE
from ...policy import Int4, Int8, StoredFormat
from ._array import QuantizedArray, UncalibratedError, quantize_array
from ._layout import Layout, block_length, choose_format, reason_unquantized

WEIGHT_NAMES = ("kernel", "embedding")  # Flax's names of weights to quantize, if they have two or more axes


@dataclasses.dataclass(frozen=True)
class FakeQuantized:
    """Floating weight that computes like a quantized one: in training, and before `quant.quantize`."""

    array: Any
    format: StoredFormat
    layout: Layout

    ndim = property(lambda self: self.array.ndim)
    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    def quantize(self) -> QuantizedArray:
        """Returns the weight as `quant.quantize` would."""
        return quantize_array(self.array, self.format, self.layout)


StoredWeight = QuantizedArray | FakeQuantized


def fake_quantize(weight: StoredWeight, dtype: Any = None) -> jax.Array:
    """Rounds a weight to the values that its quantized form represents, with a straight-through gradient.

    Source: Jacob et al., CVPR 2018, section 3 (fake quantization).
    """
    if isinstance(weight, QuantizedArray):
        return weight.dequantize(dtype)
    dtype = weight.dtype if dtype is None else dtype
    return _round_weight(weight.array, weight.format, weight.layout, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
@jax.named_scope(ROUNDING_SCOPE)
def _round_weight(array: jax.Array, format: StoredFormat, layout: Layout, dtype: Any) -> jax.Array:
    return quantize_array(array, format, layout).dequantize(dtype)


@_round_weight.defjvp
def _pass_tangent(
    format: StoredFormat, layout: Layout, dtype: Any, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    return _round_weight(primals[0], format, layout, dtype), tangents[0].astype(dtype)


def prepare_weight(array: Any, format: StoredFormat, layout: Layout, where: str = "") -> Any:
    """Prepares an array for a matmul: quantized, `FakeQuantized`, or unchanged if `reason_unquantized` has a reason."""
    if isinstance(array, QuantizedArray):
        return match_format(array, format, where)
    format = choose_format(format, layout)
    if reason_unquantized(array.shape, layout, format):
        return array
    if isinstance(format, Int8):  # only stored weights have a static scale of inputs
        format = dataclasses.replace(format, act_scale="dynamic")
    weight = FakeQuantized(array, format, layout.of(array.shape))
    if isinstance(format, Int4):
        block_length(weight.layout, format, where)  # raises here, where the name of the weight is known
    return weight


def match_format(array: QuantizedArray, format: StoredFormat, where: str = "") -> QuantizedArray:
    """Replaces the format of a quantized weight by a policy's; raises if the policy stores other values."""
    format = choose_format(format, array.layout)
    if type(array.format) is type(format):
        if isinstance(format, Int8) and format.act_scale == "static" and array.input_clip is None:
            raise UncalibratedError(format, where)
        stored_options = {"block_size", "scale_rounding", "square_weights"}  # the others say how to compute
        names = {field.name for field in dataclasses.fields(format)} - stored_options
        if dataclasses.replace(array.format, **{name: getattr(format, name) for name in names}) == format:
            return array if array.format == format else dataclasses.replace(array, format=format)
    raise ValueError(
        f"The weight{where} is stored as {str(array.format)!r}, and its policy says {str(format)!r}. Give the model "
        f"the policy it was quantized with, such as '{array.format}_from_mixed_bfloat16', or quantize it again from "
        "the original."
    )
