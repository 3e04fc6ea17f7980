"""Replacements for the functions of Flax layers whose weight is quantized or whose results are wide."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base import cast_floating, is_floating_dtype
from ...policy import BlockFormat, Float8, Int4, Policy, StoredFormat, draws_noise
from .._operations import OPERATIONS
from .._products import (
    Call,
    State,
    float8_product,
    is_block_product,
    is_integer_product,
    needs_state,
    why_sizes_wide,
    why_weight_wide,
    wide_product,
)
from .._weights import Layout, QuantizedArray, Unquantized, fake_quantize, kernel_layout, layer_size, prepare_weight


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

    format: StoredFormat
    promote: Callable[..., Any]
    as_tuple: bool
    layout: Layout | None = None
    where: str = dataclasses.field(default="", compare=False)  # like layers share what JAX compiles

    def __call__(self, *arrays: Any, dtype: Any = None, **options: Any) -> tuple[Any, ...]:
        inputs, kernel, bias = arrays[0] if self.as_tuple else arrays
        layout = self.layout or kernel_layout(kernel.shape, None if bias is None else bias.shape)
        weight = prepare_weight(kernel, self.format, layout, self.where)
        if not isinstance(weight, QuantizedArray | Unquantized):
            return tuple(self._promote_arrays((inputs, kernel, bias), dtype, options))
        # The dtype of the weight has a say, where the layer's own is open; its numbers stay as they are stored.
        stands_for_weight = jnp.zeros((), weight.dtype)
        inputs, _, bias = self._promote_arrays((inputs, stands_for_weight, bias), dtype, options)
        return inputs, weight, bias

    def _promote_arrays(self, arrays: tuple, dtype: Any, options: dict[str, Any]) -> Any:
        return self.promote(*((arrays,) if self.as_tuple else arrays), dtype=dtype, **options)


WHY_AS_NUMBERS = "no policy can replace the function that it multiplies by"
"""Why a layer with a quantized weight computes with the numbers that it stands for."""


class PromoteRounded(Promote):
    """The `promote_dtype` of a layer that can multiply by floating numbers only: the weight as what it stands for."""

    def __call__(self, *arrays: Any, dtype: Any = None, **options: Any) -> tuple[Any, ...]:
        inputs, weight, bias = super().__call__(*arrays, dtype=dtype, **options)
        is_weight = isinstance(weight, QuantizedArray | Unquantized)
        return inputs, fake_quantize(weight, inputs.dtype) if is_weight else weight, bias


@dataclasses.dataclass(frozen=True)
class Multiply:
    """The `dot_general`, `conv_general_dilated` or `einsum_op` of a layer: ours, where the weight is quantized.

    Attributes:
      own: what the layer computes any other product with.
      operation: its name in `OPERATIONS`.
      key: draws the key of the noise of a product, or `None` where nothing is there to draw it from; itself `None`
        where the format has no noise.
    """

    own: Callable[..., Any]
    operation: str
    key: Callable[[], jax.Array | None] | None = dataclasses.field(default=None, compare=False)  # as `state` below

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        quantized = any(isinstance(operand, QuantizedArray | Unquantized) for operand in operands)
        if quantized and self.key is not None:
            options["key"] = self.key()
        return (OPERATIONS[self.operation].quantized if quantized else self.own)(*operands, **options)


@dataclasses.dataclass(frozen=True)
class Float8Multiply:
    """The `dot_general`, `conv_general_dilated` or `einsum_op` of a layer, in 8 bits where the weight is fit for it.

    Attributes:
      own: what the layer computes any other product with.
      operation: its name in `OPERATIONS`.
      format: of the policy.
      state: finds the state of the layer, with `DelayedScaling`.
    """

    own: Callable[..., Any]
    operation: str
    format: Float8
    state: Callable[[], State] = dataclasses.field(compare=False)  # like layers share what JAX compiles

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        # The layer's own function computes what is not fit for 8 bits, so that its program is as without a policy.
        operation, lhs, rhs = OPERATIONS[self.operation].describe(*operands, **options)
        if why_weight_wide(operation, lhs.shape, rhs.shape, self.format) is not None:
            return self.own(*operands, **options)
        return float8_product(operation, lhs, rhs, self.format, self.state() if needs_state(self.format) else None)


def why_layer_wide(
    shape: tuple[int, ...], layout: Layout, format: Float8, *, is_convolution: bool = False, groups: int = 1
) -> str | None:
    """Why a layer computes in the compute dtype, whatever its inputs; `None` if it does not.

    Args:
      shape: of its weight.
      layout: of its weight.
      format: of the policy.
      is_convolution: whether the layer is a convolution; the size of its window does not matter.
      groups: the number of groups of features of a convolution.

    >>> why_layer_wide((3, 3, 3, 64), Layout((3, 3, 3), 1), Float8(min_size=0), is_convolution=True)
    'the length 3 is not a multiple of 16'
    """
    if groups != 1:
        return "its convolution is one of groups"
    inputs = layout.contracted[-1] if is_convolution else layout.length
    return why_sizes_wide(layer_size(shape, layout), format, inputs, math.prod(shape[len(shape) - layout.channels :]))


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

    def draws_noise(self, format: object) -> bool:
        """Whether the layer's product in a format draws noise: convolutions compute in the compute dtype."""
        return self.operation in ("dot_general", "einsum") and draws_noise(format)

    def make_multiply(self, format: object, key: Callable[[], jax.Array | None]) -> Multiply:
        """Makes what takes the place of that function where the weight is quantized.

        Args:
          format: of the policy.
          key: draws a key for each product, if the format has noise.
        """
        assert self.operation is not None
        default = OPERATIONS[self.operation].default
        return Multiply(default, self.operation, key if self.draws_noise(format) else None)

    def make_float8_multiply(self, format: Float8, state: Callable[[], State]) -> Float8Multiply:
        """Makes what takes the place of that function under a float8 policy.

        Args:
          format: of the policy.
          state: finds the state of the layer, with `DelayedScaling`.
        """
        assert self.operation is not None
        return Float8Multiply(OPERATIONS[self.operation].default, self.operation, format, state)


