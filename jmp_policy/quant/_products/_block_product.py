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

from ..._base import vary
from ..._jaxpr import ROUNDING_SCOPE
from ...policy import NVFP4, BlockFormat, draws_noise
from .._numbers import Blocks, dequantize, fence_on_cpu, mix_rows, pad_axis, round_gradient, round_input, round_weight
from .._weights import QuantizedArray
from ._amax_history import varying_axes
from ._bilinear import Bilinear, Convolution, Labels

_PRODUCT = (((2,), (1,)), ((0,), (0,)))
"""`(batch, rows, n)` times `(batch, n, columns)`, as `lax.dot_general` says it."""

ROUNDING = "rounding"
"""What Flax's models call the stream of the keys for noise."""


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
      key: of the noise of `stochastic_rounding`, for the derivative.

    Returns:
      The result in the dtype of `left`, or in the preferred one of the operation. The gradient of a floating weight has
      its dtype, and is computed from sums in float32.

    Raises:
      ValueError: a product is differentiated, and has no key to round gradients at random by.

    Source: OCP Microscaling Formats (MX) Specification 1.0, 2023, section 6; `lax.scaled_dot` multiplies.
    """
    out_sharding = _find_out_sharding(operation, left, weight)
    if out_sharding is None:
        return _multiply_blocks(operation, format, left, weight, key)
    multiply: Any = jax.sharding.auto_axes(
        functools.partial(_multiply_blocks, operation, format), out_sharding=out_sharding
    )
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


def is_matmul(operation: Bilinear, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether an operation is a product of matrices, in which blocks can lie along the axes that are summed over.

    A convolution is none, nor is an einsum that sums one of its operands alone, or repeats one.

    Args:
      operation: what to compute.
      left: the shape of the input.
      right: the shape of the weight.
    """
    if isinstance(operation.compute, Convolution):
        return False
    lengths, others = dict(zip(operation.left, left, strict=True)), dict(zip(operation.right, right, strict=True))
    alone = (lengths.keys() ^ others.keys()) - set(operation.out)
    return not alone and all(lengths[label] == others[label] for label in lengths.keys() & others.keys())


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


def _forward_for_gradient(
    spec: _ProductSpec, rows: jax.Array, weight: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    _check_key(spec, key)
    return _forward(spec, rows, weight, key)


def _backward(spec: _ProductSpec, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    rows, weight, key = residuals
    keys = (None, None) if key is None else jax.random.split(key)
    rows_grad = _grad_rows(spec, grad, weight, keys[0]).astype(rows.dtype)
    return rows_grad, _grad_weight(spec, grad, rows, keys[1]).astype(weight.dtype), None


_multiply_rounded.defvjp(_forward_for_gradient, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_stored(spec: _ProductSpec, rows: jax.Array, weight: Blocks, key: jax.Array | None) -> jax.Array:
    """`(batch, rows, inputs)` times a stored weight, which has no gradient."""
    return _forward_stored(spec, rows, weight, key)[0]


def _forward_stored(
    spec: _ProductSpec, rows: jax.Array, weight: Blocks, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    like = jnp.zeros((), rows.dtype)
    return _multiply(round_input(rows, spec.format, 2, spec.format.block_size), weight, spec.dtype), (like, weight, key)


def _forward_stored_for_gradient(
    spec: _ProductSpec, rows: jax.Array, weight: Blocks, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    _check_key(spec, key)
    return _forward_stored(spec, rows, weight, key)


def _backward_stored(spec: _ProductSpec, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    like, weight, key = residuals
    key = None if key is None else jax.random.split(key)[0]
    return _grad_rows(spec, grad, dequantize(weight, 1), key).astype(like.dtype), None, None


_multiply_stored.defvjp(_forward_stored_for_gradient, _backward_stored)


def _check_key(spec: _ProductSpec, key: jax.Array | None) -> None:
    """Checks that there is a key for the noise of a product that is differentiated; others draw none.

    Raises:
      ValueError: there is none.
    """
    if key is None and draws_noise(spec.format):
        raise ValueError(
            f"{str(spec.format)!r} rounds gradients at random, and a product that is differentiated has no key. Pass "
            f"one: model.apply(variables, x, rngs={{{ROUNDING!r}: key}}) in linen, in nn.scan and nn.vmap with "
            f"split_rngs={{{ROUNDING!r}: True}}; jmp_policy.nnx.set_rounding(model, nnx.Rngs({ROUNDING}=0)) in nnx; or "
            "quant.dot_general(..., key=key)."
        )


def _grad_rows(spec: _ProductSpec, grad: jax.Array, weight: jax.Array, key: jax.Array | None) -> jax.Array:
    """The gradient of the input: that of the result, times the weight; the sum is over the outputs."""
    format, block = spec.format, spec.format.block_size
    grads = round_gradient(pad_axis(grad, 2, block), key, format, 2, block)
    columns = round_weight(pad_axis(weight, 2, block), format, -1, block)
    return _multiply(grads, _transpose(columns), jnp.float32)


def _grad_weight(spec: _ProductSpec, grad: jax.Array, rows: jax.Array, key: jax.Array | None) -> jax.Array:
    """The gradient of the weight: the input times the gradient of the result; the sum is over the rows."""
    format, block = spec.format, spec.format.block_size
    rows, grad = pad_axis(rows, 1, block), pad_axis(grad, 1, block)
    if isinstance(format, NVFP4) and format.hadamard:
        rows, grad = mix_rows(rows, block), mix_rows(grad, block)
    inputs = round_input(rows, format, 1, block)
    return _multiply(_transpose(inputs), round_gradient(grad, key, format, 1, block), jnp.float32)


def _transpose(blocks: Blocks) -> Blocks:
    return jax.tree.map(lambda x: lax.transpose(x, (0, 2, 1)), blocks)


def _multiply(left: Blocks, right: Blocks, dtype: Any) -> jax.Array:
    """Multiplies `(batch, rows, n)` by `(batch, n, columns)`, with sums in float32."""
    if not left.values.shape[2]:  # the gradient of a weight that no row was multiplied by; `scaled_dot` divides by zero
        return lax.dot_general(left.values.astype(dtype), right.values.astype(dtype), _PRODUCT)
    left, right = fence_on_cpu((left, right))
    out = lax.scaled_dot(
        left.values,
        right.values,
        lhs_scale=left.scale,
        rhs_scale=right.scale,
        dimension_numbers=_PRODUCT,
        preferred_element_type=jnp.float32,
    )
    # JAX forgets along which axes of `shard_map` this varies.
    out = fence_on_cpu(vary(out, tuple(varying_axes(left.values, right.values))))
    with jax.named_scope(ROUNDING_SCOPE):
        for scale in (left.tensor_scale, right.tensor_scale):  # one after the other: their product may underflow
            out = out if scale is None else out * scale
    return out.astype(dtype)
