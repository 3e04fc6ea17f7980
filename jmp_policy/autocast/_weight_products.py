"""Matmuls and convolutions in their quantized form: by a weight, by a weight of each group, and inside attention."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from .._base import is_floating
from .._jaxpr import float_dtype, shape_of
from ..policy import MULTIPLE, MXFP8, NF4, ODD_ROWS, BlockFormat, Float8, Int4, Int8, Quantization
from ..quant import (
    WHY_TABLES_WIDE,
    FakeQuantized,
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
    table_layout,
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
        return _reorder(Multiply(product)(_as_floats(inputs, weight), stored, **dict(self.options)), self.out_order)

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
        return _spell_ragged(self.quantization)


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
    other, batch_axes = 1 - position, tuple(map(int, batch[position]))
    summed_axes, other_axes = _pair_axes(contracted, position, tuple(range(ndim)))
    free = tuple(axis for axis in range(ndim) if axis not in (*summed_axes, *batch_axes))
    n = len(batch_axes)
    weight_axes = tuple(range(n, n + len(summed_axes))), tuple(range(n))
    params["dimension_numbers"] = ((other_axes, weight_axes[0]), (batch[other], weight_axes[1]))
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


def _as_floats(inputs: jax.Array, weight: Any) -> jax.Array:
    """Converts integers, which JAX multiplies floats by unconverted."""
    return inputs if is_floating(inputs) else inputs.astype(weight.dtype)


def _pair_axes(
    contracted: Sequence[Sequence[int]], position: int, axes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the summed `axes` of a weight in the order of its blocks, and for each the axis of the input."""
    pairs = sorted(
        (axes[own], other) for own, other in zip(contracted[position], contracted[1 - position], strict=True)
    )
    return tuple(own for own, _ in pairs), tuple(other for _, other in pairs)


@dataclasses.dataclass(frozen=True)
class StoredProduct:
    """A matmul or convolution by a stored weight, as a function of the input and the arrays of the weight."""

    operation: str  # the name of the primitive
    structure: Any  # of the weight, a pytree
    options: tuple[tuple[str, Any], ...]  # of the operation on the input and the weight
    out_order: tuple[int, ...]  # the axes of the output in the order of the equation
    why_as_numbers: str | None = None  # the reason why the weight is dequantized first

    def __call__(self, inputs: jax.Array, *arrays: jax.Array) -> jax.Array:
        weight = jax.tree.unflatten(self.structure, arrays)
        product = LayerProduct(self.operation, weight.format, None, lambda *x: x, as_tuple=False)
        return _reorder(Multiply(product)(_as_floats(inputs, weight), weight, **dict(self.options)), self.out_order)

    def __str__(self) -> str:
        format = _read_structure(self.structure).format
        return spell_format(format, WeightedLayer("kernel", self.operation), self.why_as_numbers)


@dataclasses.dataclass(frozen=True)
class StoredRaggedProduct:
    """A grouped matmul by a stored stack of matrices, as a function of the rows, the sizes and the arrays."""

    structure: Any  # of the weight, a pytree
    options: tuple[tuple[str, Any], ...]

    def __call__(self, rows: jax.Array, sizes: jax.Array, *arrays: jax.Array) -> jax.Array:
        return ragged_dot(rows, jax.tree.unflatten(self.structure, arrays), sizes, **dict(self.options))

    def __str__(self) -> str:
        return _spell_ragged(_read_structure(self.structure).format)


@dataclasses.dataclass(frozen=True)
class StackElement:
    """Takes one element of a stack from the arrays of a stored weight, as an equation does from its numbers."""

    name: str  # of the primitive
    axes: tuple[int, ...]  # leading axes of the stack
    starts: tuple[int, ...]  # of a `slice`: the index along each axis
    count: int  # number of arrays

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        arrays, starts = operands[: self.count], operands[self.count :] or self.starts
        return [self._take(array, starts) for array in arrays]

    def _take(self, array: jax.Array, starts: Sequence[Any]) -> jax.Array:
        if self.name == "squeeze":
            return lax.squeeze(array, self.axes)
        for axis in self.axes:
            array = lax.dynamic_slice_in_dim(array, starts[axis], 1, axis)
        return array


def describe_element(eqn: JaxprEqn, order: "Order", count: int) -> StackElement | None:
    """Describes an equation that takes one element of a stack of stored weights; returns None for any other."""
    shape, moved = shape_of(eqn.invars[0]), move_axes(eqn, order)
    if eqn.primitive.name not in TAKING or moved is None:
        return None
    if eqn.primitive.name == "squeeze":
        return StackElement("squeeze", tuple(eqn.params["dimensions"]), (), count)
    axes = tuple(n for n in range(len(shape)) if shape_of(eqn.outvars[0])[n] != shape[n])
    return StackElement(eqn.primitive.name, axes, eqn.params.get("start_indices", ()), count)


def _spell_ragged(quantization: Any) -> str:
    return spell_format(quantization, None, None if multiplies_8_bits(quantization) else "it is a grouped matmul")


