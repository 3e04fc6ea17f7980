"""Block-scaled matmuls and their derivatives."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding

from ..._base import ROUNDING_SCOPE, vary
from ...policy import NVFP4, BlockFormat, needs_rng
from .._numbers import Blocks, dequantize, fence_on_cpu, mix_rows, pad_axis, round_operand
from .._weights import QuantizedArray
from ._amax_history import varying_axes
from ._bilinear import Bilinear, Labels

_BATCHED_MATMUL = (((2,), (1,)), ((0,), (0,)))  # (batch, rows, n) times (batch, n, columns)
ROUNDING = "rounding"  # Flax's name of the stream of PRNG keys


def block_product(
    operation: Bilinear,
    left: jax.Array,
    weight: jax.Array | QuantizedArray,
    format: BlockFormat,
    key: jax.Array | None = None,
) -> jax.Array:
    """Computes `operation(left, weight)` with both operands in blocks, and likewise in the backward pass.

    The caller has checked `reason_unquantized` and `is_matmul`. The gradient of a floating weight is summed in float32.

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
    """Returns the sharding of the output on a mesh with explicit axes; None without one."""
    # Blocks span merged axes, so XLA shards the inside of the matmul. JAX raises if it needs `out_sharding`.
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
    # In `shard_map` the outputs of a custom derivative must vary over the same axes as its inputs.
    rows = _merge_axes(vary(left, axes), operation.left, order.batch, order.rows, order.summed)
    if isinstance(weight, QuantizedArray):
        stored = jax.tree.map(lambda x: vary(lax.stop_gradient(x), axes), weight)
        lead = math.prod(weight.shape[: len(order.batch)])
        right = jax.tree.map(lambda x: x.reshape(lead, *x.shape[-2:]), stored.read_blocks())
    else:
        right = _merge_axes(vary(weight, axes), operation.right, order.batch, order.summed, order.columns)
    dtype = np.dtype(operation.compute.preferred_element_type or left.dtype)
    out: jax.Array = _multiply_rows(format, dtype, rows, right, key)
    return _split_axes(out, operation, order, left.shape, weight.shape)


def has_stored_order(operation: Bilinear) -> bool:
    """True if the axes of the weight are in the order of stored blocks: batch, inputs, outputs."""
    order = _find_order(operation)
    return operation.right == (*order.batch, *order.summed, *order.columns)


class _Order(NamedTuple):
    """Labels of a matmul by role; `rows` in the order of the input, the others in the order of the weight."""

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
    """Merges the axes of each of three groups of labels into one."""
    order = [labels.index(label) for group in groups for label in group]
    moved = x if order == sorted(order) else lax.transpose(x, order)
    lengths = dict(zip(labels, x.shape, strict=True))
    return moved.reshape([math.prod(lengths[label] for label in group) for group in groups])


