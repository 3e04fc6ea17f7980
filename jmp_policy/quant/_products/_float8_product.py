"""Products of numbers in 8-bit floating point, forward and backward."""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._base import OBSERVING, remember_weakly, vary, warn_once
from ...policy import MULTIPLE, CurrentScaling, DelayedScaling, Float8, Policy, PolicyMap
from .._numbers import Scaled, compute_current_scale, measure_amax, saturate
from ._amax_history import (
    DTYPES,
    Memory,
    State,
    join_memories,
    read_memory,
    scale_and_record,
    scale_by_history,
    varying_axes,
)
from ._bilinear import Bilinear, Convolution, Labels, Sharding

_ROWS: contextvars.ContextVar[list[tuple[int, np.dtype]] | None] = contextvars.ContextVar("_ROWS", default=None)
"""The numbers of rows, and the dtypes, of the products with fit weights in the running call of a model."""


def float8_product(
    operation: Bilinear, left: jax.Array, right: jax.Array, format: Float8, state: State | None = None
) -> jax.Array:
    """Computes `operation(left, right)` in 8 bits: both operands in e4m3, the gradient of the result in e5m2.

    A left operand of an odd number of rows is left to JAX. The caller leaves the weights for which `why_weight_wide`
    has a reason.

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
    rows, seen = _count_rows(operation, left.shape), _ROWS.get()
    if seen is not None:
        seen.append((rows, left.dtype))
    if rows % MULTIPLE:
        return operation.compute(left, right)
    # In `shard_map` a custom derivative varies over devices as its operand does. The cast to a varying weight makes JAX
    # sum the gradients of a weight that devices share.
    axes = tuple(varying_axes(left, right))
    left, right = vary(left, axes), vary(right, axes)
    spec = _ProductSpec(operation, format, left.dtype, jax.typeof(left), jax.typeof(right))
    return _product(spec, left, right, state)


@dataclasses.dataclass(frozen=True)
class _ProductSpec:
    """What a product is, without its numbers.

    Attributes:
      operation: what to compute.
      format: how to scale.
      dtype: the dtype of the operands and of their gradients.
      left: the type of the left operand: its shape, and how it lies on devices.
      right: the type of the right operand.
    """

    operation: Bilinear
    format: Float8
    dtype: np.dtype
    left: core.ShapedArray
    right: core.ShapedArray

    @property
    def by_row(self) -> bool:
        """Whether each slice along the summed axes has a scale of its own; forward and backward then scale anew."""
        return self.format.recipe == CurrentScaling("row")

    @property
    def sums(self) -> np.dtype:
        """The dtype of unscaled results: 448 times 448 is more than float16 holds."""
        return self.dtype if self.dtype == jnp.bfloat16 else np.dtype(np.float32)


class _Residuals(NamedTuple):
    """What the backward pass needs of the forward pass.

    Attributes:
      left: the left operand, in 8 bits where the backward pass multiplies the same 8 bits.
      right: the right operand, likewise.
      memories: of input and kernel for the next step, of the gradient for this one, which the backward pass replaces.
    """

    left: Scaled | jax.Array
    right: Scaled | jax.Array
    memories: dict[str, Memory]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: _ProductSpec, left: jax.Array, right: jax.Array, state: State | None) -> jax.Array:
    return _forward(spec, left, right, state, records=False)[0]


def _forward(
    spec: _ProductSpec, left: jax.Array, right: jax.Array, state: State | None, *, records: bool = True
) -> tuple[jax.Array, _Residuals]:
    operation = spec.operation
    # Both operands go into 8 bits, each by its own scale; with delayed scaling each also updates its memory.
    memories = {} if state is None else {name: read_memory(state, name) for name in DTYPES}
    inputs = _scale_operand(spec, memories, "input", left, operation.summed_axes(operation.left), records=records)
    weight = _scale_operand(spec, memories, "kernel", right, operation.summed_axes(operation.right), records=records)
    # The product of the 8-bit numbers, times both scales, is the result, which nothing rounds before if it is wide.
    dtype = np.dtype(operation.compute.preferred_element_type or spec.dtype)
    sums = spec.sums if dtype == spec.dtype else np.dtype(np.float32)
    values = multiply(operation, inputs.values, weight.values, sums)
    out = _undo_scales(values, operation, inputs, weight).astype(dtype)
    # A scale per row serves one direction alone, and a weight gradient in the compute dtype wants the input as it was.
    keeps_left = spec.by_row or not spec.format.weight_grad
    return out, _Residuals(left if keeps_left else inputs, right if spec.by_row else weight, memories)


def _backward(spec: _ProductSpec, residuals: _Residuals, grad: jax.Array) -> tuple[Any, ...]:
    memories = dict(residuals.memories)
    to_left, to_right = left_transpose(spec.operation), right_transpose(spec.operation)
    scale = functools.partial(_scale_operand, spec, memories)
    # The gradient of the input: the result's gradient in e5m2, times the weight, which mostly is in 8 bits already.
    grads = scale("output_grad", grad, to_left.summed_axes(to_left.left))
    weight = scale("kernel", residuals.right, to_left.summed_axes(to_left.right))
    values = grad_left(spec.operation, grads.values, weight.values, spec.left, spec.sums)
    left_grad = _undo_scales(values, to_left, grads, weight).astype(spec.dtype)
    if isinstance(residuals.left, Scaled) or spec.format.weight_grad:
        # The gradient of the weight: the input times the result's gradient, which is scaled again by its other rows.
        inputs = scale("input", residuals.left, to_right.summed_axes(to_right.left))
        grads = scale("output_grad", grad, to_right.summed_axes(to_right.right)) if spec.by_row else grads
        values = grad_right(spec.operation, grads.values, inputs.values, spec.right, spec.sums)
        right_grad = _undo_scales(values, to_right, inputs, grads).astype(spec.dtype)
    else:
        right_grad = grad_right(spec.operation, grad.astype(spec.dtype), residuals.left, spec.right, spec.dtype)
    # The gradient of the state is the next state.
    return left_grad, right_grad, join_memories(memories) if memories else None


_product.defvjp(_forward, _backward)


def _scale_operand(
    spec: _ProductSpec,
    memories: dict[str, Memory],
    name: str,
    x: jax.Array | Scaled,
    summed: tuple[int, ...],
    *,
    records: bool = True,
) -> Scaled:
    """Scales an operand into 8 bits, and with `records` replaces its memory, if it has one, by the next step's."""
    if isinstance(x, Scaled):
        return x
    if not isinstance(spec.format.recipe, DelayedScaling):
        amax = measure_amax(x, summed if spec.by_row else None)
        scale = compute_current_scale(amax, DTYPES[name], spec.format.margin)
        return Scaled(saturate(x, scale, DTYPES[name]), scale)
    if not records:
        return scale_by_history(x, name, memories[name], spec.format)
    scaled, memories[name] = scale_and_record(x, name, memories[name], spec.format)
    return scaled


