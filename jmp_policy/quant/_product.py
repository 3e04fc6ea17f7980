"""Products with quantized weights: of integers where both sides are, else in the dtype of the input."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._formats import Int8, Quantization
from ._array import QuantizedArray
from ._bilinear import Bilinear
from ._integers import Quantized, peak, symmetric
from ._layout import Layout
from ._weight import Unquantized, Weight, fake_quantized


def product(operation: Bilinear, left: jax.Array, weight: Weight) -> jax.Array:
    """Computes `operation(left, weight)` with a quantized weight.

    With `Int8`, each row of `left`, which is to say all that is summed over together, is quantized by its largest
    magnitude, the integers are multiplied into int32, and the sums by both scales in float32. That needs one scale
    for all weights that are summed over; where a weight's are finer, and for other formats, the weight is
    dequantized to the dtype of `left`.

    The derivative is that of the product of both operands as they were rounded; it passes straight through the
    rounding, to an `Unquantized` weight and to `left`.

    Args:
      operation: what to compute.
      left: floating.
      weight: the right operand.

    Returns:
      The result in the dtype of `left`, or in the preferred one of the operation.

    Source: Dettmers et al., LLM.int8(), NeurIPS 2022, section 2.2 (a scale per row and column).
    """
    if isinstance(weight, Unquantized):
        spec = _Spec(operation, weight.format, weight.layout)
        return _straight_through(spec, left, weight.array)
    frozen = jax.tree.map(lax.stop_gradient, weight)
    return _straight_through(_Spec(operation, weight.format, weight.layout), left, frozen)


@dataclasses.dataclass(frozen=True)
class _Spec:
    operation: Bilinear
    format: Quantization
    layout: Layout

    def weight(self, right: Any) -> Weight:
        return right if isinstance(right, QuantizedArray) else Unquantized(right, self.format, self.layout)


def _computed(spec: _Spec, left: jax.Array, right: Any) -> jax.Array:
    weight = spec.weight(right)
    if not _in_integers(spec, weight):
        return spec.operation.compute(left, fake_quantized(weight, left.dtype))
    operation = spec.operation
    weight = weight if isinstance(weight, QuantizedArray) else weight.quantized()
    rows = _rows(spec, left, weight)
    sums = operation.compute(rows.values, weight.values, jnp.int32).astype(jnp.float32)
    scale = operation.aligned(rows.scale, operation.left) * operation.aligned(weight.scale, operation.right)
    return (sums * scale).astype(operation.compute.preferred_element_type or left.dtype)


def _in_integers(spec: _Spec, weight: Weight) -> bool:
    if not isinstance(spec.format, Int8) or not spec.format.activations:
        return False
    shared = {axis % weight.ndim for axis in weight.layout.axes}
    return set(spec.operation.summed(spec.operation.right)) <= shared and not _joins_groups(spec.operation)


def _joins_groups(operation: Bilinear) -> bool:
    """Whether a convolution sums over parts of the batch, so that no example has a scale of its own."""
    return dict(getattr(operation.compute, "options", ())).get("batch_group_count", 1) != 1


def _rows(spec: _Spec, left: jax.Array, weight: Weight) -> Quantized:
    amax = peak(left, spec.operation.summed(spec.operation.left))
    clip = weight.input_clip if isinstance(weight, QuantizedArray) else None
    return symmetric(left, amax if clip is None else jnp.minimum(amax, clip))


_straight_through = jax.custom_jvp(_computed, nondiff_argnums=(0,))


def _jvp(spec: _Spec, primals: tuple, tangents: tuple) -> tuple[jax.Array, Any]:
    left, right = primals
    left_tangent, right_tangent = tangents
    out = _straight_through(spec, left, right)
    weight, compute = spec.weight(right), spec.operation.compute
    parts = []
    if not isinstance(left_tangent, SymbolicZero):
        parts.append(compute(left_tangent, fake_quantized(weight, left.dtype)))
    if isinstance(weight, Unquantized) and not isinstance(right_tangent, SymbolicZero):
        as_rounded = left
        if _in_integers(spec, weight):
            values, scale, _ = _rows(spec, left, weight)
            as_rounded = (values.astype(jnp.float32) * scale).astype(left.dtype)
        parts.append(compute(as_rounded, right_tangent.astype(left.dtype)))
    return out, sum(parts[1:], parts[0]).astype(out.dtype) if parts else jnp.zeros_like(out)


_straight_through.defjvp(_jvp, symbolic_zeros=True)
