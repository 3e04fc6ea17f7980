"""Products of numbers in 8-bit floating point, forward and backward."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._float8_format import CurrentScaling, DelayedScaling, Float8
from ._amax import amax_of
from ._amax_history import DTYPES, Memory, State, memory_of, scaled_and_recorded, scaled_by_history, state_of
from ._bilinear import Bilinear
from ._float8 import Scaled, current_scale, saturated
from ._float8_sizes import why_wide
from ._transposed import multiply, of_left, of_right, pulled_left, pulled_right
from ._varying import varying_axes, varying_over


def float8_product(
    operation: Bilinear, left: jax.Array, right: jax.Array, format: Float8, state: State | None = None
) -> jax.Array:
    """Computes `operation(left, right)` in 8 bits: both operands in e4m3, the gradient of the result in e5m2.

    Products whose sizes gain nothing are left to JAX.

    Args:
      operation: what to compute.
      left: floating.
      right: the weight, which is computed with in the dtype of `left`.
      format: how to scale.
      state: of the product, for `DelayedScaling`; its gradient is the next state.

    Returns:
      The result in the dtype of `left`, or in the preferred one of the operation.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3; the operands are multiplied as 8-bit
    numbers, and the result by their scales, as in `flax.linen.fp8_ops.Fp8DirectDotGeneralOp`.
    """
    right = right.astype(left.dtype)
    if why_wide(operation, left.shape, right.shape, format) is not None:
        return operation.compute(left, right)
    # A derivative of our own varies over devices as its operand does, and that of a weight which they share is a sum.
    axes = varying_axes(left, right)
    left, right = varying_over(left, axes), varying_over(right, axes)
    return _product(_Spec(operation, format, left.dtype, jax.typeof(left), jax.typeof(right)), left, right, state)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What there is to know of a product before its operands are.

    Attributes:
      operation: what to compute.
      format: how to scale.
      dtype: that of the operands and of their gradients.
      left: the type of the left operand: its shape, and how it lies on devices.
      right: the type of the right operand.
    """

    operation: Bilinear
    format: Float8
    dtype: np.dtype
    left: Any
    right: Any

    @property
    def by_row(self) -> bool:
        """Whether the slices along the axes that are summed over have a scale each, so that each product has others."""
        return self.format.recipe == CurrentScaling("row")

    @property
    def sums(self) -> Any:
        """The dtype of unscaled results: 448 times 448 is more than float16 holds."""
        return self.dtype if self.dtype == jnp.bfloat16 else np.dtype(np.float32)


class _Residuals(NamedTuple):
    left: Scaled | jax.Array
    right: Scaled | jax.Array
    memories: dict[str, Memory]  # of the next step, but for that of the gradient, which is of this one


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: _Spec, left: jax.Array, right: jax.Array, state: State | None) -> jax.Array:
    return _forward(spec, left, right, state, records=False)[0]


def _forward(
    spec: _Spec, left: jax.Array, right: jax.Array, state: State | None, *, records: bool = True
) -> tuple[jax.Array, _Residuals]:
    operation = spec.operation
    memories = {} if state is None else {name: memory_of(state, name) for name in DTYPES}
    inputs = _scaled(spec, memories, "input", left, operation.summed(operation.left), records=records)
    weight = _scaled(spec, memories, "kernel", right, operation.summed(operation.right), records=records)
    values = multiply(operation, inputs.values, weight.values, spec.sums)
    out = _rescaled(values, operation, inputs, weight).astype(operation.compute.preferred_element_type or spec.dtype)
    keeps_left = spec.by_row or not spec.format.weight_grad
    return out, _Residuals(left if keeps_left else inputs, right if spec.by_row else weight, memories)


def _backward(spec: _Spec, residuals: _Residuals, grad: jax.Array) -> tuple[Any, ...]:
    memories, to_left, to_right = dict(residuals.memories), of_left(spec.operation), of_right(spec.operation)
    scaled = functools.partial(_scaled, spec, memories)
    grads = scaled("output_grad", grad, to_left.summed(to_left.left))
    weight = scaled("kernel", residuals.right, to_left.summed(to_left.right))
    values = pulled_left(spec.operation, grads.values, weight.values, spec.left, spec.sums)
    left_grad = _rescaled(values, to_left, grads, weight).astype(spec.dtype)
    if isinstance(residuals.left, Scaled) or spec.format.weight_grad:
        inputs = scaled("input", residuals.left, to_right.summed(to_right.left))
        grads = scaled("output_grad", grad, to_right.summed(to_right.right)) if spec.by_row else grads
        values = pulled_right(spec.operation, grads.values, inputs.values, spec.right, spec.sums)
        right_grad = _rescaled(values, to_right, inputs, grads).astype(spec.dtype)
    else:
        right_grad = pulled_right(spec.operation, grad.astype(spec.dtype), residuals.left, spec.right, spec.dtype)
    return left_grad, right_grad, state_of(memories) if memories else None


_product.defvjp(_forward, _backward)


def _scaled(
    spec: _Spec,
    memories: dict[str, Memory],
    name: str,
    x: jax.Array | Scaled,
    summed: tuple[int, ...],
    *,
    records: bool = True,
) -> Scaled:
    """An operand in 8 bits; its memory, if there is one and it `records`, becomes that of the next step."""
    if isinstance(x, Scaled):
        return x
    if not isinstance(spec.format.recipe, DelayedScaling):
        scale = current_scale(amax_of(x, summed if spec.by_row else None), DTYPES[name], spec.format.margin)
        return Scaled(saturated(x, scale, DTYPES[name]), scale)
    if not records:
        return scaled_by_history(x, name, memories[name], spec.format)
    scaled, memories[name] = scaled_and_recorded(x, name, memories[name], spec.format)
    return scaled


def _rescaled(values: jax.Array, labels: Bilinear, left: Scaled, right: Scaled) -> jax.Array:
    wide = values.astype(jnp.float32)
    if not left.scale.ndim:
        return wide * (left.scale * right.scale)
    return wide * labels.aligned(left.scale, labels.left) * labels.aligned(right.scale, labels.right)