def _undo_scales(values: jax.Array, labels: Bilinear, left: Scaled, right: Scaled) -> jax.Array:
    """Multiplies a product of 8-bit numbers by the scales of both operands, in float32."""
    wide = values.astype(jnp.float32)
    if not left.scale.ndim:
        return wide * (left.scale * right.scale)
    return wide * labels.align_scale(left.scale, labels.left) * labels.align_scale(right.scale, labels.right)


def _count_rows(operation: Bilinear, left: tuple[int, ...]) -> int:
    """Counts the rows of a left operand. Hardware multiplies in 8 bits only if the number is a multiple of 16.

    Returns 0 for a convolution, whose rows may be of any number.
    """
    if isinstance(operation.compute, Convolution):
        return 0
    return math.prod(length for label, length in zip(operation.left, left, strict=True) if label not in operation.right)


@contextlib.contextmanager
def warn_of_odd_rows(given: Policy | PolicyMap, about: object, *, initializes: bool = False) -> Iterator[None]:
    """Warns once, after the call of a model, if the number of rows kept every product out of 8 bits.

    Args:
      given: the policy or map of the model.
      about: the class with a policy; each has the warning once.
      initializes: whether the call only makes parameters: the inputs are often a single example.
    """
    if not _has_float8(given):
        yield
        return
    seen: list[tuple[int, np.dtype]] = []
    token = _ROWS.set(seen)
    try:
        yield
    finally:
        _ROWS.reset(token)
    if not seen or initializes or OBSERVING.value is not None or not all(rows % MULTIPLE for rows, _ in seen):
        return
    rows, dtype = seen[0]
    warn_once(
        about,
        f"No layer of the model computes in float8 in this call, but in {dtype}: the number of rows of the inputs (the "
        f"batch size times the positions) must be a multiple of {MULTIPLE}; it is {rows}. Pad the batch to "
        f"{-(-rows // MULTIPLE) * MULTIPLE} rows. A smaller min_size does not help.",
    )


