"""A weight on its way into a product: quantized already, or yet to be."""

import dataclasses
from typing import Any

import jax

from ..._jaxpr import ROUNDING_SCOPE
from ...policy import Int4, KeptNVFP4, StoredFormat
from ._array import QuantizedArray, quantize_array
from ._layout import Layout, block_length, choose_format, why_left

WEIGHT_NAMES = ("kernel", "embedding")
"""What Flax's layers call the weights that are quantized, if they have two or more axes."""


@dataclasses.dataclass(frozen=True)
class Unquantized:
    """A floating weight that computes like a quantized one: in training, and before `quant.quantize`.

    Attributes:
      array: as it is stored.
      format: what it is to be quantized to.
      layout: which of its axes are summed over.
    """

    array: Any
    format: StoredFormat
    layout: Layout

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.array.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """The dtype that the weight is stored in."""
        return self.array.dtype

    def quantize(self) -> QuantizedArray:
        """The weight as `quant.quantize` would make it."""
        return quantize_array(self.array, self.format, self.layout)


StoredWeight = QuantizedArray | Unquantized


def fake_quantize(weight: StoredWeight, dtype: Any = None) -> jax.Array:
    """Rounds a weight to what its stored numbers stand for; the gradient passes straight through to the stored weight.

    Args:
      weight: a weight.
      dtype: of the result; `None` for the dtype of the weight.

    Source: Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons, 2013 (straight-through);
    Jacob et al., CVPR 2018, section 3 (fake quantization).
    """
    if isinstance(weight, QuantizedArray):
        return weight.dequantize(dtype)
    spec = _FakeQuantization(weight.format, weight.layout, weight.dtype if dtype is None else dtype)
    return _round_straight_through(weight.array, spec)


@dataclasses.dataclass(frozen=True)
class _FakeQuantization:
    format: StoredFormat
    layout: Layout
    dtype: Any


@jax.named_scope(ROUNDING_SCOPE)
def _round(array: jax.Array, spec: _FakeQuantization) -> jax.Array:
    return quantize_array(array, spec.format, spec.layout).dequantize(spec.dtype)


_round_straight_through = jax.custom_jvp(_round, nondiff_argnums=(1,))


@_round_straight_through.defjvp
def _straight_through(spec: _FakeQuantization, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return _round_straight_through(primals[0], spec), tangents[0].astype(spec.dtype)


def prepare_weight(array: Any, format: StoredFormat, layout: Layout, where: str = "") -> Any:
    """Prepares an array for a product: quantized, `Unquantized`, or unchanged where it is too small.

    Raises:
      ValueError: it is stored in another quantized format than the policy's, or blocks do not divide it.
    """
    if isinstance(array, QuantizedArray):
        return match_format(array, format, where)
    format = choose_format(format, layout)
    if why_left(array.shape, layout, format):
        return array
    weight = Unquantized(array, format, layout.of(array.shape))
    if isinstance(format, Int4):
        block_length(weight.layout, format, where)  # here, where its name is known
    return weight


def match_format(array: QuantizedArray, format: StoredFormat, where: str = "") -> QuantizedArray:
    """Gives a quantized weight the format of a policy, which may compute otherwise and stores the same numbers.

    Raises:
      ValueError: the policy stores other numbers.
    """
    # A weight that is stored in blocks is multiplied so: what keeps others keeps them from being rounded.
    format = choose_format(format.plain if isinstance(format, KeptNVFP4) else format, array.layout)
    same_kind = type(array.format) is type(format)
    if same_kind and dataclasses.replace(array.format, **_computing(format)) == format:
        return array if array.format == format else dataclasses.replace(array, format=format)
    raise ValueError(
        f"The weight{where} is stored as {str(array.format)!r}, and its policy says {str(format)!r}. Give the model "
        f"the policy it was quantized with, such as '{array.format}_from_mixed_bfloat16', or quantize it again from "
        "the original."
    )


def _computing(format: StoredFormat) -> dict[str, Any]:
    """The options of a format that say how to compute, and nothing of how it is stored."""
    names = {field.name for field in dataclasses.fields(format)} - {"block_size", "scale_rounding", "square_weights"}
    return {name: getattr(format, name) for name in names}
