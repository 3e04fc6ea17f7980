"""Products with quantized weights: of narrow numbers where both sides are, else in the dtype of the input."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ...policy import BlockFormat, Int8
from .._calibrate import observe_input
from .._numbers import Quantized, measure_row_amax, narrow_sums, quantize_symmetric
from .._weights import QuantizedArray, StoredWeight, Unquantized, fake_quantize
from ._bilinear import Bilinear, without_preferred_dtype
from ._block_product import block_product, has_stored_order, is_matmul


def multiply_quantized(
    operation: Bilinear, left: jax.Array, weight: StoredWeight, key: jax.Array | None = None
) -> jax.Array:
    """Computes `operation(left, weight)` with a quantized weight.

    With `Int8`, each row of `left`, all that one sum takes in, is quantized by its largest magnitude. The integers are
    multiplied into int32, and the sums by both scales in float32; on an NVIDIA GPU a result in bfloat16 is rounded
    twice, before the scales and after them. That needs one scale for all weights of a sum. Formats of blocks with
    `activations` multiply blocks by blocks: see `block_product`. That needs blocks along all that is summed over, and
    the axes of the weight in the order of stored blocks: of a batch, of inputs, of outputs. Elsewhere, and for other
    formats, the weight is dequantized to the dtype of `left`.

    The derivative is the derivative of the product of both rounded operands. It passes straight through the rounding,
    to an `Unquantized` weight and to `left`.

    Args:
      operation: what to compute.
      left: floating.
      weight: the right operand.
      key: of the noise of `NVFP4` with `stochastic_rounding`.

    Returns:
      The result in the dtype of `left`, or in the preferred one of the operation.

    Source: Dettmers et al., LLM.int8(), NeurIPS 2022, section 2.2 (a scale per row and column).
    """
    # Nothing differentiates a stored weight.
    if isinstance(weight, QuantizedArray):
        weight = jax.tree.map(lax.stop_gradient, weight)
    if isinstance(weight.format, BlockFormat) and is_block_product(operation, left, weight):
        right = weight if isinstance(weight, QuantizedArray) else weight.array
        return block_product(operation, left, right, weight.format, key)
    # Integers are multiplied only where each sum has one scale; elsewhere the weight becomes floating numbers.
    if not is_integer_product(operation, weight):
        return operation.compute(left, fake_quantize(weight, left.dtype))
    right, rounded = (None, weight) if isinstance(weight, QuantizedArray) else (weight.array, _quantize_weight(weight))
    # The input is rounded here, not in the function below, whose derivative needs the same integers and would round
    # again.
    rows = _quantize_rows(operation, lax.stop_gradient(left), rounded)
    return _multiply_integers(operation, left, right, rows, rounded)


def _quantize_weight(weight: Unquantized) -> QuantizedArray:
    return dataclasses.replace(weight, array=lax.stop_gradient(weight.array)).quantize()


def is_block_product(operation: Bilinear, left: jax.Array, weight: StoredWeight) -> bool:
    """Whether blocks are multiplied: those of the weight, as they are stored, lie along all that each sum takes in."""
    if not isinstance(weight.format, BlockFormat) or not weight.format.activations:
        return False
    blocked = {axis % weight.ndim for axis in weight.layout.axes}
    lies_along = set(operation.summed_axes(operation.right)) == blocked
    return lies_along and is_matmul(operation, left.shape, weight.shape) and has_stored_order(operation)


def is_integer_product(operation: Bilinear, weight: StoredWeight) -> bool:
    """Whether both operands of a product are integers: inputs are quantized too, and each sum has one scale of each."""
    if not isinstance(weight.format, Int8) or not weight.format.activations:
        return False
    shared = {axis % weight.ndim for axis in weight.layout.axes}
    return set(operation.summed_axes(operation.right)) <= shared and not _joins_groups(operation)


def _joins_groups(operation: Bilinear) -> bool:
    """Whether a convolution sums over parts of the batch, so that no example has a scale of its own."""
    return dict(getattr(operation.compute, "options", ())).get("batch_group_count", 1) != 1


def _quantize_rows(operation: Bilinear, left: jax.Array, weight: QuantizedArray) -> Quantized:
    """Quantizes the rows of an input to 8 bits, each by its largest magnitude or by what calibration clips it to."""
    summed, clip = operation.summed_axes(operation.left), weight.input_clip
    observe_input(left, summed)
    amax = measure_row_amax(left, summed)
    if clip is not None:
        # An infinity stays: clipping would hide it. A stack has one clip for each layer only to be cut with them, so
        # that the clips of a batch of weights are the same.
        amax = jnp.where(jnp.isfinite(amax), jnp.minimum(amax, jnp.min(clip)), amax)
    return quantize_symmetric(left, amax)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiply_integers(
    operation: Bilinear, left: jax.Array, right: jax.Array | None, rows: Quantized, weight: QuantizedArray
) -> jax.Array:
    """The product of the integers that stand for `left` and `right`; a weight that is stored so has no `right`."""
    sums = operation.compute(rows.values, weight.values, jnp.int32).astype(jnp.float32)
    dtype = np.dtype(operation.compute.preferred_element_type or left.dtype)
    if dtype == jnp.bfloat16:  # float16 could not hold the sums
        sums = narrow_sums(sums)
    # One scale after the other: their product may underflow, or overflow where the sum is zero.
    scaled = sums * operation.align_scale(rows.scale, operation.left)
    scaled = scaled * operation.align_scale(weight.scale, operation.right)
    return scaled.astype(dtype)


def _jvp(operation: Bilinear, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """The sum of two products: each tangent by the numbers that the integers of the other operand stand for."""
    left, right, rows, weight = primals
    left_tangent, right_tangent, *_ = tangents
    out = _multiply_integers(operation, *primals)
    # Its operands are in the dtype of the input, the gradient of a wide result too.
    operation = without_preferred_dtype(operation)
    parts = []
    if not isinstance(left_tangent, SymbolicZero):
        numbers = weight.dequantize(left.dtype)
        parts.append(operation.compute(left_tangent, numbers if right is None else _replace_value(right, numbers)))
    if right is not None and not isinstance(right_tangent, SymbolicZero):
        numbers = (rows.values.astype(jnp.float32) * rows.scale).astype(left.dtype)
        parts.append(operation.compute(_replace_value(left, numbers), right_tangent.astype(left.dtype)))
    return out, sum(parts[1:], parts[0]).astype(out.dtype) if parts else jnp.zeros_like(out)


_multiply_integers.defjvp(_jvp, symbolic_zeros=True)


@jax.custom_jvp
def _replace_value(original: jax.Array, rounded: jax.Array) -> jax.Array:
    """What an array was rounded to, with the derivative of the array."""
    return rounded


@_replace_value.defjvp
def _straight_through(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    original, rounded = primals
    return _replace_value(original, rounded), tangents[0].astype(rounded.dtype)
