"""Products of numbers in blocks that share a scale, forward and backward."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding

from .._block_formats import BlockFormat
from .._mapped_axes import vary
from ..interpreter._module_paths import ROUNDING_SCOPE
from ._amax_history import varying_axes
from ._array import QuantizedArray
from ._bilinear import Bilinear, Convolution, Labels
from ._block_numbers import Blocks, dequantize
from ._block_operands import pad_axis, round_gradient, round_input, round_weight

_PRODUCT = (((2,), (1,)), ((0,), (0,)))
"""`(batch, rows, n)` times `(batch, n, columns)`, as `lax.dot_general` says it."""


def block_product(
    operation: Bilinear,
    left: jax.Array,
    weight: jax.Array | QuantizedArray,
    format: BlockFormat,
    key: jax.Array | None = None,
) -> jax.Array:
    """Computes `operation(left, weight)` in blocks: both operands, and in the backward pass both of each product.

    The caller leaves the weights for which `why_left` has a reason, and the operations that are not `is_matmul`.

    Args:
      operation: what to compute.
      left: floating.
      weight: floating, which is rounded from the dtype it has; or stored.
      format: how to round.
      key: of the noise of `stochastic_rounding`.

    Returns:
      The result in the dtype of `left`, or in the preferred one of the operation. The gradient of a floating weight has
      its dtype, and is computed from sums in float32.

    Source: OCP Microscaling Formats (MX) Specification 1.0, 2023, section 6; `lax.scaled_dot` multiplies.
    """
    multiply = functools.partial(_multiply_blocks, operation, format)
    out_sharding = _find_out_sharding(operation, left, weight)
    if out_sharding is not None:
        multiply = jax.sharding.auto_axes(multiply, out_sharding=out_sharding)
    return multiply(left, weight, key)


def _find_out_sharding(
    operation: Bilinear, left: jax.Array, weight: jax.Array | QuantizedArray
) -> NamedSharding | None:
    """How the result of an operation lies on a mesh whose axes are part of types, if there is one.

    Blocks lie across the axes of arrays that merge to one. So XLA shards what a product in blocks does inside, as on a
    mesh of other axes.

    Raises:
      ShardingTypeError: JAX needs `out_sharding` to know, as for the operation without blocks.
    """
    if AxisType.Explicit not in jax.typeof(left).sharding.mesh.axis_types:
        return None
    numbers = lambda w: w.dequantize(left.dtype) if isinstance(w, QuantizedArray) else w.astype(left.dtype)
    program = jax.make_jaxpr(lambda x, w: operation.compute(x, numbers(w)))(left, weight)
    (out,) = program.out_avals
    return out.sharding


def _multiply_blocks(
    operation: Bilinear,
    format: BlockFormat,
    left: jax.Array,
    weight: jax.Array | QuantizedArray,
    key: jax.Array | None,
) -> jax.Array:
    order = _find_order(operation)
    axes = tuple(varying_axes(left, weight.values if isinstance(weight, QuantizedArray) else weight))
    # In `shard_map` a custom derivative varies over devices as its operand does.
    rows = _merge_axes(vary(left, axes), operation.left, order.batch, order.rows, order.summed)
    spec = _ProductSpec(format, np.dtype(operation.compute.preferred_element_type or left.dtype))
    if isinstance(weight, QuantizedArray):
        stored = jax.tree.map(lambda x: vary(lax.stop_gradient(x), axes), weight)
        out: jax.Array = _multiply_stored(spec, rows, _merge_blocks(stored, len(order.batch)), key)
    else:
        matrix = _merge_axes(vary(weight, axes), operation.right, order.batch, order.summed, order.columns)
        out = _multiply_rounded(spec, rows, matrix, key)
    return _split_axes(out, operation, order, left.shape, weight.shape)


def is_matmul(operation: Bilinear) -> bool:
    """Whether an operation is a product of matrices, in which blocks can lie along the axes that are summed over.

    A convolution is none, nor is an einsum that sums one of its operands alone.
    """
    alone = (set(operation.left) ^ set(operation.right)) - set(operation.out)
    return not isinstance(operation.compute, Convolution) and not alone


def has_stored_order(operation: Bilinear) -> bool:
    """Whether the axes of a weight are in the order in which blocks are stored: of a batch, summed over, of outputs."""
    order = _find_order(operation)
    return operation.right == (*order.batch, *order.summed, *order.columns)


@dataclasses.dataclass(frozen=True)
class _ProductSpec:
    """What a product is, without its numbers.

    Attributes:
      format: how to round.
      dtype: of the result.
    """

    format: BlockFormat
    dtype: np.dtype


class _Order(NamedTuple):
    """The labels of a product by what becomes of them: `rows` in the order of the input, others in the weight's."""

    batch: Labels
    rows: Labels
    summed: Labels
    columns: Labels


def _find_order(operation: Bilinear) -> _Order:
    left, right, out = operation.left, operation.right, operation.out
    shared = [label for label in right if label in left]
    return _Order(
        batch=tuple(label for label in shared if label in out),
        rows=tuple(label for label in left if label not in right),
        summed=tuple(label for label in shared if label not in out),
        columns=tuple(label for label in right if label not in left),
    )


