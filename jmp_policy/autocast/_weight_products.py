"""Matmuls and convolutions in their quantized form: by a weight, by a weight of each group, and inside attention."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from .._jaxpr import shape_of
from ..policy import MULTIPLE, MXFP8, ODD_ROWS, Float8, Int8, Quantization
from ..quant import (
    LayerProduct,
    Layout,
    Multiply,
    WeightedLayer,
    describe_convolution,
    describe_dot_general,
    dot_general,
    fake_quantize,
    multiplies_8_bits,
    pad_axes,
    prepare_weight,
    ragged_dot,
    reason_not_float8,
    reason_unquantized,
    spell_format,
    why_sizes_wide,
    wide_ragged_dot,
)


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """A matmul or convolution by a weight, as a function of both operands.

    The axes of the weight are brought into the order batch, summed, outputs: the one of a Flax kernel.
    """

    operation: str  # the name of the primitive
    position: int  # of the weight among the operands
    order: tuple[int, ...]  # the axes of the weight in the new order
    summed: int  # number of summed axes
    channels: int  # number of axes of outputs
    options: tuple[tuple[str, Any], ...]  # of the operation on the input and the reordered weight
    out_order: tuple[int, ...]  # the axes of the output in the order of the equation
    quantization: Quantization
    accumulate: np.dtype | None = None

    def __call__(self, *operands: jax.Array) -> jax.Array:
        weight, inputs = _reorder(operands[self.position], self.order), operands[1 - self.position]
        stored: Any = weight
        if not isinstance(self.quantization, Float8):
            stored = prepare_weight(weight, self.quantization, self._find_layout(weight.shape))
        product = LayerProduct(self.operation, self.quantization, self.accumulate, lambda *x: x, as_tuple=False)
        return _reorder(Multiply(product)(inputs, stored, **dict(self.options)), self.out_order)

    def reason_left(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """Returns the reason why the weight is not quantized, or None."""
        shape, inputs = tuple(shapes[self.position][axis] for axis in self.order), shapes[1 - self.position]
        layout = self._find_layout(shape)
        if not self.channels or not self.summed:
            return "it is multiplied as a vector"
        if not isinstance(self.quantization, Float8):
            return reason_unquantized(shape, layout, self.quantization)
        operands = [jax.ShapeDtypeStruct(own, np.float32) for own in (inputs, shape)]
        describe: Any = describe_dot_general if self.operation == "dot_general" else describe_convolution
        operation = describe(*operands, **dict(self.options)).operation
        lengths = zip(operation.left, inputs, strict=True)
        rows = math.prod(length for label, length in lengths if label not in operation.right)
        is_odd = self.operation == "dot_general" and rows % MULTIPLE
        return reason_not_float8(operation, inputs, shape, self.quantization) or (ODD_ROWS if is_odd else None)

    def __str__(self) -> str:
        if isinstance(self.quantization, Float8):
            return str(self.quantization)
        return spell_format(self.quantization, WeightedLayer("kernel", self.operation), None)

    def _find_layout(self, shape: tuple[int, ...]) -> Layout:
        end = len(shape) - self.channels
        return Layout(shape[end - self.summed : end], self.channels)


@dataclasses.dataclass(frozen=True)
class RaggedProduct:
    """A grouped matmul by a weight for each group, as `quant.ragged_dot`.

    That has no 4-bit operands, nor float inputs: other formats round the weight, and multiply in the compute dtype.
    """

    is_transposed: bool  # True if the matrices are (outputs, inputs)
    options: tuple[tuple[str, Any], ...]
    quantization: Quantization
    accumulate: np.dtype | None = None
    position = 1  # of the weight among the operands

    def __call__(self, rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        matrices = matrices.swapaxes(1, 2) if self.is_transposed else matrices
        options = {"preferred_element_type": self.accumulate, **dict(self.options)}
        format: Any = self.quantization
        if not multiplies_8_bits(format):
            weight = prepare_weight(matrices, format, Layout(matrices.shape[1:2], 1))
            return ragged_dot(rows, fake_quantize(weight, rows.dtype), sizes, **options)
        if isinstance(format, Int8):  # autocast has no calibrated scales
            format = dataclasses.replace(format, act_scale="dynamic")
        return ragged_dot(rows, matrices, sizes, **options, quantization=format)

    def reason_left(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """Returns the reason why the weight is not quantized, or None."""
        (rows, inputs), (groups, *others) = shapes[:2]
        outputs = others[0 if self.is_transposed else 1]
        if isinstance(self.quantization, Float8):
            reason = why_sizes_wide(inputs * outputs, self.quantization, inputs, outputs)
            return reason or (ODD_ROWS if rows % MULTIPLE else None)
        return reason_unquantized((groups, inputs, outputs), Layout((inputs,), 1), self.quantization)

    def __str__(self) -> str:
        if isinstance(self.quantization, Float8):
            return str(self.quantization)
        is_8_bit = multiplies_8_bits(self.quantization)
        return spell_format(self.quantization, None, None if is_8_bit else "it is a grouped matmul")


@dataclasses.dataclass(frozen=True)
class AttentionProduct:
    """A matmul of queries by keys, or of probabilities by values, both of them quantized."""

    numbers: lax.DotDimensionNumbers
    options: tuple[tuple[str, Any], ...]
    quantization: Quantization
    accumulate: np.dtype | None = None
    position = -1  # neither operand is a weight

    def __call__(self, *operands: jax.Array) -> jax.Array:
        if isinstance(self.quantization, MXFP8):  # pads to whole blocks
            pairs = zip(operands, self.numbers[0], strict=True)
            operands = tuple(pad_axes(x, axes, self.quantization.block_size) for x, axes in pairs)
        (left, right), options = operands, {"preferred_element_type": self.accumulate, **dict(self.options)}
        return dot_general(left, right, self.numbers, **options, quantization=self.quantization)


@dataclasses.dataclass(frozen=True)
class WideRaggedProduct:
    """A grouped matmul with sums in another dtype, whose operands and gradients are as of `wide_product`."""

    is_transposed: bool  # as in `RaggedProduct`
    dtype: np.dtype
    compute_dtype: np.dtype
    precision: lax.PrecisionLike

    def __call__(self, rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        matrices = matrices.swapaxes(1, 2) if self.is_transposed else matrices
        return wide_ragged_dot(rows, matrices, sizes, self.dtype, self.compute_dtype, self.precision)


def describe_wide_ragged_product(eqn: JaxprEqn, dtype: np.dtype, compute_dtype: np.dtype) -> WideRaggedProduct | None:
    """Describes a grouped matmul with sums in `dtype`, or returns None for another operation or form."""
    if eqn.primitive.name != "ragged_dot_general":
        return None
    product = _describe_ragged_product(eqn, 1, None, None)
    if isinstance(product, str):
        return None
    return WideRaggedProduct(product.is_transposed, dtype, compute_dtype, eqn.params["precision"])


def describe_attention_product(
    eqn: JaxprEqn, quantization: Quantization | None, accumulate: np.dtype | None
) -> AttentionProduct | str:
    """Describes a matmul with a batch of heads; returns an empty string for other operations."""
    if quantization is None or eqn.primitive.name != "dot_general" or not eqn.params["dimension_numbers"][1][0]:
        return ""
    options = tuple((name, eqn.params[name]) for name in ("precision", "out_sharding"))
    return AttentionProduct(eqn.params["dimension_numbers"], options, quantization, accumulate)


def _describe_ragged_product(
    eqn: JaxprEqn, position: int, quantization: Any, accumulate: np.dtype | None
) -> RaggedProduct | str:
    numbers, params = eqn.params["ragged_dot_dimension_numbers"], eqn.params
    if position == 0 or (*numbers.lhs_ragged_dimensions,) != (0,) or (*numbers.rhs_group_dimensions,) != (0,):
        return "it is not a matrix for each group of rows"
    contracted, (_, batch) = numbers.dot_dimension_numbers
    if batch or len(contracted[1]) != 1 or params["group_offset"] is not None or params["out_sharding"] is not None:
        return "ragged_dot has a batch, several summed axes, a group offset or an output sharding"
    return RaggedProduct((*contracted[1],) == (2,), (("precision", params["precision"]),), quantization, accumulate)


def describe_weight_product(
    eqn: JaxprEqn, position: int, quantization: Quantization, accumulate: np.dtype | None
) -> WeightProduct | RaggedProduct | str:
    """Describes a matmul or convolution whose operand at `position` is a weight, or returns why it is left."""
    if eqn.primitive.name == "ragged_dot_general":
        return _describe_ragged_product(eqn, position, quantization, accumulate)
    name, params = eqn.primitive.name, {k: v for k, v in eqn.params.items() if k != "preferred_element_type"}
    ndim = len(shape_of(eqn.invars[position]))
    if name == "conv_general_dilated":
        if position == 0:
            return "it is the input of a convolution"
        numbers = params["dimension_numbers"]
        outputs, inputs, *window = numbers.rhs_spec
        params["dimension_numbers"] = numbers._replace(rhs_spec=(ndim - 1, ndim - 2, *range(ndim - 2)))
        order, summed, channels = (*window, inputs, outputs), ndim - 1, 1
        given = {key: value for key, value in params.items() if key != "out_sharding" or value is not None}
        return WeightProduct(name, 1, order, summed, channels, tuple(given.items()), (), quantization, accumulate)
    contracted, batch = params["dimension_numbers"]
    own, other = (tuple(map(int, axes[position])) for axes in (contracted, batch)), 1 - position
    summed_axes, batch_axes = own
    free = tuple(axis for axis in range(ndim) if axis not in (*summed_axes, *batch_axes))
    n = len(batch_axes)
    weight_axes = tuple(range(n, n + len(summed_axes))), tuple(range(n))
    params["dimension_numbers"] = ((contracted[other], weight_axes[0]), (batch[other], weight_axes[1]))
    out_order: tuple[int, ...] = ()
    if position == 0:
        if params.get("out_sharding") is not None:
            return "it is the left operand, and the output has a sharding"
        rows = len(shape_of(eqn.invars[1])) - n - len(summed_axes)
        out_order = (*range(n), *range(n + rows, n + rows + len(free)), *range(n, n + rows))
    order = (*batch_axes, *summed_axes, *free)
    options = tuple(params.items())
    return WeightProduct(
        name, position, order, len(summed_axes), len(free), options, out_order, quantization, accumulate
    )


def _reorder(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return x if order == tuple(sorted(order)) else lax.transpose(x, order)


Product = WeightProduct | RaggedProduct | AttentionProduct
