"""`ragged_dot`: matmuls of groups of rows, each with its own matrix, in 8 bits.

Each group is quantized as `dot_general` would quantize its rows and its matrix alone, so no scale depends on the rows
of another group. The gradient of a matrix sums over the rows of its group:

- `Float8` with a scale per tensor has a scale per group, and with a scale per row a scale per group and column.
- `MXFP8` moves each group to the next multiple of the block size, with rows of zeros between groups. So a block never
  straddles two groups, and has the elements that it has in a group alone.
- `Int8` multiplies by the rounded operands in the compute dtype, as for `dot_general`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._base import PRODUCT_SCOPE, DTypeLike, quote
from ..policy import MULTIPLE, MXFP8, CurrentScaling, Int8, Quantization
from ._numbers import (
    E4M3,
    E5M2,
    Blocks,
    Quantized,
    compute_current_scale,
    dequantize,
    measure_amax,
    measure_row_amax,
    narrow_sums,
    pad_axes,
    quantize_symmetric,
    round_operand,
    saturate,
    to_numbers,
)
from ._operations import check_floating, parse_product_format
from ._products import vary_together, why_sizes_wide
from ._weights import Layout, QuantizedArray, block_length


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: jax.Array | None = None,
    *,
    quantization: Quantization | str | None = None,
) -> jax.Array:
    """Computes `jax.lax.ragged_dot`, the matmul of a mixture of experts, with both operands in 8 bits.

    Each group has the output and the gradients of `dot_general` on its rows and its matrix, up to the order of sums.
    JAX has no grouped matmul of blocks, so `MXFP8` multiplies its rounded operands in bfloat16, which is exact, with
    float32 sums.

    Args:
      lhs: floating, of shape `(m, k)`: the rows of the first group, then of the second, and so on.
      rhs: floating, of shape `(g, k, n)`: a matrix per group.
      group_sizes: integers of shape `(g,)`, the number of rows in each group. Rows after the last group give zeros.
      precision: as for JAX; ignored by 8-bit matmuls.
      preferred_element_type: the dtype of the output; by default the dtype of `lhs`.
      group_offset: as for JAX, which does not implement it yet; only without `quantization`.
      quantization: `Int8`, `Float8` with `CurrentScaling`, `MXFP8`, or their string; `None` calls JAX's operation.
        `Float8` leaves matmuls in the dtype of `lhs` if `k * n` is less than `min_size`, or if `m`, `k` or `n` is not a
        multiple of 16.

    Returns:
      An array of shape `(m, n)`. With `Float8` and `MXFP8`, gradients are quantized too. With `Int8`, the derivative
      multiplies by the rounded operands in the dtype of `lhs`, and passes straight through the rounding.

    Raises:
      TypeError: `lhs` or `rhs` is not floating, `group_sizes` are not integers, or a float8 or block-scaled matmul is
        differentiated twice.
      ValueError: shapes do not match, the format multiplies no 8-bit operands, or blocks do not divide `k`.
      NotImplementedError: a quantized matmul has a `group_offset`.

    Source: `jax.lax.ragged_dot`; Gale et al., MegaBlocks, MLSys 2023 (grouped matmuls of experts).

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> tokens, experts = jnp.ones((3, 4)), jnp.stack([jnp.full((4, 2), 0.5), jnp.ones((4, 2))])
    >>> jmp.quant.ragged_dot(tokens, experts, jnp.array([1, 2]), quantization="int8").tolist()
    [[2.0, 2.0], [4.0, 4.0], [4.0, 4.0]]
    """
    format = parse_product_format(quantization, "ragged_dot")
    options: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
    if format is None:
        return lax.ragged_dot(lhs, rhs, group_sizes, group_offset=group_offset, **options)
    if group_offset is not None:
        raise NotImplementedError(
            f"ragged_dot has no group_offset with quantization={str(format)!r}. For example, slice the operands: "
            "ragged_dot(rows, rhs[first:last], group_sizes[first:last], quantization=...)."
        )
    _check_operands(lhs, rhs, group_sizes)
    lhs, rhs, sizes = vary_together(lhs, rhs, group_sizes)
    rows, (_, inputs, outputs) = lhs.shape[0], rhs.shape
    groups = _find_groups(sizes, rows)
    # Rows after the last group may have any value, as padding has.
    lhs = jnp.where((groups < len(rhs))[:, None], lhs, jnp.zeros((), lhs.dtype))
    dtype = np.dtype(preferred_element_type or lhs.dtype)
    if isinstance(format, Int8):
        weight = quantize_symmetric(rhs, measure_amax(lax.stop_gradient(rhs), (1,)))
        rounded = quantize_symmetric(lhs, measure_row_amax(lax.stop_gradient(lhs), (1,)))
        spec = _Spec(format, dtype, lhs.dtype, precision)
        return _integer_product(spec, lhs, rhs, *map(lax.stop_gradient, (rounded, weight)), sizes, groups)
    if isinstance(format, MXFP8):
        block_length(Layout((inputs,), 1), format)  # raises if blocks do not divide the inputs
        return _block_product(_Spec(format, dtype, lhs.dtype), lhs, rhs, sizes)
    rhs = rhs.astype(lhs.dtype)
    if rows % MULTIPLE or why_sizes_wide(inputs * outputs, format, inputs, outputs) is not None:
        return lax.ragged_dot(lhs, rhs, sizes, **options)
    return _float8_product(_Spec(format, dtype, lhs.dtype), lhs, rhs, sizes, groups)


def _check_operands(lhs: jax.Array, rhs: Any, group_sizes: jax.Array) -> None:
    if isinstance(rhs, QuantizedArray):
        raise TypeError(f"ragged_dot quantizes a floating rhs, got {rhs}. For example: rhs.dequantize().")
    for operand in (lhs, rhs):
        check_floating(operand, "ragged_dot(x.astype('float32'), ...)")
    fits = lhs.ndim == 2 and rhs.ndim == 3 and lhs.shape[1] == rhs.shape[1] and group_sizes.shape == rhs.shape[:1]
    if not fits:
        raise ValueError(
            "ragged_dot takes shapes (m, k), (g, k, n) and (g,), got "
            f"{lhs.shape}, {rhs.shape} and {group_sizes.shape}. For example: (64, 32), (4, 32, 16) and (4,)."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(
            f"group_sizes must be integers, got {quote(str(group_sizes.dtype))}. "
            "For example: group_sizes.astype('int32')."
        )


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Static description of a grouped matmul."""

    format: Any  # `Int8`, `Float8` or `MXFP8`
    dtype: np.dtype  # of the output
    compute_dtype: np.dtype  # of the left operand and its gradient
    precision: Any = None

    @property
    def by_row(self) -> bool:
        return self.format.recipe == CurrentScaling("row")

    @property
    def sums(self) -> np.dtype:
        """Dtype of unscaled float8 sums, as for `dot_general`."""
        return self.compute_dtype if self.compute_dtype == jnp.bfloat16 else np.dtype(np.float32)