def spell_format(format: StoredFormat, layer: WeightedLayer | None, why_as_numbers: str | None) -> str:
    """What becomes of a weight that is quantized, as `Row.quantization` says it.

    Args:
      format: of the weight.
      layer: the row of its layer.
      why_as_numbers: why the layer could not multiply by quantized weights at all; `None` if it could.

    >>> from jmp_policy.quant import MXFP8
    >>> spell_format(MXFP8(), WeightedLayer("kernel", "conv_general_dilated"), None)
    'mxfp8, computed with as numbers: it is a convolution'
    >>> spell_format(MXFP8(block_size=64), WeightedLayer("kernel", "dot_general"), None)
    'mxfp8/64, in blocks that no hardware multiplies'
    """
    if isinstance(format, Int4) or not format.activations:  # products are of numbers anyway
        return str(format)
    is_in_blocks = isinstance(format, BlockFormat)
    if why_as_numbers is None and is_in_blocks and layer is not None and layer.operation == "conv_general_dilated":
        why_as_numbers = "it is a convolution"
    if why_as_numbers is not None:
        return f"{format}, computed with as numbers: {why_as_numbers}"
    is_odd = is_in_blocks and format.block_size != type(format)().block_size
    return f"{format}, in blocks that no hardware multiplies" if is_odd else str(format)


def find_row(table: Mapping[type, WeightedLayer], kind: type) -> WeightedLayer | None:
    """The row of a class of layers, or of the nearest class in the table that it is a subclass of.

    >>> find_row({list: WeightedLayer("kernel")}, type("Layer", (list,), {})).weight
    'kernel'
    """
    return next((table[base] for base in kind.__mro__ if base in table), None)


@dataclasses.dataclass(frozen=True)
class PromoteWide:
    """The `promote_dtype` of a layer: leaves a floating weight as it is stored, and the bias in the accumulate dtype.

    Attributes:
      promote: what it would be otherwise.
      as_tuple: whether that takes one tuple, as in nnx, or each array by itself, as in linen.
      dtype: the accumulate dtype.
      adds_wide: whether the layer returns what the sum with its bias is, which the policy then rounds. The bias is as
        otherwise where an author's code takes what the layer returns.
    """

    promote: Callable[..., Any]
    as_tuple: bool
    dtype: np.dtype
    adds_wide: bool = True

    def __call__(self, *arrays: Any, dtype: Any = None, **options: Any) -> tuple[Any, ...]:
        given = arrays[0] if self.as_tuple else arrays
        if len(given) != 3:  # another method of the layer promotes what is no product's
            return tuple(self.promote(*arrays, dtype=dtype, **options))
        inputs, weight, bias = given
        is_plain = is_floating_dtype(weight.dtype) and not isinstance(weight, QuantizedArray)
        is_kept = is_plain and not isinstance(self.promote, Promote)
        # The dtype of the weight has a say, where the layer's own is open; its numbers stay as they are stored.
        asked = (inputs, jnp.zeros((), weight.dtype), None if self.adds_wide else bias) if is_kept else given
        promoted = self.promote(*((asked,) if self.as_tuple else asked), dtype=dtype, **options)
        if not is_narrower(promoted[0], self.dtype):
            return tuple(self.promote(*arrays, dtype=dtype, **options)) if is_kept else tuple(promoted)
        weight = jnp.asarray(weight) if is_kept else promoted[1]
        return promoted[0], weight, cast_floating(bias, self.dtype) if self.adds_wide else promoted[2]


