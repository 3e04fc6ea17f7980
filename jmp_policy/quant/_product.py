"""Matmuls and convolutions with quantized weights, and block-scaled matmuls with their derivatives."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType

from .._base import ROUNDING_SCOPE, vary
from ..policy import E4M3, NVFP4, PER_CHANNEL, BlockFormat, Int4, Int8, needs_rng
from ._array import QuantizedArray
from ._bilinear import Bilinear, Labels, RaggedDot, is_matmul, varying_axes, widen_on_cpu, without_preferred_dtype
from ._block_numbers import Blocks, dequantize, mix_rows, pad_axes, round_operand, spread_over_axis
from ._numbers import (
    Quantized,
    fence_on_cpu,
    measure_rows,
    narrow_sums,
    quantize_e4m3,
    quantize_symmetric,
    to_numbers,
)
from ._observe import defer, observe_product
from ._quantizer import FakeQuantized, StoredWeight, fake_quantize

_BATCHED_MATMUL = (((2,), (1,)), ((0,), (0,)))  # (batch, rows, n) times (batch, n, columns)
_LARGEST_SUMS = 2**24  # float32 values of all blocks of a matmul that are in memory at once
ROUNDING = "rounding"  # Flax's name of the stream of PRNG keys


def multiply_quantized(
    operation: Bilinear, left: jax.Array, weight: StoredWeight, key: jax.Array | None = None
) -> jax.Array:
    """Computes `operation(left, weight)` with a quantized weight, and straight-through derivatives.

    - `Int8` with activations: each row of `left` is quantized, or all of it by one static scale; int8 values are
      multiplied into int32, and the sums are scaled in float32. This needs one weight scale per sum.
    - `Int4` with activations: likewise for each block. This needs a matmul that sums over all blocks of a weight
      without input scales.
    - `E4M3` with activations: as `Int4`, in e4m3, with a scale for each row and block of `left`.
    - `Int8`, and `E4M3` with a scale per output, without activations: `left` is multiplied by the values, and the sums
      are scaled in float32. This needs a matmul with one weight scale per sum.
    - Block formats with activations: see `block_product`. This needs blocks along all summed axes, in stored order.
    - Otherwise the weight is dequantized to the dtype of `left`.

    Source: Dettmers et al., LLM.int8(), NeurIPS 2022, section 2.2 (a scale per row and column).
    """
    return defer(functools.partial(_multiply, operation), left, weight, key)


def _multiply(operation: Bilinear, left: jax.Array, weight: StoredWeight, key: jax.Array | None) -> jax.Array:
    weight = observe_product(operation, left, weight)
    if isinstance(weight, QuantizedArray):
        weight = jax.tree.map(lax.stop_gradient, weight)
    if isinstance(weight.format, BlockFormat) and is_block_product(operation, left, weight):
        right = weight if isinstance(weight, QuantizedArray) else weight.array
        return block_product(operation, left, right, weight.format, key)
    if not multiplies_values(operation, left, weight):
        return operation.compute(left, fake_quantize(weight, left.dtype))
    # Rounded outside of the function with the custom derivative, which would round again.
    if isinstance(weight, QuantizedArray):
        right, rounded = None, weight
    else:
        right = weight.array
        rounded = dataclasses.replace(weight, array=lax.stop_gradient(right)).quantize()
    rows = _quantize_rows(operation, lax.stop_gradient(left), rounded) if weight.format.activations else None
    return multiply_integers(operation, left, right, rows, rounded)


def is_block_product(operation: Bilinear, left: jax.Array, weight: StoredWeight) -> bool:
    """True if the operation multiplies blocks, because the weight's blocks span all of its summed axes."""
    if not isinstance(weight.format, BlockFormat) or not weight.format.activations:
        return False
    order = _find_order(operation)
    is_stored_so = operation.right == (*order.batch, *order.summed, *order.columns)
    return is_stored_so and _sums_blocks(operation, left, weight)


def _sums_blocks(operation: Bilinear, left: jax.Array, weight: StoredWeight) -> bool:
    """True if the operation is a matmul that sums over the axes of the weight's blocks, and no others."""
    blocked = {axis % weight.ndim for axis in weight.layout.axes}
    lies_along = set(operation.summed_axes(operation.right)) == blocked
    return lies_along and is_matmul(operation, left.shape, weight.shape)


def is_integer_product(operation: Bilinear, left: jax.Array, weight: Any) -> bool:
    """True if the operation multiplies integers."""
    return rounds_rows(operation, left, weight) and isinstance(weight.format, Int8 | Int4)