def _merge_axes(x: jax.Array, labels: Labels, *groups: Labels) -> jax.Array:
    """The axes of an array in three groups, each merged to one axis."""
    order = [labels.index(label) for group in groups for label in group]
    moved = x if order == sorted(order) else lax.transpose(x, order)
    lengths = dict(zip(labels, x.shape, strict=True))
    return moved.reshape([math.prod(lengths[label] for label in group) for group in groups])


def _merge_blocks(weight: QuantizedArray, batch: int) -> Blocks:
    """The blocks of a stored weight, as `(batch, inputs, outputs)`."""
    blocks = weight.read_blocks()
    lead = math.prod(weight.shape[:batch])
    merge = lambda x: x.reshape(lead, *x.shape[-2:])
    return jax.tree.map(merge, blocks)


def _split_axes(
    out: jax.Array, operation: Bilinear, order: _Order, left: tuple[int, ...], right: tuple[int, ...]
) -> jax.Array:
    """A result `(batch, rows, columns)` with the axes of the operation's."""
    lengths = dict(zip(operation.left, left, strict=True)) | dict(zip(operation.right, right, strict=True))
    made = (*order.batch, *order.rows, *order.columns)
    out = out.reshape([lengths[label] for label in made])
    axes = [made.index(label) for label in operation.out]
    return out if axes == sorted(axes) else lax.transpose(out, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_rounded(spec: _ProductSpec, rows: jax.Array, weight: jax.Array, key: jax.Array | None) -> jax.Array:
    """`(batch, rows, inputs)` times a floating weight `(batch, inputs, outputs)`."""
    return _forward(spec, rows, weight, key)[0]


def _forward(spec: _ProductSpec, rows: jax.Array, weight: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Any]:
    format, block = spec.format, spec.format.block_size
    inputs = round_input(rows, format, 2, block)
    out = _multiply(inputs, round_weight(weight, format, -2, block), spec.dtype)
    return out, (rows, weight, key)


def _backward(spec: _ProductSpec, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    rows, weight, key = residuals
    keys = (None, None) if key is None else jax.random.split(key)
    rows_grad = _grad_rows(spec, grad, weight, keys[0]).astype(rows.dtype)
    return rows_grad, _grad_weight(spec, grad, rows, keys[1]).astype(weight.dtype), None


_multiply_rounded.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_stored(spec: _ProductSpec, rows: jax.Array, weight: Blocks, key: jax.Array | None) -> jax.Array:
    """`(batch, rows, inputs)` times a stored weight, which has no gradient."""
    return _forward_stored(spec, rows, weight, key)[0]


def _forward_stored(
    spec: _ProductSpec, rows: jax.Array, weight: Blocks, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    like = jnp.zeros((), rows.dtype)
    return _multiply(round_input(rows, spec.format, 2, spec.format.block_size), weight, spec.dtype), (like, weight, key)


def _backward_stored(spec: _ProductSpec, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    like, weight, key = residuals
    key = None if key is None else jax.random.split(key)[0]
    return _grad_rows(spec, grad, dequantize(weight, 1), key).astype(like.dtype), None, None


_multiply_stored.defvjp(_forward_stored, _backward_stored)


def _grad_rows(spec: _ProductSpec, grad: jax.Array, weight: jax.Array, key: jax.Array | None) -> jax.Array:
    """The gradient of the input: that of the result, times the weight; the sum is over the outputs."""
    format, block = spec.format, spec.format.block_size
    grads = round_gradient(pad_axis(grad, 2, block), key, format, 2, block)
    columns = round_weight(pad_axis(weight, 2, block), format, -1, block)
    return _multiply(grads, _transpose(columns), jnp.float32)


def _grad_weight(spec: _ProductSpec, grad: jax.Array, rows: jax.Array, key: jax.Array | None) -> jax.Array:
    """The gradient of the weight: the input times the gradient of the result; the sum is over the rows."""
    format, block = spec.format, spec.format.block_size
    inputs = round_input(pad_axis(rows, 1, block), format, 1, block)
    grads = round_gradient(pad_axis(grad, 1, block), key, format, 1, block)
    return _multiply(_transpose(inputs), grads, jnp.float32)


def _transpose(blocks: Blocks) -> Blocks:
    return jax.tree.map(lambda x: lax.transpose(x, (0, 2, 1)), blocks)


def _multiply(left: Blocks, right: Blocks, dtype: Any) -> jax.Array:
    """Multiplies `(batch, rows, n)` by `(batch, n, columns)`, with sums in float32."""
    out = lax.scaled_dot(
        left.values,
        right.values,
        lhs_scale=left.scale,
        rhs_scale=right.scale,
        dimension_numbers=_PRODUCT,
        preferred_element_type=jnp.float32,
    )
    out = vary(out, tuple(varying_axes(left.values, right.values)))  # `scaled_dot` forgets over which axes they vary
    with jax.named_scope(ROUNDING_SCOPE):
        for scale in (left.tensor_scale, right.tensor_scale):  # one after the other: their product may underflow
            out = out if scale is None else out * scale
    return out.astype(dtype)
