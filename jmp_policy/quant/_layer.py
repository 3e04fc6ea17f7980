"""What takes the place of a Flax layer's own functions when its weight is quantized.

A layer promotes its input, weight and bias to one dtype and multiplies. Both functions are fields of the layer: the
first is made to leave the weight as it is stored, the second to multiply by it. Both are equal by value, for the
layer's `__eq__` and for JAX's caches.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._float8_format import Float8
from .._formats import Int4, Integers
from ._amax_history import State
from ._array import QuantizedArray
from ._float8_layer import Float8Multiply
from ._layout import Layout, block_length, format_of, kernel_layout, why_left
from ._operations import OPERATIONS
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
      operation: its name in `OPERATIONS`.
    """

    own: Callable[..., Any]
    operation: str

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        quantized = any(isinstance(operand, QuantizedArray | Unquantized) for operand in operands)
        return (OPERATIONS[self.operation].quantized if quantized else self.own)(*operands, **options)


@dataclasses.dataclass(frozen=True)
class WeightedLayer:
    """How a type of Flax's layers multiplies by its weight: a row of linen's table of layers, or of nnx's.

    To add a layer, add its type and its row to `linen/_layer_table.py` or `nnx/_layer_table.py`.

    Attributes:
      weight: the name of the parameter that is the weight, one of `WEIGHT_NAMES`.
      operation: the name in `OPERATIONS` of what the layer multiplies with; `None` where ours cannot take its place.
      field: the field or attribute of the layer that holds this function; `None` where a method of the layer calls it.
      layout: `(layer, shape of the weight) -> Layout`, where the layer tells the layout; `None` where the name of the
        weight and the bias beside it do.
      promote: what takes the place of the layer's `promote_dtype`.
    """

    weight: str
    operation: str | None = None
    field: str | None = None
    layout: Callable[[Any, tuple[int, ...]], Layout] | None = None
    promote: type[Promote] = Promote

    @property
    def default(self) -> Callable[..., jax.Array] | None:
        """The function that the layer multiplies with if its author gave it no other."""
        return None if self.operation is None else OPERATIONS[self.operation].default

    def multiply(self) -> Multiply:
        """What takes the place of that function where the weight is quantized."""
        assert self.operation is not None
        return Multiply(OPERATIONS[self.operation].default, self.operation)

    def float8_multiply(self, format: Float8, state: Callable[[], State]) -> Float8Multiply:
        """What takes the place of that function under a float8 policy.

        Args:
          format: of the policy.
          state: finds the state of the layer, with `DelayedScaling`.
        """
        assert self.operation is not None
        return Float8Multiply(OPERATIONS[self.operation].default, self.operation, format, state)


def find_row(table: Mapping[type, WeightedLayer], kind: type) -> WeightedLayer | None:
    """The row of a class of layers, or of the nearest class in the table that it is a subclass of.

    >>> find_row({list: WeightedLayer("kernel")}, type("Layer", (list,), {})).weight
    'kernel'
    """
    return next((table[base] for base in kind.__mro__ if base in table), None)


def _computing(format: Integers) -> dict[str, Any]:
    """The options of a format that say how to compute, and nothing of how it is stored."""
    return {name: getattr(format, name) for name in ("activations", "min_size", "table_bits") if hasattr(format, name)}
