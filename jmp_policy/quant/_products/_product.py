"""Matmuls and convolutions with quantized weights."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ...policy import BlockFormat, Int8
from .._numbers import Quantized, measure_row_amax, narrow_sums, quantize_symmetric, to_numbers
from .._weights import FakeQuantized, QuantizedArray, StoredWeight, fake_quantize
from ._bilinear import Bilinear, is_matmul, without_preferred_dtype
from ._block_product import block_product, has_stored_order

# Not a JAX context, which would be part of every jit key: each calibration would compile all ops again.
_OBSERVER: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar("_OBSERVER", default=None)


@contextlib.contextmanager
def observe_products(observe: Callable[..., Any]) -> Iterator[None]:
    """Calls `observe(operation, left, weight)` before each matmul by a quantized weight: it returns the weight."""
    token = _OBSERVER.set(observe)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def observe_product(operation: Any, left: jax.Array, weight: Any) -> Any:
    """Reports a matmul by a quantized weight to the running observer, if any, and returns the weight to use."""
    observe = _OBSERVER.get()
    return weight if observe is None else observe(operation, left, weight)


def multiply_quantized(
    operation: Bilinear, left: jax.Array, weight: StoredWeight, key: jax.Array | None = None
) -> jax.Array:
    """Computes `operation(left, weight)` with a quantized weight, and straight-through derivatives.

    - `Int8` with activations: each row of `left` is quantized, or all of it by one static scale; int8 values are
      multiplied into int32, and the sums are scaled in float32. This needs one weight scale per sum.
    - Block formats with activations: see `block_product`. This needs blocks along all summed axes, in stored order.
    - Otherwise the weight is dequantized to the dtype of `left`.

    Source: Dettmers et al., LLM.int8(), NeurIPS 2022, section 2.2 (a scale per row and column).
    """
    weight = observe_product(operation, left, weight)
    if isinstance(weight, QuantizedArray):
        weight = jax.tree.map(lax.stop_gradient, weight)
    if isinstance(weight.format, BlockFormat) and is_block_product(operation, left, weight):
        right = weight if isinstance(weight, QuantizedArray) else weight.array
        return block_product(operation, left, right, weight.format, key)
    if not is_integer_product(operation, weight):
        return operation.compute(left, fake_quantize(weight, left.dtype))
    if isinstance(weight, QuantizedArray):
        right, rounded = None, weight
    else:
        right = weight.array
        rounded = dataclasses.replace(weight, array=lax.stop_gradient(right)).quantize()
    # Rounded outside of the function with the custom derivative, which would round again.
    rows = _quantize_rows(operation, lax.stop_gradient(left), rounded)
    return _multiply_integers(operation, left, right, rows, rounded)


def is_block_product(operation: Bilinear, left: jax.Array, weight: StoredWeight) -> bool:
    """True if the operation multiplies blocks, because the weight's blocks span all of its summed axes."""
    if not isinstance(weight.format, BlockFormat) or not weight.format.activations:
        return False
    blocked = {axis % weight.ndim for axis in weight.layout.axes}
    lies_along = set(operation.summed_axes(operation.right)) == blocked
    return lies_along and is_matmul(operation, left.shape, weight.shape) and has_stored_order(operation)


def is_integer_product(operation: Bilinear, weight: Any) -> bool:
    """True if the operation multiplies integers: inputs are quantized, and each sum has one scale."""
    if not isinstance(weight, QuantizedArray | FakeQuantized):
        return False
    if not isinstance(weight.format, Int8) or not weight.format.activations:
        return False
    shared = {axis % weight.ndim for axis in weight.layout.axes}
    # A convolution with batch groups sums over examples, which have different scales.
    batch_groups = dict(getattr(operation.compute, "options", ())).get("batch_group_count", 1)
    return set(operation.summed_axes(operation.right)) <= shared and batch_groups == 1


def _quantize_rows(operation: Bilinear, left: jax.Array, weight: QuantizedArray) -> Quantized:
    """Quantizes each row of an input to int8 by its largest magnitude, or all rows by the calibrated one."""
    summed, clip = operation.summed_axes(operation.left), weight.input_clip
    if clip is not None and isinstance(weight.format, Int8) and weight.format.act_scale == "static":
        return quantize_symmetric(left, jnp.full((1,) * left.ndim, jnp.min(clip)))
    amax = measure_row_amax(left, summed)
    if clip is not None:
        # Clipping would hide an infinity. All clips of a stack are equal; they are repeated to be sliced with it.
        amax = jnp.where(jnp.isfinite(amax), jnp.minimum(amax, jnp.min(clip)), amax)
    return quantize_symmetric(left, amax)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiply_integers(
    operation: Bilinear, left: jax.Array, right: jax.Array | None, rows: Quantized, weight: QuantizedArray
) -> jax.Array:
    """Multiplies the integers of `left` and `right`; `right` is None for a stored weight."""
    sums = operation.compute(rows.values, weight.values, jnp.int32).astype(jnp.float32)
    dtype = np.dtype(operation.compute.preferred_element_type or left.dtype)
    if dtype == jnp.bfloat16:  # float16 would overflow
        sums = narrow_sums(sums)
    # One by one: the product of both scales may underflow or overflow.
    scaled = sums * operation.align_scale(rows.scale, operation.left)
    scaled = scaled * operation.align_scale(weight.scale, operation.right)
    return scaled.astype(dtype)


def _jvp(operation: Bilinear, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """Multiplies each tangent by the dequantized other operand, and adds both."""
    left, right, rows, weight = primals
    left_tangent, right_tangent, *_ = tangents
    out = _multiply_integers(operation, *primals)
    # Both tangents are computed in the dtype of the input, also for a wide output.
    operation = without_preferred_dtype(operation)
    parts = []
    if not isinstance(left_tangent, SymbolicZero):
        numbers = weight.dequantize(left.dtype)
        parts.append(operation.compute(left_tangent, numbers if right is None else _replace_value(right, numbers)))
    if right is not None and not isinstance(right_tangent, SymbolicZero):
        numbers = _replace_value(left, to_numbers(rows).astype(left.dtype))
        parts.append(operation.compute(numbers, right_tangent.astype(left.dtype)))
    return out, sum(parts[1:], parts[0]).astype(out.dtype) if parts else jnp.zeros_like(out)


_multiply_integers.defjvp(_jvp, symbolic_zeros=True)


@jax.custom_jvp
def _replace_value(original: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns `rounded` with the derivative of `original`."""
    return rounded


@_replace_value.defjvp
def _straight_through(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    original, rounded = primals
    return _replace_value(original, rounded), tangents[0].astype(rounded.dtype)