@dataclasses.dataclass(frozen=True)
class MultiplyWide:
    """The `dot_general`, `conv_general_dilated` or `einsum_op` of a layer, with sums in the accumulate dtype.

    Attributes:
      own: what it would be otherwise: an operation of JAX's, or what a quantized policy puts there.
      operation: its name in `OPERATIONS`.
      dtype: the accumulate dtype.
      adds_wide: as of `PromoteWide`; without it the result is rounded here.
    """

    own: Callable[..., Any]
    operation: str
    dtype: np.dtype
    adds_wide: bool = True

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        call: Call = OPERATIONS[self.operation].describe(*operands, **options)
        if not is_narrower(call.lhs, self.dtype):
            return self.own(*operands, **options)
        if self._is_quantized(call):
            out = self.own(*operands, **options | {"preferred_element_type": self.dtype})
        else:
            out = wide_product(call.operation, call.lhs, _read_numbers(call.rhs), self.dtype, call.lhs.dtype)
        return out if self.adds_wide else out.astype(call.lhs.dtype)

    def _is_quantized(self, call: Call) -> bool:
        """Whether what would be there otherwise computes this product in narrow numbers."""
        if isinstance(call.rhs, QuantizedArray | Unquantized):
            is_block = is_block_product(call.operation, call.lhs, call.rhs)
            return is_block or is_integer_product(call.operation, call.rhs)
        if not isinstance(self.own, Float8Multiply):
            return False
        return why_weight_wide(call.operation, call.lhs.shape, call.rhs.shape, self.own.format) is None


def is_own(function: object) -> bool:
    """Whether a function in the place of a layer's own is a policy's."""
    return isinstance(function, Promote | Multiply | Float8Multiply | PromoteWide | MultiplyWide)


def read_narrow(function: Any) -> Any:
    """What the function of a layer would be without an accumulate dtype."""
    if isinstance(function, PromoteWide):
        return function.promote
    return function.own if isinstance(function, MultiplyWide) else function


def find_accumulate_dtype(policy: Policy) -> np.dtype | None:
    """The accumulate dtype of a policy, as JAX has it: float32 for float64, unless that is enabled.

    >>> find_accumulate_dtype(Policy("float32", "bfloat16", "bfloat16", accumulate_dtype="float64"))
    dtype('float32')
    """
    dtype = policy.accumulate_dtype
    return None if dtype is None else np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _read_numbers(weight: Any) -> jax.Array:
    """A weight as floating numbers, as it is stored for its size alone; nothing differentiates one that is."""
    if isinstance(weight, QuantizedArray):
        return lax.stop_gradient(weight.dequantize())
    return fake_quantize(weight) if isinstance(weight, Unquantized) else weight


def widen_functions(
    promote: Callable[..., Any],
    multiply: Callable[..., Any],
    operation: str,
    dtype: np.dtype | None,
    *,
    as_tuple: bool,
    adds_wide: bool = True,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What takes the place of both functions of a layer; they themselves, where they are wide already or none is asked.

    Args:
      promote: its `promote_dtype`.
      multiply: its `dot_general`, `conv_general_dilated` or `einsum_op`.
      operation: the name of that in `OPERATIONS`.
      dtype: the accumulate dtype, if there is one.
      as_tuple: as of `PromoteWide`.
      adds_wide: as of `PromoteWide`.
    """
    if dtype is None:
        return promote, multiply
    if not isinstance(promote, PromoteWide):  # a clone has the fields of a layer whose method runs
        promote = PromoteWide(promote, as_tuple, dtype, adds_wide)
    if not isinstance(multiply, MultiplyWide):
        multiply = MultiplyWide(multiply, operation, dtype, adds_wide)
    return promote, multiply


def is_narrower(x: jax.Array, dtype: np.dtype) -> bool:
    """Whether products of an operand have sums that another dtype holds more of.

    >>> is_narrower(jnp.ones(1, jnp.bfloat16), np.dtype("float32")), is_narrower(jnp.ones(1), np.dtype("float32"))
    (True, False)
    """
    return is_floating_dtype(x.dtype) and x.dtype.itemsize < dtype.itemsize