@remember_weakly
def _has_float8(given: Policy | PolicyMap) -> bool:
    if isinstance(given, Policy):
        return isinstance(given.quantization, Float8)
    policies = [rule.policy for rule in given.rules]
    return any(map(_has_float8, policies)) or (given.default is not None and _has_float8(given.default))


def why_weight_wide(operation: Bilinear, left: tuple[int, ...], right: tuple[int, ...], format: Float8) -> str | None:
    """Why products with a weight stay in the compute dtype, however many rows the input has; `None` if they do not.

    Args:
      operation: what to compute.
      left: the shape of the input.
      right: the shape of the weight.
      format: of the policy.
    """
    if isinstance(operation.compute, Convolution):
        return _why_convolution_wide(dict(operation.compute.options), right, format)
    lengths, others = dict(zip(operation.left, left, strict=True)), dict(zip(operation.right, right, strict=True))
    shared = lengths.keys() & others.keys()
    alone = (lengths.keys() ^ others.keys()) - set(operation.out)
    if alone or any(lengths[label] != others[label] for label in shared):
        return "its equation sums one operand alone, or repeats one"
    summed = math.prod(lengths[label] for label in shared - set(operation.out))
    columns = math.prod(length for label, length in others.items() if label not in shared)
    return why_sizes_wide(summed * columns, format, summed, columns)


def why_sizes_wide(size: int, format: Float8, *lengths: int) -> str | None:
    """Why products with a weight stay in the compute dtype: the weight is small, or a length is no multiple of 16.

    >>> why_sizes_wide(16384, Float8(), 128, 128), why_sizes_wide(25600, Float8(), 256, 100)
    (None, 'the length 100 is no multiple of 16')
    """
    if size < format.min_size or size == 0:
        return f"{size} elements are fewer than min_size={format.min_size}"
    odd = next((length for length in lengths if length % MULTIPLE), None)
    return None if odd is None else f"the length {odd} is no multiple of {MULTIPLE}"


def _why_convolution_wide(options: dict[str, Any], right: tuple[int, ...], format: Float8) -> str | None:
    if options.get("feature_group_count", 1) != 1 or options.get("batch_group_count", 1) != 1:
        return "its convolution is one of groups"
    outputs, inputs, *_ = (right[axis] for axis in options["dimension_numbers"].rhs_spec)
    return why_sizes_wide(math.prod(right), format, inputs, outputs)


def multiply(operation: Bilinear, left: jax.Array, right: jax.Array, dtype: np.dtype) -> jax.Array:
    """Multiplies 8-bit numbers and sums them in `dtype`. Convolutions multiply in it too, for want of an 8-bit one."""
    compute = operation.compute
    if isinstance(compute, Convolution):
        return _without_dtype(compute)(left.astype(dtype), right.astype(dtype))
    return _contract(left, operation.left, right, operation.right, operation.out, dtype, compute.out_sharding)