@dataclasses.dataclass(frozen=True)
class LookUp:
    """A lookup of rows of a floating or stored table, rounded as `nn.Embed` rounds them."""

    params: tuple[tuple[str, Any], ...]  # of the `gather`
    dtype: np.dtype  # of the result
    table: Any  # the format of a floating table, or the structure of a stored one

    def __call__(self, indices: jax.Array, *arrays: jax.Array) -> jax.Array:
        look_up = lambda x: lax.gather(x, indices, slice_sizes=(1, x.shape[1]), **dict(self.params))
        if isinstance(self.table, Int8):
            (table,) = arrays
            return fake_quantize(FakeQuantized(look_up(table), self.table, table_layout(table.shape)), self.dtype)
        return fake_quantize(jax.tree.map(look_up, jax.tree.unflatten(self.table, arrays)), self.dtype)

    def __str__(self) -> str:
        return str(self.table if isinstance(self.table, Int8) else _read_structure(self.table).format)


def describe_lookup(eqn: JaxprEqn, table: Int8) -> LookUp | None:
    """Describes a `gather` that reads whole rows of a table of two axes; returns None for any other."""
    shape, params = shape_of(eqn.invars[0]), dict(eqn.params)
    sizes, fill = params.pop("slice_sizes"), params.pop("fill_value")
    numbers, ndim = params["dimension_numbers"], len(shape_of(eqn.outvars[0]))
    # Rows out of bounds are nan by their scale.
    if len(shape) != 2 or tuple(sizes) != (1, shape[1]) or (fill is not None and not np.isnan(fill)):
        return None
    if tuple(numbers.collapsed_slice_dims) != (0,) or tuple(numbers.offset_dims) != (ndim - 1,):
        return None
    dtype: Any = float_dtype(eqn.outvars[0])
    return LookUp(tuple(params.items()), dtype, table)


def describe_stored_lookup(eqn: JaxprEqn, structure: Any, order: "Order") -> LookUp | str:
    """Describes a lookup of rows of a stored table, or says that it is another read."""
    static, shape = _read_structure(structure), shape_of(eqn.invars[0])
    is_table = isinstance(static.format, Int8) and static.layout == Layout(shape[-1:], 0)
    found = describe_lookup(eqn, static.format) if is_table and order == (-2, -1) else None
    return "gather reads it" if found is None else dataclasses.replace(found, table=structure)


def choose_table_format(quantization: Quantization, shape: tuple[int, ...]) -> Int8 | str:
    """Returns the format in which the rows of a table are rounded, or why they are not."""
    format = None if isinstance(quantization, BlockFormat | Float8) else quantization.for_tables
    if not isinstance(format, Int8) or len(shape) != 2:
        return WHY_TABLES_WIDE
    return reason_unquantized(shape, table_layout(shape), format) or format


Order = tuple[int, ...] | None
"""The axes of a weight, as negative numbers, in the order of a value that it was moved to; None if unknown."""


WHY_MISFIT = "its scales are not shared along the axes that are summed over"
WHY_NAMED = f"it was quantized by its name, and {WHY_MISFIT}"
"""Where the floating weight is quantized along these axes, and so to other numbers."""


def describe_stored_product(
    eqn: JaxprEqn, position: int, structure: Any, order: Order
) -> StoredProduct | StoredRaggedProduct | str:
    """Describes a matmul or convolution whose operand at `position` is a stored weight, or returns why it is left."""
    if eqn.primitive.name == "ragged_dot_general":
        product = _describe_ragged_product(eqn, position, None, None)
        if isinstance(product, str) or product.is_transposed or order != (-3, -2, -1):
            return "it is a grouped matmul"
        return StoredRaggedProduct(structure, product.options)
    if order is None or _TAKEN in order:
        return "it is moved in a way that is not followed"
    axes = [axis % len(order) for axis in order]  # of the weight
    params = {k: v for k, v in eqn.params.items() if k != "preferred_element_type"}
    summed = find_summed_axes(eqn, position)
    weight, why = _read_structure(structure), None
    if not {order[axis] for axis in summed} <= set(weight.layout.axes):
        why = WHY_MISFIT if find_layout(eqn, position, order, weight.format) is None else WHY_NAMED
    if eqn.primitive.name == "conv_general_dilated":
        if position == 0:
            return "it is the input of a convolution"
        numbers = params["dimension_numbers"]
        params["dimension_numbers"] = numbers._replace(rhs_spec=tuple(axes[axis] for axis in numbers.rhs_spec))
        given = {key: value for key, value in params.items() if key != "out_sharding" or value is not None}
        return StoredProduct(eqn.primitive.name, structure, tuple(given.items()), (), why)
    contracted, batch = params["dimension_numbers"]
    other = 1 - position
    summed_axes, other_axes = _pair_axes(contracted, position, axes)
    batch_axes = tuple(axes[axis] for axis in batch[position])
    params["dimension_numbers"] = ((other_axes, summed_axes), (batch[other], batch_axes))
    used = [{*contracted[i], *batch[i]} for i in range(2)]
    free = [[(i, axis) for axis in range(len(shape_of(eqn.invars[i]))) if axis not in used[i]] for i in range(2)]
    shared = [(2, i) for i in range(len(batch[0]))]
    wanted = [*shared, *free[0], *free[1]]
    made = [*shared, *free[other], *sorted(free[position], key=lambda label: axes[label[1]])]
    out_order = tuple(made.index(label) for label in wanted)
    if params.get("out_sharding") is not None and out_order != tuple(sorted(out_order)):
        return "its output has a sharding, and would be transposed"
    return StoredProduct(eqn.primitive.name, structure, tuple(params.items()), out_order, why)


