"""Matmuls and convolutions in float8, their derivatives, and the amax histories of delayed scaling."""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from .._base import OBSERVING, is_prepared, read_leaf, remember_weakly, warn_once, write_leaf
from ..policy import MULTIPLE, CurrentScaling, DelayedScaling, Float8, Policy, PolicyMap, Quantization, list_policies
from ._bilinear import (
    Bilinear,
    Convolution,
    Labels,
    RaggedDot,
    contract,
    differentiate,
    is_matmul,
    vary_together,
    varying_axes,
    without_preferred_dtype,
)
from ._numbers import (
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    Scaled,
    compute_current_scale,
    compute_scale,
    measure_amax,
    saturate,
    select,
)

# Of the operands with an amax history.
DTYPES = {"input": FLOAT8_E4M3, "kernel": FLOAT8_E4M3, "output_grad": FLOAT8_E5M2}

State = dict[str, jax.Array]
"""`{name}_scale` of shape `(1,)` and `{name}_amax_history` of shape `(amax_history_length,)` for each operand, float32,
as in Flax's float8 ops. A history is in the order newest, oldest, ..., second newest."""

# Row counts and dtypes of the matmuls with eligible weights in the running call of a model.
_ROWS: contextvars.ContextVar[list[tuple[int, np.dtype]] | None] = contextvars.ContextVar("_ROWS", default=None)


def float8_product(
    operation: Bilinear,
    left: jax.Array,
    right: jax.Array,
    format: Float8,
    state: State | None = None,
    where: str | None = "",
) -> jax.Array:
    """Computes `operation(left, right)` with e4m3 operands; the gradient of the output is rounded to e5m2.

    If the number of rows of `left` is not a multiple of 16, it computes in the dtype of `left`. The caller has checked
    `reason_not_float8`. The gradient of `state` (for `DelayedScaling`) is the next state, so it must be differentiated
    if the weight is; `where` names the weight of a layer for that error, and None means a state of this call alone.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3; float8 values are multiplied and the
    output is scaled, as in `flax.linen.fp8_ops.Fp8DirectDotGeneralOp`.
    """
    assert needs_state(format) == (state is not None)
    right = right.astype(left.dtype)
    rows, seen = 0, _ROWS.get()
    if not isinstance(operation.compute, Convolution):  # which has no restriction
        lengths = zip(operation.left, left.shape, strict=True)
        rows = math.prod(length for label, length in lengths if label not in operation.right)
    if seen is not None and not isinstance(operation.compute, RaggedDot):
        seen.append((rows, left.dtype))
    if rows % MULTIPLE:
        return operation.compute(left, right)
    left, right = vary_together(left, right)
    spec = _Float8Spec(format, left.dtype, jax.typeof(left), jax.typeof(right), where)
    return _multiply_float8(spec, operation, left, right, state)