def grad_left(
    operation: Bilinear,
    grad: jax.Array,
    right: jax.Array,
    like: core.ShapedArray,
    dtype: np.dtype,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Computes the gradient of the left operand, whose type is `like`, from the gradient of the result."""
    if isinstance(operation.compute, Convolution):
        convolve = _without_dtype(operation.compute)
        transpose = jax.linear_transpose(lambda left: convolve(left, right.astype(dtype)), like.update(dtype=dtype))
        return transpose(grad.astype(dtype))[0]
    sharding = _explicit_sharding(like)
    return _contract(grad, operation.out, right, operation.right, operation.left, dtype, sharding, precision)


def grad_right(
    operation: Bilinear,
    grad: jax.Array,
    left: jax.Array,
    like: core.ShapedArray,
    dtype: np.dtype,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Computes the gradient of the right operand, whose type is `like`, from the gradient of the result."""
    if isinstance(operation.compute, Convolution):
        convolve = _without_dtype(operation.compute)
        transpose = jax.linear_transpose(lambda right: convolve(left.astype(dtype), right), like.update(dtype=dtype))
        return transpose(grad.astype(dtype))[0]
    sharding = _explicit_sharding(like)
    return _contract(left, operation.left, grad, operation.out, operation.right, dtype, sharding, precision)


def left_transpose(operation: Bilinear) -> Bilinear:
    """The labels of `grad_left`: the result and the right operand go in, the left one comes out."""
    return dataclasses.replace(operation, left=operation.out, out=operation.left)


def right_transpose(operation: Bilinear) -> Bilinear:
    """The labels of `grad_right`: the left operand and the result go in, the right one comes out."""
    return dataclasses.replace(operation, right=operation.out, out=operation.right)


def _without_dtype(convolution: Convolution) -> Convolution:
    """The convolution whose result has the dtype of its operands."""
    return dataclasses.replace(convolution, preferred_element_type=None)


def _explicit_sharding(like: core.ShapedArray) -> NamedSharding | None:
    """The sharding of a gradient on a mesh whose axes are part of types: its operand's, which JAX cannot infer."""
    return like.sharding if AxisType.Explicit in like.sharding.mesh.axis_types else None


def _contract(
    left: jax.Array,
    left_labels: Labels,
    right: jax.Array,
    right_labels: Labels,
    out: Labels,
    dtype: np.dtype,
    sharding: Sharding | None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Multiplies two labelled arrays by one `dot_general`; the result has the axes of `out`, and is sharded like it."""
    # Labels of both operands are summed over, or, where the result has them, axes of a batch.
    shared = [label for label in left_labels if label in right_labels]
    summed, batch = ([x for x in shared if (x in out) == kept] for kept in (False, True))
    where = lambda labels: (tuple(map(left_labels.index, labels)), tuple(map(right_labels.index, labels)))
    # `dot_general` puts the axes of the batch first, then the others of the left, then of the right.
    made = [*batch, *(x for x in (*left_labels, *right_labels) if x not in shared)]
    options: dict[str, Any] = {} if sharding is None else {"out_sharding": _reorder_sharding(sharding, out, made)}
    options |= {"precision": precision, "preferred_element_type": dtype}
    product = lax.dot_general(left, right, (where(summed), where(batch)), **options)
    order = tuple(map(made.index, out))
    return product if order == tuple(range(len(out))) else lax.transpose(product, order)


def _reorder_sharding(sharding: Sharding, labels: Labels, order: Sequence[str]) -> Sharding:
    """The sharding of an array whose axes have these labels, after its axes are put into another order."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    by_label = dict(zip(labels, spec, strict=False))  # a spec may leave the last axes out
    reordered = PartitionSpec(*map(by_label.get, order))
    return NamedSharding(sharding.mesh, reordered) if isinstance(sharding, NamedSharding) else reordered