def _split_axes(
    out: jax.Array, operation: Bilinear, order: _Order, left: tuple[int, ...], right: tuple[int, ...]
) -> jax.Array:
    """Splits the axes of an output `(batch, rows, columns)`, and orders them as the operation does."""
    lengths = dict(zip(operation.left, left, strict=True)) | dict(zip(operation.right, right, strict=True))
    made = (*order.batch, *order.rows, *order.columns)
    out = out.reshape([lengths[label] for label in made])
    axes = [made.index(label) for label in operation.out]
    return out if axes == sorted(axes) else lax.transpose(out, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply_rows(
    format: BlockFormat, dtype: np.dtype, rows: jax.Array, weight: jax.Array | Blocks, key: jax.Array | None
) -> jax.Array:
    """Multiplies `(batch, rows, inputs)` by `(batch, inputs, outputs)`; a stored weight has no gradient."""
    return _forward(format, dtype, rows, weight, key)[0]


def _forward(
    format: BlockFormat, dtype: np.dtype, rows: jax.Array, weight: jax.Array | Blocks, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    inputs, is_stored = round_operand(rows, None, format, 2, "input"), isinstance(weight, Blocks)
    right = weight if isinstance(weight, Blocks) else round_operand(weight, None, format, -2, "weight")
    # Only the gradient of the weight needs the rows; the dtype is enough for their own.
    return _multiply(inputs, right, dtype), (jnp.zeros((), rows.dtype) if is_stored else rows, weight, key)


def _forward_for_gradient(
    format: BlockFormat, dtype: np.dtype, rows: jax.Array, weight: jax.Array | Blocks, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    if key is None and needs_rng(format):
        raise ValueError(
            f"{str(format)!r} rounds gradients stochastically, and a matmul that is differentiated has no key. Pass "
            f"one: model.apply(variables, x, rngs={{{ROUNDING!r}: key}}) in linen, in nn.scan and nn.vmap with "
            f"split_rngs={{{ROUNDING!r}: True}}; jmp_policy.nnx.set_rounding_rngs(model, nnx.Rngs({ROUNDING}=0)) in "
            "nnx; or quant.dot_general(..., key=key)."
        )
    return _forward(format, dtype, rows, weight, key)


def _backward(format: BlockFormat, dtype: np.dtype, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    rows, weight, key = residuals
    keys = (None, None) if key is None else jax.random.split(key)
    if isinstance(weight, Blocks):
        return _grad_rows(format, grad, dequantize(weight, 1), keys[0]).astype(rows.dtype), None, None
    rows_grad = _grad_rows(format, grad, weight, keys[0]).astype(rows.dtype)
    return rows_grad, _grad_weight(format, grad, rows, keys[1]).astype(weight.dtype), None


_multiply_rows.defvjp(_forward_for_gradient, _backward)


def _grad_rows(format: BlockFormat, grad: jax.Array, weight: jax.Array, key: jax.Array | None) -> jax.Array:
    block = format.block_size
    grads = round_operand(pad_axis(grad, 2, block), key, format, 2, "gradient")
    columns = round_operand(pad_axis(weight, 2, block), None, format, -1, "weight")
    return _multiply(grads, _transpose(columns), jnp.float32)


def _grad_weight(format: BlockFormat, grad: jax.Array, rows: jax.Array, key: jax.Array | None) -> jax.Array:
    block = format.block_size
    rows, grad = pad_axis(rows, 1, block), pad_axis(grad, 1, block)
    if isinstance(format, NVFP4) and format.hadamard:
        rows, grad = mix_rows(rows, block), mix_rows(grad, block)
    inputs = round_operand(rows, None, format, 1, "input")
    return _multiply(_transpose(inputs), round_operand(grad, key, format, 1, "gradient"), jnp.float32)


def _transpose(blocks: Blocks) -> Blocks:
    return jax.tree.map(lambda x: lax.transpose(x, (0, 2, 1)), blocks)


def _multiply(left: Blocks, right: Blocks, dtype: Any) -> jax.Array:
    """Multiplies `(batch, rows, n)` by `(batch, n, columns)` with float32 accumulation."""
    if not left.values.shape[2]:  # a weight gradient without rows; `scaled_dot` would divide by zero
        return lax.dot_general(left.values.astype(dtype), right.values.astype(dtype), _BATCHED_MATMUL)
    left, right = fence_on_cpu((left, right))
    out = lax.scaled_dot(
        left.values,
        right.values,
        lhs_scale=left.scale,
        rhs_scale=right.scale,
        dimension_numbers=_BATCHED_MATMUL,
        preferred_element_type=jnp.float32,
    )
    # `scaled_dot` loses the varying axes of `shard_map`.
    out = fence_on_cpu(vary(out, tuple(varying_axes(left.values, right.values))))
    with jax.named_scope(ROUNDING_SCOPE):
        for scale in (left.tensor_scale, right.tensor_scale):  # one by one: their product may underflow
            out = out if scale is None else out * scale
    return out.astype(dtype)
