"""What takes the place of a Flax layer's own functions when its weight is quantized.

A layer promotes its input, weight and bias to one dtype and multiplies. Both functions are fields of the layer: the
first is made to leave the weight as it is stored, the second to multiply by it. Both are equal by value, for the
layer's `__eq__` and for JAX's caches.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._formats import Int4, Integers
from ._array import QuantizedArray
from ._layout import Layout, block_length, format_of, kernel_layout, why_left
from ._operations import conv_general_dilated, dot_general, einsum
from ._weight import Unquantized, fake_quantized

WEIGHT_NAMES = ("kernel", "embedding")
"""What Flax's layers call the weights that are quantized: those of two or more axes."""


def weight_of(array: Any, format: Integers, layout: Layout, where: str = "") -> Any:
    """An array on its way into a product: quantized, yet to be, or itself where it is too small.

    Raises:
      ValueError: it is stored in another quantized format than the policy's, or blocks do not divide it.
    """
    if isinstance(array, QuantizedArray):
        return as_format(array, format, where)
    format = format_of(format, layout)
    if why_left(array.shape, layout, format):
        return array
    weight = Unquantized(array, format, layout.of(array.shape))
    if isinstance(format, Int4):
        block_length(weight.layout, format, where)  # here, where its name is known
    return weight


def as_format(array: QuantizedArray, format: Integers, where: str = "") -> QuantizedArray:
    """A quantized weight that computes as a policy says, if its integers are those of the policy.

    Raises:
      ValueError: they are not.
    """
    format = format_of(format, array.layout)
    same_kind = type(array.format) is type(format)
    if same_kind and dataclasses.replace(array.format, **_computing(format)) == format:
        return array if array.format == format else dataclasses.replace(array, format=format)
    raise ValueError(
        f"The weight{where} is stored as {str(array.format)!r}, and its policy says {str(format)!r}. Give the model "
        f"the policy it was quantized with, such as '{array.format}_from_mixed_bfloat16', or quantize it again from "
        "the original."
    )


@dataclasses.dataclass(frozen=True)
class Promote:
    """The `promote_dtype` of a layer with a quantized weight: casts input and bias, and leaves the weight as stored.

    Attributes:
      format: of the policy.
      promote: the layer's own function.
      as_tuple: whether that takes one tuple, as in nnx, or each array by itself, as in linen.
      layout: the layout of the weight, where the layer tells; found from weight and bias, where it is `None`.
      where: what an error message says of the place the weight stands in.
    """

    format: Integers
    promote: Callable[..., Any]
    as_tuple: bool
    layout: Layout | None = None
    where: str = dataclasses.field(default="", compare=False)  # like layers share what JAX compiles

    def __call__(self, *arrays: Any, dtype: Any = None, **options: Any) -> tuple[Any, ...]:
        inputs, kernel, bias = arrays[0] if self.as_tuple else arrays
        layout = self.layout or kernel_layout(kernel.shape, None if bias is None else bias.shape)
        weight = weight_of(kernel, self.format, layout, self.where)
        if not isinstance(weight, QuantizedArray | Unquantized):
            return tuple(self._promoted((inputs, kernel, bias), dtype, options))
        # The dtype of the weight has a say, where the layer's own is open; its numbers stay as they are stored.
        stands_for_weight = jnp.zeros((), weight.dtype)
        inputs, _, bias = self._promoted((inputs, stands_for_weight, bias), dtype, options)
        return inputs, weight, bias

    def _promoted(self, arrays: tuple, dtype: Any, options: dict[str, Any]) -> Any:
        return self.promote(*((arrays,) if self.as_tuple else arrays), dtype=dtype, **options)


class Round(Promote):
    """The `promote_dtype` of a layer that can multiply by floating numbers only: the weight as its integers say."""

    def __call__(self, *arrays: Any, dtype: Any = None, **options: Any) -> tuple[Any, ...]:
        inputs, weight, bias = super().__call__(*arrays, dtype=dtype, **options)
        is_weight = isinstance(weight, QuantizedArray | Unquantized)
        return inputs, fake_quantized(weight, inputs.dtype) if is_weight else weight, bias


@dataclasses.dataclass(frozen=True)
class Multiply:
    """The `dot_general`, `conv_general_dilated` or `einsum_op` of a layer: ours, where the weight is quantized.

    Attributes:
      own: what the layer computes any other product with.
      operation: one of `"dot_general"`, `"conv_general_dilated"`, `"einsum"`.
    """

    own: Callable[..., Any]
    operation: str

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        quantized = any(isinstance(operand, QuantizedArray | Unquantized) for operand in operands)
        return (_OPERATIONS[self.operation] if quantized else self.own)(*operands, **options)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "dot_general": dot_general,
    "conv_general_dilated": conv_general_dilated,
    "einsum": einsum,
}


def _computing(format: Integers) -> dict[str, Any]:
    """The options of a format that say how to compute, and nothing of how it is stored."""
    return {name: getattr(format, name) for name in ("activations", "min_size", "table_bits") if hasattr(format, name)}