def _find_groups(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns the group of each row, and the number of groups for the rows after the last one."""
    ends = jnp.cumsum(sizes, dtype=np.int32)
    return jnp.sum(ends <= lax.broadcasted_iota(np.int32, (rows, 1), 0), axis=1, dtype=np.int32)


def _take(of_groups: jax.Array, groups: jax.Array) -> jax.Array:
    """Returns the entry of the group of each row, and one for the rows after the last group."""
    return jnp.take(of_groups, groups, axis=0, mode="fill", fill_value=1)


def _multiply_groups(rows: jax.Array, matrices: jax.Array, sizes: jax.Array, axis: int, **options: Any) -> jax.Array:
    """Multiplies each row by the matrix of its group, and sums over an axis of the matrices."""
    numbers = lax.RaggedDotDimensionNumbers((((1,), (axis,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(rows, matrices, sizes, numbers, **options)


def _sum_groups(left: jax.Array, right: jax.Array, sizes: jax.Array, **options: Any) -> jax.Array:
    """Sums the outer products of both rows over each group."""
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(left, right, sizes, numbers, **options)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _integer_product(
    spec: _Spec,
    left: jax.Array,
    right: jax.Array,
    rows: Quantized,
    weight: Quantized,
    sizes: jax.Array,
    groups: jax.Array,
) -> jax.Array:
    """Multiplies the integers of `left` and `right`, with a scale per row and a scale per group and column."""
    sums = _multiply_groups(rows.values, weight.values, sizes, 1, preferred_element_type=np.int32)
    sums = sums.astype(np.float32)
    if spec.dtype == jnp.bfloat16:
        sums = narrow_sums(sums)
    return (sums * rows.scale * _take(weight.scale[:, 0], groups)).astype(spec.dtype)


def _integer_jvp(spec: _Spec, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """Multiplies each tangent by the dequantized other operand, and adds both."""
    out, (rows, weight, sizes, _) = _integer_product(spec, *primals), primals[2:]
    numbers = lambda operand: to_numbers(operand).astype(spec.compute_dtype)
    parts = []
    if not isinstance(tangents[0], SymbolicZero):
        parts.append(_multiply_groups(tangents[0], numbers(weight), sizes, 1, precision=spec.precision))
    if not isinstance(tangents[1], SymbolicZero):
        tangent = tangents[1].astype(spec.compute_dtype)
        parts.append(_multiply_groups(numbers(rows), tangent, sizes, 1, precision=spec.precision))
    return out, sum(parts[1:], parts[0]).astype(out.dtype) if parts else jnp.zeros_like(out)


_integer_product.defjvp(_integer_jvp, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _float8_product(spec: _Spec, left: jax.Array, right: jax.Array, sizes: jax.Array, groups: jax.Array) -> jax.Array:
    return _float8_forward(spec, left, right, sizes, groups)[0]


def _float8_forward(
    spec: _Spec, left: jax.Array, right: jax.Array, sizes: jax.Array, groups: jax.Array
) -> tuple[jax.Array, Any]:
    sums = spec.sums if spec.dtype == spec.compute_dtype else np.dtype(np.float32)
    rows, weight = _scale_rows(spec, left, groups, len(right), E4M3), _scale_matrices(spec, right, 1)
    out = _multiply_groups(rows.values, weight.values, sizes, 1, preferred_element_type=sums)
    # Row scales serve one direction only, and a weight gradient in the compute dtype needs the unrounded rows.
    kept = left if spec.by_row or not spec.format.weight_grad else rows
    return _undo_scales(spec, out, rows, weight, groups).astype(spec.dtype), (kept, right, sizes, groups)


def _float8_backward(spec: _Spec, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    left, right, sizes, groups = residuals
    options: dict[str, Any] = {"preferred_element_type": spec.sums}
    # Gradient of the rows: sums over the outputs.
    grads, weight = _scale_rows(spec, grad, groups, len(right), E5M2), _scale_matrices(spec, right, 2)
    left_grad = _multiply_groups(grads.values, weight.values, sizes, 2, **options)
    left_grad = _undo_scales(spec, left_grad, grads, weight, groups).astype(spec.compute_dtype)
    # Gradient of the matrices: sums over the rows of a group.
    if not spec.format.weight_grad:
        return left_grad, _sum_groups(left, grad.astype(spec.compute_dtype), sizes), None, None
    if spec.by_row:
        left = _scale_groups(spec, left, groups, len(right), E4M3)
        grads = _scale_groups(spec, grad, groups, len(right), E5M2)
    right_grad = _sum_groups(left.values, grads.values, sizes, **options).astype(np.float32)
    right_grad = _apply_scales(spec, right_grad, left.scale[:, :, None], grads.scale[:, None])
    return left_grad, right_grad.astype(spec.compute_dtype), None, None


_float8_product.defvjp(_float8_forward, _float8_backward)


def _scale_rows(spec: _Spec, x: jax.Array, groups: jax.Array, count: int, dtype: np.dtype) -> Quantized:
    """Scales rows to float8 for a sum over their elements: a scale per row, or the scale of the group."""
    if not spec.by_row:
        return _scale_groups(spec, x, groups, count, dtype)
    scale = compute_current_scale(measure_row_amax(x, (1,)), dtype, spec.format.margin)
    return Quantized(saturate(x, scale, dtype), scale)


def _scale_groups(spec: _Spec, x: jax.Array, groups: jax.Array, count: int, dtype: np.dtype) -> Quantized:
    """Scales rows to float8 for a sum over the rows of a group: a scale per group, or per group and column."""
    magnitudes = measure_amax(x, ()) if spec.by_row else measure_row_amax(x, (1,))
    amax = jax.ops.segment_max(magnitudes, groups, count, indices_are_sorted=True)  # -inf for an empty group
    scale = compute_current_scale(jnp.maximum(amax, 0), dtype, spec.format.margin)
    return Quantized(saturate(x, _take(scale, groups), dtype), scale)


def _scale_matrices(spec: _Spec, x: jax.Array, summed: int) -> Quantized:
    """Scales the matrices of all groups to e4m3 for a sum over an axis."""
    amax = measure_amax(x, (summed,) if spec.by_row else (1, 2))
    scale = compute_current_scale(amax, E4M3, spec.format.margin)
    return Quantized(saturate(x, scale, E4M3), scale)


def _undo_scales(spec: _Spec, sums: jax.Array, rows: Quantized, weight: Quantized, groups: jax.Array) -> jax.Array:
    of_rows = rows.scale if spec.by_row else _take(rows.scale, groups)
    of_columns = _take(weight.scale.reshape(len(weight.scale), -1), groups)
    return _apply_scales(spec, sums.astype(np.float32), of_rows, of_columns)


def _apply_scales(spec: _Spec, sums: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiplies by two scales in the order of `dot_general`."""
    return sums * left * right if spec.by_row else sums * (left * right)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block_product(spec: _Spec, left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
    multiply = functools.partial(_multiply_groups, axis=1, preferred_element_type=np.float32)
    rows = round_operand(left, None, spec.format, 1, "input")
    weight = round_operand(right, None, spec.format, -2, "weight")
    return _multiply_blocks(multiply, rows, 1, weight, 1, sizes).astype(spec.dtype)


def _block_backward(spec: _Spec, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    (left, right, sizes), format = residuals, spec.format
    block, options = format.block_size, {"preferred_element_type": np.float32}
    grads = round_operand(pad_axes(grad, (1,), block), None, format, 1, "gradient")
    weight = round_operand(pad_axes(right, (2,), block), None, format, -1, "weight")
    left_grad = _multiply_blocks(functools.partial(_multiply_groups, axis=2, **options), grads, 1, weight, 2, sizes)
    places, padded = _pad_groups(sizes, len(left), block)
    move = lambda x: jnp.take(x, places, axis=0, mode="fill", fill_value=0)
    rows = round_operand(move(left), None, format, 0, "input")
    grads = round_operand(move(grad), None, format, 0, "gradient")
    right_grad = _multiply_blocks(functools.partial(_sum_groups, **options), rows, 0, grads, 0, padded)
    return left_grad.astype(left.dtype), right_grad.astype(right.dtype), None


_block_product.defvjp(lambda spec, *args: (_block_product(spec, *args), args), _block_backward)


def _multiply_blocks(
    multiply: Any, left: Blocks, left_axis: int, right: Blocks, right_axis: int, sizes: jax.Array
) -> jax.Array:
    """Multiplies elements times scales in bfloat16, which represents them exactly; on CPUs in float32."""
    left_numbers, right_numbers = (
        dequantize(blocks, axis, jnp.bfloat16) for blocks, axis in ((left, left_axis), (right, right_axis))
    )
    return _choose_form(multiply, left_numbers, right_numbers, sizes)


def _choose_form(multiply: Any, left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies; on CPUs, where XLA has no kernel for some matmuls of bfloat16 into float32, in float32."""
    widen = lambda left, right, sizes: multiply(left.astype(np.float32), right.astype(np.float32), sizes)
    with jax.named_scope(PRODUCT_SCOPE):
        return lax.platform_dependent(left, right, sizes, cpu=widen, default=multiply)


def wide_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    dtype: np.dtype,
    compute_dtype: np.dtype,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Computes `lax.ragged_dot` as `wide_product`: operands in `compute_dtype`, the output in `dtype`."""
    return _wide_product(dtype, compute_dtype, precision, *vary_together(lhs, rhs, sizes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _wide_product(
    dtype: np.dtype,
    compute_dtype: np.dtype,
    precision: lax.PrecisionLike,
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
) -> jax.Array:
    multiply = functools.partial(_multiply_groups, axis=1, precision=precision, preferred_element_type=dtype)
    return _choose_form(multiply, left.astype(compute_dtype), right.astype(compute_dtype), sizes)


def _wide_backward(
    dtype: np.dtype, compute_dtype: np.dtype, precision: lax.PrecisionLike, residuals: Any, grad: jax.Array
) -> tuple[Any, ...]:
    (left, right, sizes), grad = residuals, grad.astype(compute_dtype)
    multiply = functools.partial(_multiply_groups, axis=2, precision=precision, preferred_element_type=dtype)
    add_up = functools.partial(_sum_groups, precision=precision, preferred_element_type=dtype)
    left_grad = _choose_form(multiply, grad, right.astype(compute_dtype), sizes)
    right_grad = _choose_form(add_up, left.astype(compute_dtype), grad, sizes)
    return left_grad.astype(left.dtype), right_grad.astype(right.dtype), None


_wide_product.defvjp(lambda *args: (_wide_product(*args), args[3:]), _wide_backward)


def _pad_groups(sizes: jax.Array, rows: int, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns the row for each place of groups that begin at multiples of `block`, and the padded sizes.

    Places between two groups have the row `rows`, which does not exist.
    """
    padded = -(-sizes // block) * block
    count = (rows // block + len(sizes)) * block
    groups = _find_groups(padded, count)
    begin = lambda lengths: _take(jnp.cumsum(lengths, dtype=np.int32) - lengths, groups)
    offset = lax.iota(np.int32, count) - begin(padded)
    is_row = (groups < len(sizes)) & (offset < _take(sizes, groups))
    return jnp.where(is_row, begin(sizes) + offset, rows), padded