@dataclasses.dataclass(frozen=True)
class _Float8Spec:
    """Static description of a matmul or convolution."""

    format: Float8
    dtype: np.dtype  # of the operands and their gradients
    left: core.ShapedArray
    right: core.ShapedArray
    where: str | None = dataclasses.field(default="", compare=False)  # names the weight, for errors

    @property
    def by_row(self) -> bool:
        """True if each slice along the summed axes has its own scale."""
        return self.format.recipe == CurrentScaling("row")

    @property
    def sums(self) -> np.dtype:
        """Dtype of unscaled sums: float16 overflows at 448 * 448."""
        return self.dtype if self.dtype == jnp.bfloat16 else np.dtype(np.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_float8(
    spec: _Float8Spec, operation: Bilinear, left: jax.Array, right: jax.Array, state: State | None
) -> jax.Array:
    return _forward_float8(spec, operation, left, right, state, records=False)[0]


def _forward_to_differentiate(
    spec: _Float8Spec, operation: Any, left: Any, right: Any, state: Any
) -> tuple[jax.Array, Any]:
    """Computes `_forward_float8` where at least one operand is differentiated; they are `CustomVJPPrimal`s."""
    if state is not None and spec.where is not None:
        _check_state_is_trained(spec, right, next(iter(state.values())))
    return _forward_float8(spec, *jax.tree.map(lambda operand: operand.value, (operation, left, right, state)))


def _check_state_is_trained(spec: _Float8Spec, weight: Any, state: Any) -> None:
    """Raises a `ValueError` if the gradient of the weight is used, and that of its state is not, or by JAX alone."""
    weight_text = f"The weight{spec.where} of shape {weight.value.shape}, multiplied in {str(spec.format)!r},"
    example = (
        "For example, for linen variables with both collections: jmp.value_and_grad(loss_fn, loss_scale=opt_state)"
        "(variables), then jmp.optim.step; for an nnx model: jmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer)"
        "(model), then the update of a jmp.nnx.Optimizer."
    )
    if weight.perturbed and not state.perturbed:
        raise ValueError(
            f"{weight_text} is differentiated, and the float8 state that scales it is not: the scales would never "
            f"change, and small gradients would become zero. Differentiate the state beside the weight. {example}"
        )
    # A matmul by hand may be differentiated by `jax.grad` alone; its state is not in a layer.
    if spec.where and state.perturbed and not is_prepared(state.value):
        raise ValueError(
            f"{weight_text} has float8 state that is differentiated by JAX or Flax alone: several uses of it would be "
            "added, and plain optax would train it like a parameter. Take gradients and steps of this package. "
            f"{example}"
        )


def _forward_float8(
    spec: _Float8Spec,
    operation: Bilinear,
    left: jax.Array,
    right: jax.Array,
    state: State | None,
    *,
    records: bool = True,
) -> tuple[jax.Array, Any]:
    # With delayed scaling, this also updates the histories of both operands.
    state = None if state is None else dict(state)
    inputs = _scale_operand(spec, state, "input", left, operation, operation.left, records=records)
    weight = _scale_operand(spec, state, "kernel", right, operation, operation.right, records=records)
    # Float8 values are multiplied, and the sums are scaled. A wide output is not rounded in between.
    compute = operation.compute
    dtype = np.dtype(compute.preferred_element_type or spec.dtype)
    sums = spec.sums if dtype == spec.dtype else np.dtype(np.float32)
    if isinstance(compute, Convolution):  # XLA has no float8 convolution
        compute = without_preferred_dtype(operation).compute
        values = compute(inputs.values.astype(sums), weight.values.astype(sums))
    else:
        values = contract(operation, inputs.values, weight.values, sums, compute.out_sharding)
    out = _undo_scales(spec, values, operation, inputs, weight).astype(dtype)
    # Row scales serve one direction only, and a weight gradient in the compute dtype needs the unrounded input.
    keeps_left = spec.by_row or not spec.format.weight_grad
    return out, (operation, left if keeps_left else inputs, right if spec.by_row else weight, state)


def _backward_float8(spec: _Float8Spec, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    operation, left, right, state = residuals
    state = None if state is None else dict(state)  # of input and kernel for the next step, of the gradient for this
    grad = grad.instantiate() if isinstance(grad, SymbolicZero) else grad
    to_left, to_right = operation.transpose("left"), operation.transpose("right")
    scale = functools.partial(_scale_operand, spec, state)
    # Gradient of the input: output gradient times weight, which is in float8 already unless scaled by row.
    grads, weight = scale("output_grad", grad, to_left, to_left.left), scale("kernel", right, to_left, to_left.right)
    values = differentiate(operation, "left", grads.values, weight.values, spec.left, spec.sums)
    left_grad = _undo_scales(spec, values, to_left, grads, weight).astype(spec.dtype)
    if isinstance(left, Scaled) or spec.format.weight_grad:
        # Gradient of the weight: input times output gradient, scaled again if by row.
        inputs = scale("input", left, to_right, to_right.left)
        grads = scale("output_grad", grad, to_right, to_right.right) if spec.by_row else grads
        values = differentiate(operation, "right", grads.values, inputs.values, spec.right, spec.sums)
        right_grad = _undo_scales(spec, values, to_right, inputs, grads).astype(spec.dtype)
    else:
        right_grad = differentiate(operation, "right", grad.astype(spec.dtype), left, spec.right, spec.dtype)
    return None, left_grad, right_grad, state  # the gradient of the state is the next state


_multiply_float8.defvjp(_forward_to_differentiate, _backward_float8, symbolic_zeros=True)


def _scale_operand(
    spec: _Float8Spec,
    state: State | None,
    name: str,
    x: jax.Array | Scaled,
    operation: Bilinear,
    operand: Labels,
    *,
    records: bool = True,
) -> Scaled:
    """Scales an operand to float8; with `records`, also replaces its entries of the state by the next step's."""
    if isinstance(x, Scaled):
        return x
    if state is None:
        amax = operation.measure_amax(x, operand, by_row=spec.by_row)
        scale = compute_current_scale(amax, DTYPES[name], spec.format.margin)
        return Scaled(saturate(x, operation.spread_scale(scale, operand, by_row=spec.by_row), DTYPES[name]), scale)
    return (scale_and_record if records else scale_by_history)(x, name, state, spec.format)


def _undo_scales(spec: _Float8Spec, values: jax.Array, operation: Bilinear, left: Scaled, right: Scaled) -> jax.Array:
    """Multiplies the sums of a float8 matmul by the scales of both operands, in float32."""
    wide, align = values.astype(jnp.float32), functools.partial(operation.align_scale, by_row=spec.by_row)
    if spec.by_row:
        return wide * align(left.scale, operation.left) * align(right.scale, operation.right)
    return wide * (align(left.scale, operation.left) * align(right.scale, operation.right))


def needs_state(format: Quantization | None) -> TypeGuard[Float8]:
    """True for `Float8` with `DelayedScaling`."""
    return isinstance(format, Float8) and isinstance(format.recipe, DelayedScaling)


def without_state(format: Quantization) -> Quantization:
    """Replaces `DelayedScaling`, whose history needs a layer and earlier steps, by `CurrentScaling`."""
    if not needs_state(format):
        return format
    return dataclasses.replace(format, recipe=CurrentScaling(), amax_history_length=Float8.amax_history_length)


def new_state(format: Float8, stack: tuple[int, ...] = ()) -> State:
    """Returns the initial state of a layer, or of a stack of layers of shape `stack`."""
    state = {}
    for name in DTYPES:
        state[f"{name}_scale"] = jnp.ones((*stack, 1), jnp.float32)
        state[f"{name}_amax_history"] = jnp.zeros((*stack, format.amax_history_length), jnp.float32)
    return state


def scale_by_history(x: jax.Array, name: str, state: State, format: Float8) -> Scaled:
    """Casts an operand, a key of `DTYPES`, to float8 by the scale of its history.

    Source: `DelayedScaling` of NVIDIA's Transformer Engine; Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    used, _ = _compute_scales(name, state, format)
    seen = select(jnp.isfinite(x), x, jnp.nan)  # saturation would hide an infinity
    return Scaled(saturate(seen, used, DTYPES[name]), used)


def scale_and_record(x: jax.Array, name: str, state: State, format: Float8) -> Scaled:
    """Like `scale_by_history`, and updates the scale and history of the operand for the next step."""
    used, made = _compute_scales(name, state, format)
    scale, amax_history = state[f"{name}_scale"], state[f"{name}_amax_history"]
    history = jnp.maximum(read_leaf(amax_history), 0.0)
    history, is_finite = _record_amax(lax.stop_gradient(x), lax.stop_gradient(history))
    state[f"{name}_scale"] = write_leaf(made[None], scale)
    state[f"{name}_amax_history"] = write_leaf(history, amax_history)
    return Scaled(saturate(x, used, DTYPES[name]), select(is_finite, used, jnp.nan))


def _compute_scales(name: str, state: State, format: Float8) -> tuple[jax.Array, jax.Array]:
    """Returns the scale of this step, and the scale to store."""
    recipe = format.recipe
    assert isinstance(recipe, DelayedScaling)
    stored, history = read_leaf(state[f"{name}_scale"])[0], read_leaf(state[f"{name}_amax_history"])
    # The state of a layer that did not run may be zero, or the least float after a branch that was not taken.
    stored = select(stored > 0, stored, 1.0)
    largest = jnp.max(history) if recipe.amax == "max" else history[0]
    made = compute_scale(largest, stored, DTYPES[name], format.margin)
    return (stored if recipe.delay == 2 else made), made


@custom_vmap
def _record_amax(x: jax.Array, history: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds the largest magnitude of an array to its history if it is finite; returns the history and that condition."""
    members = history.shape[:-1]  # of an ensemble, whose axes lead in the array too
    of_each = measure_amax(x, tuple(range(len(members), x.ndim))).reshape(members) if members else measure_amax(x)
    shared = tuple(varying_axes(x) - varying_axes(history))
    amax = lax.pmax(of_each, shared) if shared else of_each
    is_finite = jnp.isfinite(amax)
    newest = lax.expand_dims(select(is_finite, amax, 0.0), (len(members),))
    if history.shape[-1] == 1:
        return newest, is_finite
    return lax.concatenate([newest, history[..., 2:], history[..., :1]], len(members)), is_finite


@_record_amax.def_vmap
def _record_batch(size: int, batched: list[bool], x: jax.Array, history: jax.Array) -> Any:
    """Reduces examples that share a history together; each member of an ensemble has its own history."""
    of_x, of_history = batched
    if of_history:
        return _record_amax(x if of_x else jnp.broadcast_to(x, (size, *x.shape)), history), (True, True)
    return _record_amax(jnp.moveaxis(x, 0, history.ndim - 1), history), (False, False)


@contextlib.contextmanager
def warn_of_odd_rows(given: Policy | PolicyMap, about: object, *, initializes: bool = False) -> Iterator[None]:
    """Warns once per class `about`, after a call, if the number of rows kept every matmul out of float8."""
    if not has_float8(given):
        yield
        return
    seen: list[tuple[int, np.dtype]] = []
    token = _ROWS.set(seen)
    try:
        yield
    finally:
        _ROWS.reset(token)
    # An initialization does not warn: its input is often a single example.
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
def has_float8(given: Policy | PolicyMap) -> bool:
    return any(isinstance(policy.quantization, Float8) for policy in list_policies(given))


def reason_not_float8(operation: Bilinear, left: tuple[int, ...], right: tuple[int, ...], format: Float8) -> str | None:
    """Returns the reason why matmuls with a weight stay in the compute dtype whatever the input, or None."""
    if isinstance(operation.compute, Convolution):
        options = dict(operation.compute.options)
        if options.get("feature_group_count", 1) != 1 or options.get("batch_group_count", 1) != 1:
            return "its convolution is one of groups"
        outputs, inputs, *_ = (right[axis] for axis in options["dimension_numbers"].rhs_spec)
        return why_sizes_wide(math.prod(right), format, inputs, outputs)
    if not is_matmul(operation, left, right):
        return "its equation sums one operand alone, or repeats one"
    lengths = dict(zip(operation.right, right, strict=True))
    summed = math.prod(lengths[label] for label in operation.left if label in lengths and label not in operation.out)
    columns = math.prod(length for label, length in lengths.items() if label not in operation.left)
    return why_sizes_wide(summed * columns, format, summed, columns)


def why_sizes_wide(size: int, format: Float8, *lengths: int) -> str | None:
    """Returns the reason if a weight is too small or a length is not a multiple of 16, else None."""
    if size < format.min_size or size == 0:
        return f"{size} elements are fewer than min_size={format.min_size}"
    odd = next((length for length in lengths if length % MULTIPLE), None)
    return None if odd is None else f"the length {odd} is not a multiple of {MULTIPLE}"