def rounds_rows(operation: Bilinear, left: jax.Array, weight: Any) -> bool:
    """True if inputs are rounded to integers or e4m3: each sum, or each block of one, has one scale of the weight."""
    if not isinstance(weight, QuantizedArray | FakeQuantized):
        return False
    if not isinstance(weight.format, Int8 | Int4 | E4M3) or not weight.format.activations:
        return False
    if not isinstance(weight.format, Int8):
        # Scales or an order of the inputs belong to the dequantized weight.
        of_inputs = (weight.input_scale, weight.input_order) if isinstance(weight, QuantizedArray) else ()
        return all(array is None for array in of_inputs) and _sums_blocks(operation, left, weight)
    shared = {axis % weight.ndim for axis in weight.layout.axes}
    # A convolution with batch groups sums over examples, which have different scales.
    batch_groups = dict(getattr(operation.compute, "options", ())).get("batch_group_count", 1)
    return set(operation.summed_axes(operation.right)) <= shared and batch_groups == 1


def multiplies_values(operation: Bilinear, left: jax.Array, weight: Any) -> bool:
    """True if the values of a weight are multiplied as they are stored, and the sums scaled."""
    if rounds_rows(operation, left, weight):
        return True
    if not isinstance(weight, QuantizedArray | FakeQuantized) or weight.format.activations:
        return False
    format, shared = weight.format, {axis % weight.ndim for axis in weight.layout.axes}
    is_per_output = isinstance(format, Int8) or (isinstance(format, E4M3) and format.block_size == PER_CHANNEL)
    has_one_scale = set(operation.summed_axes(operation.right)) <= shared
    return is_per_output and has_one_scale and is_matmul(operation, left.shape, weight.shape)


def _quantize_rows(operation: Bilinear, left: jax.Array, weight: QuantizedArray) -> Quantized:
    """Quantizes each row of an input to int8 by its largest magnitude, or all rows by the calibrated one."""
    if isinstance(weight.format, E4M3):
        return _quantize_row_blocks(operation, left, weight.format.block_size)
    summed, clip = operation.summed_axes(operation.left), weight.input_clip
    if clip is not None and isinstance(weight.format, Int8) and weight.format.act_scale == "static":
        return quantize_symmetric(left, jnp.full((1,) * left.ndim, jnp.min(clip)))
    left, amax = measure_rows(left, summed)
    if clip is not None:
        # Clipping would hide an infinity. All clips of a stack are equal; they are repeated to be sliced with it.
        amax = jnp.where(jnp.isfinite(amax), jnp.minimum(amax, jnp.min(clip)), amax)
    return quantize_symmetric(left, amax)


