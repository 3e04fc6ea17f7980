"""`ragged_dot`: matmuls of groups of rows, each with its own matrix, in 8 bits.

Each group is quantized as `dot_general` would quantize its rows and its matrix alone, so no scale depends on the rows
of another group. The gradient of a matrix sums over the rows of its group:

- `Float8` with a scale per tensor has a scale per group, and with a scale per row a scale per group and column.
- `MXFP8` moves each group to the next multiple of the block size, with rows of zeros between groups. So a block never
  straddles two groups, and has the elements that it has in a group alone.
- `Int8` multiplies by the rounded operands in the compute dtype, as for `dot_general`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import DTypeLike, quote
from ..policy import MXFP8, Int8, Quantization
from ._array import QuantizedArray
from ._bilinear import RaggedDot, label_ragged_dot, make_ragged_dot, vary_together
from ._block_numbers import pad_axes
from ._float8_product import float8_product, why_sizes_wide
from ._layout import Layout
from ._numbers import measure_amax, measure_rows, quantize_symmetric
from ._operations import check_floating, multiplies_8_bits, parse_product_format
from ._product import multiply_integers, multiply_rows
from ._wide_product import wide_product


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
      rhs: floating, of shape `(g, k, n)`: a matrix per group; or a `QuantizedArray` of that shape, a stack of matrices.
        With a format that multiplies no 8-bit operands, it is dequantized.
      group_sizes: integers of shape `(g,)`, the number of rows in each group. Rows after the last group give zeros.
      precision: as for JAX; ignored by 8-bit matmuls.
      preferred_element_type: the dtype of the output; by default the dtype of `lhs`.
      group_offset: as for JAX, which does not implement it yet; only without `quantization`.
      quantization: `Int8`, `Float8` with `CurrentScaling`, `MXFP8`, or their string; `None` calls JAX's operation, or
        multiplies as a stored `rhs` says.
        `Float8` leaves matmuls in the dtype of `lhs` if `k * n` is less than `min_size`, or if `m`, `k` or `n` is not a
        multiple of 16.

    Returns:
      An array of shape `(m, n)`. With `Float8` and `MXFP8`, gradients are quantized too. With `Int8`, the derivative
      multiplies by the rounded operands in the dtype of `lhs`, and passes straight through the rounding.

    Raises:
      TypeError: `lhs` or `rhs` is not floating, `group_sizes` are not integers, or a float8 or block-scaled matmul is
        differentiated twice.
      ValueError: shapes do not match, the format multiplies no 8-bit operands, or is not the one of a stored `rhs`.
      NotImplementedError: a quantized matmul has a `group_offset`.

    Source: `jax.lax.ragged_dot`; Gale et al., MegaBlocks, MLSys 2023 (grouped matmuls of experts).

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> tokens, experts = jnp.ones((3, 4)), jnp.stack([jnp.full((4, 2), 0.5), jnp.ones((4, 2))])
    >>> jmp.quant.ragged_dot(tokens, experts, jnp.array([1, 2]), quantization="int8").tolist()
    [[2.0, 2.0], [4.0, 4.0], [4.0, 4.0]]
    """
    format = parse_product_format(quantization, "ragged_dot")
    if isinstance(rhs, QuantizedArray):
        format, rhs = _read_stored(rhs, format, lhs.dtype)
    options: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
    if format is None:
        return lax.ragged_dot(lhs, rhs, group_sizes, group_offset=group_offset, **options)
    if group_offset is not None:
        raise NotImplementedError(
            f"ragged_dot has no group_offset with quantization={str(format)!r}. For example, slice the operands: "
            "ragged_dot(rows, rhs[first:last], group_sizes[first:last], quantization=...)."
        )
    _check_operands(lhs, rhs, group_sizes)
    if not isinstance(rhs, QuantizedArray):
        lhs, rhs, group_sizes = vary_together(lhs, rhs, group_sizes)
    rows, (_, inputs, outputs) = lhs.shape[0], rhs.shape
    compute = make_ragged_dot(group_sizes, rows, **options)
    # Rows after the last group may have any value, as padding has.
    lhs = jnp.where((compute.groups < rhs.shape[0])[:, None], lhs, jnp.zeros((), lhs.dtype))
    operation = label_ragged_dot(compute)
    if isinstance(format, Int8):
        weight, right = rhs, None
        if not isinstance(rhs, QuantizedArray):
            weight, right = quantize_symmetric(rhs, measure_amax(lax.stop_gradient(rhs), (1,))), rhs
        rounded = quantize_symmetric(*measure_rows(lax.stop_gradient(lhs), (1,)))
        return multiply_integers(operation, lhs, right, *map(lax.stop_gradient, (rounded, weight)))
    if isinstance(format, MXFP8):
        lhs, rhs = (pad_axes(x, (1,), format.block_size) for x in (lhs, rhs))
        return multiply_rows(format, np.dtype(preferred_element_type or lhs.dtype), lhs, rhs, groups=compute)
    if why_sizes_wide(inputs * outputs, format, inputs, outputs) is not None:
        return compute(lhs, rhs.astype(lhs.dtype))
    return float8_product(operation, lhs, rhs, format)


def _read_stored(weight: QuantizedArray, given: Any, dtype: np.dtype) -> tuple[Any, Any]:
    """Returns the format of the matmul by a stored weight, and the weight, which is dequantized unless it is int8."""
    stored: Any = weight.format
    if given is not None and given != stored:
        raise ValueError(
            f"ragged_dot got {weight!r} and quantization={str(given)!r}. Leave quantization out: a stored weight has a "
            "format."
        )
    format = stored if multiplies_8_bits(stored) else None
    is_stack = weight.ndim == 3 and weight.layout == Layout(weight.shape[1:2], 1)
    return format, weight if isinstance(format, Int8) and is_stack else weight.dequantize(dtype)


def _check_operands(lhs: jax.Array, rhs: Any, group_sizes: jax.Array) -> None:
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


def wide_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    dtype: np.dtype,
    compute_dtype: np.dtype,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Computes `lax.ragged_dot` as `wide_product`: operands in `compute_dtype`, the output in `dtype`."""
    lhs, rhs, sizes = vary_together(lhs, rhs, sizes)
    operation = label_ragged_dot(RaggedDot(sizes, None, precision))
    return wide_product(operation, lhs, rhs, dtype, compute_dtype)