def find_summed_axes(eqn: JaxprEqn, position: int) -> tuple[int, ...]:
    """Returns the axes of an operand of a matmul, or of the kernel of a convolution, that are summed over."""
    if eqn.primitive.name == "conv_general_dilated":
        return tuple(eqn.params["dimension_numbers"].rhs_spec[1:])
    if eqn.primitive.name == "ragged_dot_general":
        return tuple(eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][position])
    return tuple(eqn.params["dimension_numbers"][0][position])


def find_layout(eqn: JaxprEqn, position: int, order: Order, quantization: Quantization) -> Layout | None:
    """Returns the layout in which the weight of a quantized matmul can be stored, or None if it cannot."""
    shape = shape_of(eqn.invars[position])
    order = _trim(order, len(shape))
    if order is None or _TAKEN in order or isinstance(quantization, Float8):
        return None
    if eqn.primitive.name == "ragged_dot_general":
        is_plain = order == (-3, -2, -1) and find_summed_axes(eqn, position) == (1,)
        return Layout(shape[1:2], 1) if is_plain else None
    summed = [order[axis] for axis in sorted(find_summed_axes(eqn, position))]
    axes = sorted(summed)
    if axes != list(range(axes[0], axes[0] + len(axes))):
        return None
    if axes != summed and not isinstance(quantization, Int8):  # blocks of the value are none of the weight
        return None
    is_dot = eqn.primitive.name == "dot_general"
    batch = {order[axis] for axis in eqn.params["dimension_numbers"][1][position]} if is_dot else set()
    if batch != set(range(-len(shape), -len(shape) + len(batch))):  # a vmap over another axis slices layouts wrong
        return None
    lengths = dict(zip(order, shape, strict=True))
    layout = Layout(tuple(lengths[axis] for axis in axes), -1 - axes[-1])
    if isinstance(quantization, Int8):
        return layout
    # Blocks, and tables in another format: only as kernels, behind the axes of a batch.
    is_in_order = isinstance(quantization, Int4 | NF4) or batch == {axis for axis in order if axis < axes[0]}
    return layout if layout.channels and is_in_order else None


ANNOTATED = ("copy", "sharding_constraint")
"""Primitives that return their operand, perhaps elsewhere."""

TAKING = ("slice", "dynamic_slice", "squeeze")
"""Primitives that may take one element along the axes of a stack."""

_TAKEN = 0
"""Stands in an `Order` for an axis of a stack that one element was taken along."""


def move_axes(eqn: JaxprEqn, order: Order) -> Order:
    """Returns the order of the axes of a weight after an equation that moves it."""
    if eqn.primitive.name == "convert_element_type" or eqn.primitive.name in ANNOTATED:
        return order
    shape, name = shape_of(eqn.invars[0]), eqn.primitive.name
    order = _trim(order, len(shape))
    if order is None or name not in ("transpose", *TAKING):
        return None
    if name == "transpose":
        return tuple(order[axis] for axis in eqn.params["permutation"])
    if name == "squeeze":
        dropped = eqn.params["dimensions"]
        is_first = [shape[n] == 1 and order[n] == n - len(shape) and set(range(n)) <= {*dropped} for n in dropped]
        kept = tuple(axis for n, axis in enumerate(order) if n not in dropped)
        return kept if all(one or order[n] == _TAKEN for n, one in zip(dropped, is_first, strict=True)) else None
    sizes = shape_of(eqn.outvars[0])
    cut = [n for n in range(len(shape)) if sizes[n] != shape[n]]
    is_one = all(n == i and sizes[n] == 1 and order[n] == n - len(shape) for i, n in enumerate(cut))
    return tuple(_TAKEN if n in cut else axis for n, axis in enumerate(order)) if is_one else None


def _trim(order: Order, ndim: int) -> Order:
    """Returns the order for a value in the body of a scan, which has one layer of a stack."""
    last = () if order is None else order[len(order) - ndim :]
    kept = sorted(axis for axis in last if axis != _TAKEN)
    return last if len(last) == ndim and kept == list(range(-len(kept), 0)) else None


def _read_structure(structure: Any) -> Any:
    """Returns a stored weight of this structure without arrays."""
    return jax.tree.unflatten(structure, [None] * structure.num_leaves)


def _reorder(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return x if order == tuple(sorted(order)) else lax.transpose(x, order)


Product = WeightProduct | RaggedProduct | AttentionProduct