def _quantize_row_blocks(operation: Bilinear, left: jax.Array, block: int) -> Quantized:
    """Rounds each row of an input to e4m3, or each block of one along the summed axes; scales are for each element."""
    if block == PER_CHANNEL:
        return quantize_e4m3(*measure_rows(left, operation.summed_axes(operation.left)))
    order = _find_order(operation)
    groups, lengths = (order.batch, order.rows, order.summed), dict(zip(operation.left, left.shape, strict=True))

    def quantize(left: jax.Array) -> tuple[jax.Array, ...]:
        rows = _merge_axes(left, operation.left, *groups)
        padded = pad_axes(rows, (2,), block)
        blocks = padded.reshape(*rows.shape[:2], padded.shape[2] // block, block)
        values, scale, _ = quantize_e4m3(*measure_rows(blocks, (3,)))
        values = lax.slice_in_dim(values.reshape(padded.shape), 0, rows.shape[2], axis=2)
        made = values, spread_over_axis(scale[..., 0], 2, block, rows.shape[2])
        return tuple(_split_axes(x, sum(groups, ()), operation.left, lengths) for x in made)

    run: Any = quantize
    sharding = jax.typeof(left).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:  # as in `_on_any_mesh`
        run = jax.sharding.auto_axes(quantize, out_sharding=(sharding, sharding))  # pyright: ignore[reportAttributeAccessIssue]
    return Quantized(*run(left))


@jax.custom_jvp
def multiply_integers(
    operation: Bilinear,
    left: jax.Array,
    right: jax.Array | None,
    rows: Quantized | None,
    weight: QuantizedArray | Quantized,
) -> jax.Array:
    """Multiplies the integers, or e4m3 values, of `left` and `right`.

    `right` is None for a stored weight, and `rows` for a `left` that is multiplied as it is.
    """
    dtype = np.dtype(operation.compute.preferred_element_type or left.dtype)
    if rows is None:
        wide = left.dtype if left.dtype.itemsize > 4 else np.dtype(np.float32)
        sums = operation.compute(left, weight.values.astype(left.dtype), wide)
        return (sums * operation.align_scale(weight.scale, operation.right)).astype(dtype)
    if isinstance(weight, QuantizedArray) and not isinstance(weight.format, Int8):
        return _on_any_mesh(_sum_blocks, operation, rows.values, weight, rows.scale).astype(dtype)
    sums = _sum_integers(operation, rows.values, weight.values)
    if dtype == jnp.bfloat16:  # float16 would overflow
        sums = narrow_sums(sums)
    # One by one: the product of both scales may underflow or overflow.
    scaled = sums * operation.align_scale(rows.scale, operation.left)
    scaled = scaled * operation.align_scale(weight.scale, operation.right)
    return scaled.astype(dtype)


def _sum_blocks(operation: Bilinear, left: jax.Array, weight: QuantizedArray, row_scale: jax.Array) -> jax.Array:
    """Multiplies 8-bit rows by each block of a weight, into int32 or float32, and adds scaled sums in float32."""
    order, first = _find_order(operation), weight.ndim + weight.layout.axes[0]
    labels = (*operation.right[:first], "blocks", "block", *operation.right[first + len(order.summed) :])
    groups = ("blocks",), order.batch, ("block",), order.columns
    values, scale = (_merge_axes(x, labels, *groups) for x in weight.split_blocks()[:2])
    blocks, _, block, _ = values.shape

    def split(x: jax.Array) -> jax.Array:
        merged = pad_axes(_merge_axes(x, operation.left, order.batch, order.rows, order.summed), (2,), block)
        return jnp.moveaxis(merged.reshape(*merged.shape[:2], blocks, block), 2, 0)

    def multiply(rows: jax.Array, of_rows: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        wide = np.int32 if values.dtype == np.int8 else np.float32
        sums = lax.dot_general(rows, values, _BATCHED_MATMUL, preferred_element_type=wide)
        return sums.astype(np.float32) * scale * of_rows

    operands = split(left), split(jnp.broadcast_to(row_scale, left.shape))[..., :1], values, scale
    like = jax.eval_shape(multiply, *(x[0] for x in operands))
    if blocks * like.size <= _LARGEST_SUMS:
        out = jnp.sum(jax.vmap(multiply)(*operands), axis=0)
    else:  # one block at a time, since the sums of all would not fit beside a large output
        axes = tuple(varying_axes(left, values))
        out, _ = lax.scan(lambda out, each: (out + multiply(*each), None), vary(jnp.zeros_like(like), axes), operands)
    return _split_output(out, operation, left.shape, weight.shape)


@functools.partial(jax.jit, inline=True)
def _sum_integers(operation: Bilinear, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiplies into int32 and casts to float32 in one program: cuDNN has no int8 convolution without that cast."""
    multiply = lambda left, right: operation.compute(left, right, jnp.int32).astype(jnp.float32)
    if not _has_odd_groups(operation, right.shape):
        return multiply(left, right)
    # XLA for GPUs pads the channels of int8 convolutions to multiples of 4, and then mixes groups (jax 0.10.2, 0.11.2).
    # bfloat16 has all integers of int8.
    as_floats = lambda left, right: operation.compute(left.astype(jnp.bfloat16), right.astype(jnp.bfloat16), np.float32)
    return lax.platform_dependent(left, right, cuda=as_floats, default=multiply)


def _has_odd_groups(operation: Bilinear, right: tuple[int, ...]) -> bool:
    """True for a grouped convolution whose groups have inputs or outputs that are not a multiple of 4."""
    options = dict(getattr(operation.compute, "options", ()))
    groups = options.get("feature_group_count", 1)
    if groups == 1:
        return False
    outputs, inputs, *_ = (right[axis] for axis in options["dimension_numbers"].rhs_spec)
    return bool(inputs % 4 or outputs // groups % 4)


@functools.partial(multiply_integers.defjvp, symbolic_zeros=True)
def _differentiate_integers(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """Multiplies each tangent by the dequantized other operand, and adds both."""
    operation, left, right, rows, weight = primals
    _, left_tangent, right_tangent, *_ = tangents
    out = multiply_integers(*primals)
    # Both tangents are computed in the dtype of the input, also for a wide output.
    operation = without_preferred_dtype(operation)
    parts = []
    if not isinstance(left_tangent, SymbolicZero):
        is_stored = isinstance(weight, QuantizedArray)
        numbers = weight.dequantize(left.dtype) if is_stored else to_numbers(weight).astype(left.dtype)
        parts.append(operation.compute(left_tangent, numbers if right is None else _replace_value(right, numbers)))
    if right is not None and not isinstance(right_tangent, SymbolicZero):
        numbers = left if rows is None else _replace_value(left, to_numbers(rows).astype(left.dtype))
        parts.append(operation.compute(numbers, right_tangent.astype(left.dtype)))
    return out, sum(parts[1:], parts[0]).astype(out.dtype) if parts else jnp.zeros_like(out)


@jax.custom_jvp
def _replace_value(original: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns `rounded` with the derivative of `original`."""
    return rounded


_replace_value.defjvp(lambda primals, tangents: (_replace_value(*primals), tangents[0].astype(primals[1].dtype)))


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
    return _on_any_mesh(functools.partial(_multiply_in_order, format), operation, left, weight, key)


def _on_any_mesh(
    multiply: Any, operation: Bilinear, left: jax.Array, weight: jax.Array | QuantizedArray, other: jax.Array | None
) -> jax.Array:
    """Calls `multiply(operation, left, weight, other)`, which merges axes, on a mesh with explicit axes too."""
    multiply = functools.partial(multiply, operation)
    if AxisType.Explicit in jax.typeof(left).sharding.mesh.axis_types:
        # Blocks span merged axes, so XLA shards the inside of the matmul. JAX raises if it needs `out_sharding`.
        numbers = lambda w: w.dequantize(np.float32) if isinstance(w, QuantizedArray) else w.astype(np.float32)
        compute = lambda x, w: operation.compute(x.astype(np.float32), numbers(w))
        (out,) = jax.make_jaxpr(compute)(left, weight).out_avals
        multiply = jax.sharding.auto_axes(multiply, out_sharding=out.sharding)  # pyright: ignore[reportAttributeAccessIssue]
    return multiply(left, weight, other)


def _multiply_in_order(
    format: BlockFormat,
    operation: Bilinear,
    left: jax.Array,
    weight: jax.Array | QuantizedArray,
    key: jax.Array | None,
) -> jax.Array:
    order = _find_order(operation)
    axes = tuple(varying_axes(left, weight.values if isinstance(weight, QuantizedArray) else weight))
    # In `shard_map` the outputs of a custom derivative must vary over the same axes as its inputs.
    rows = _merge_axes(vary(left, axes), operation.left, order.batch, order.rows, order.summed)
    rows = pad_axes(rows, (2,), format.block_size)
    if isinstance(weight, QuantizedArray):
        stored = jax.tree.map(lambda x: vary(lax.stop_gradient(x), axes), weight)
        lead = math.prod(weight.shape[: len(order.batch)])
        right = jax.tree.map(lambda x: x.reshape(lead, *x.shape[-2:]), stored.read_blocks())
    else:
        right = _merge_axes(vary(weight, axes), operation.right, order.batch, order.summed, order.columns)
        right = pad_axes(right, (1,), format.block_size)
    dtype = np.dtype(operation.compute.preferred_element_type or left.dtype)
    out: jax.Array = multiply_rows(format, dtype, rows, right, key)
    return _split_output(out, operation, left.shape, weight.shape)


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
    """Merges the axes of each group of labels into one."""
    order = [labels.index(label) for group in groups for label in group]
    moved = x if order == sorted(order) else lax.transpose(x, order)
    lengths = dict(zip(labels, x.shape, strict=True))
    return moved.reshape([math.prod(lengths[label] for label in group) for group in groups])


def _split_output(out: jax.Array, operation: Bilinear, left: tuple[int, ...], right: tuple[int, ...]) -> jax.Array:
    """Splits `(batch, rows, columns)` into the axes of the output, given the shapes of the operands."""
    order = _find_order(operation)
    lengths = dict(zip(operation.left, left, strict=True)) | dict(zip(operation.right, right, strict=True))
    return _split_axes(out, (*order.batch, *order.rows, *order.columns), operation.out, lengths)


def _split_axes(x: jax.Array, merged: Labels, labels: Labels, lengths: dict[str, int]) -> jax.Array:
    """Inverse of `_merge_axes`, whose groups are `merged` together: returns the axes in the order of `labels`."""
    x = x.reshape([lengths[label] for label in merged])
    places = [merged.index(label) for label in labels]
    return x if places == sorted(places) else lax.transpose(x, places)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_rows(
    format: BlockFormat,
    dtype: np.dtype,
    rows: jax.Array,
    weight: jax.Array | Blocks,
    key: jax.Array | None = None,
    groups: RaggedDot | None = None,
) -> jax.Array:
    """Multiplies `(batch, rows, inputs)` by `(batch, inputs, outputs)`; a stored weight has no gradient.

    With `groups` it multiplies `(rows, inputs)` by `(groups, inputs, outputs)`.
    """
    return _forward_blocks(format, dtype, rows, weight, key, groups, for_gradient=False)[0]


def _forward_blocks(
    format: BlockFormat,
    dtype: np.dtype,
    rows: jax.Array,
    weight: jax.Array | Blocks,
    key: jax.Array | None,
    groups: RaggedDot | None,
    for_gradient: bool = True,
) -> tuple[jax.Array, Any]:
    if for_gradient and key is None and needs_rng(format):
        raise ValueError(
            f"{str(format)!r} rounds gradients stochastically, and a matmul that is differentiated has no key. Pass "
            f"one: model.apply(variables, x, rngs={{{ROUNDING!r}: key}}) in linen, in nn.scan and nn.vmap with "
            f"split_rngs={{{ROUNDING!r}: True}}; jmp_policy.nnx.set_rounding_rngs(model, nnx.Rngs({ROUNDING}=0)) in "
            "nnx; or quant.dot_general(..., key=key)."
        )
    inputs, is_stored = round_operand(rows, None, format, -1, "input"), isinstance(weight, Blocks)
    right = weight if isinstance(weight, Blocks) else round_operand(weight, None, format, -2, "weight")
    # Only the gradient of the weight needs the rows; the dtype is enough for their own.
    residuals = (jnp.zeros((), rows.dtype) if is_stored else rows, weight, key, groups)
    return _multiply_blocks(inputs, right, (-1, -2), dtype, groups), residuals


def _backward_blocks(format: BlockFormat, dtype: np.dtype, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    rows, weight, key, groups = residuals
    keys, block = (None, None) if key is None else jax.random.split(key), format.block_size
    numbers = dequantize(weight, 1) if isinstance(weight, Blocks) else weight
    grads = round_operand(pad_axes(grad, (grad.ndim - 1,), block), keys[0], format, -1, "gradient")
    columns = round_operand(pad_axes(numbers, (2,), block), None, format, -1, "weight")
    rows_grad = _multiply_blocks(grads, columns, (-1, -1), jnp.float32, groups).astype(rows.dtype)
    if isinstance(weight, Blocks):
        return rows_grad, None, None, None
    if groups is None:
        rows, grad = pad_axes(rows, (1,), block), pad_axes(grad, (1,), block)
    else:
        places, groups = groups.pad(block)
        rows, grad = (jnp.take(x, places, axis=0, mode="fill", fill_value=0) for x in (rows, grad))
    if isinstance(format, NVFP4) and format.hadamard:
        rows, grad = mix_rows(rows, block), mix_rows(grad, block)
    inputs = round_operand(rows, None, format, -2, "input")
    grads = round_operand(grad, keys[1], format, -2, "gradient")
    weight_grad = _multiply_blocks(inputs, grads, (-2, -2), jnp.float32, groups)
    return rows_grad, weight_grad.astype(weight.dtype), None, None


multiply_rows.defvjp(_forward_blocks, _backward_blocks)


def _multiply_blocks(
    left: Blocks, right: Blocks, axes: tuple[int, int], dtype: Any, groups: RaggedDot | None
) -> jax.Array:
    """Sums products over an axis of each operand, -1 or -2, with float32 accumulation."""
    if groups is not None:  # in bfloat16, which represents elements times scales exactly
        numbers = (dequantize(*operand, jnp.bfloat16) for operand in zip((left, right), axes, strict=True))
        sums = np.dtype(np.float32)
        multiply = functools.partial(groups.contract, axes=axes, preferred_element_type=sums)
        return widen_on_cpu(multiply, sums, *numbers).astype(dtype)
    left = left if axes[0] == -1 else _transpose(left)
    right = right if axes[1] == -2 else _transpose(right)
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


def _transpose(blocks: Blocks) -> Blocks:
    return jax.tree.map(lambda x: lax.transpose(x, (0, 2, 1)), blocks)
