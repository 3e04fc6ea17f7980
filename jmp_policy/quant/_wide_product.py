"""Half-precision matmuls and convolutions with float32 outputs, and their derivatives."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax import core
from jax.extend.core import Literal

from .._base import at_least_float32
from ._bilinear import (
    Bilinear,
    Convolution,
    Dot,
    Side,
    differentiate,
    is_matmul,
    vary_together,
    widen_on_cpu,
    without_preferred_dtype,
)


def wide_product(
    operation: Bilinear, left: jax.Array, right: jax.Array, dtype: np.dtype, compute_dtype: np.dtype
) -> jax.Array:
    """Computes `operation(left, right)` with operands in `compute_dtype` and the output in `dtype`.

    The backward pass has operands in `compute_dtype` and float32 sums too. JAX's own would have a float32 operand, and
    would round the gradient of a float32 weight. It has no forward-mode derivative. In `jax.shard_map`, the gradient
    of a replicated weight is summed in the dtype of the weight. The operation's `preferred_element_type` is ignored.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.3.
    """
    dtype, compute_dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype)), np.dtype(compute_dtype)
    operation = without_preferred_dtype(operation)
    if isinstance(operation.compute, Dot) and not is_matmul(operation, left.shape, right.shape):
        return operation.compute(left.astype(compute_dtype), right.astype(compute_dtype), dtype)
    left, right = vary_together(left, right)
    types, config = (jax.typeof(left), jax.typeof(right)), cast(Any, jax.config)
    spec = _WideSpec(dtype, compute_dtype, *types, config.jax_default_matmul_precision)
    return _multiply_wide(spec, operation, left, right)


@dataclasses.dataclass(frozen=True)
class _WideSpec:
    """Static description of a matmul or convolution."""

    dtype: np.dtype  # of the output
    compute_dtype: np.dtype  # of the operands of each matmul
    left: core.ShapedArray  # types as stored
    right: core.ShapedArray
    precision: str | None  # default matmul precision of the forward pass

    @property
    def sums(self) -> np.dtype:
        """Dtype of the sums in the backward pass."""
        return at_least_float32(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_wide(spec: _WideSpec, operation: Bilinear, left: jax.Array, right: jax.Array) -> jax.Array:
    return _forward_wide(spec, operation, left, right)[0]


def _forward_wide(spec: _WideSpec, operation: Bilinear, left: jax.Array, right: jax.Array) -> tuple[jax.Array, Any]:
    left, right = left.astype(spec.compute_dtype), right.astype(spec.compute_dtype)
    out = _choose_form(spec, functools.partial(operation.compute, preferred=spec.dtype), left, right)
    return out, (operation, left, right)


def _backward_wide(spec: _WideSpec, residuals: Any, grad: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    operation, left, right = residuals
    grad = grad.astype(spec.compute_dtype)
    with jax.default_matmul_precision(spec.precision):
        left_grad = _differentiate(spec, operation, "left", grad, right, spec.left)
        right_grad = _differentiate(spec, operation, "right", grad, left, spec.right)
    return None, left_grad.astype(spec.left.dtype), right_grad.astype(spec.right.dtype)


_multiply_wide.defvjp(_forward_wide, _backward_wide)


def _differentiate(
    spec: _WideSpec, operation: Bilinear, side: Side, grad: jax.Array, other: jax.Array, like: core.ShapedArray
) -> jax.Array:
    """Computes the gradient of one operand with sums in float32."""

    def transpose(grad: jax.Array, other: jax.Array) -> jax.Array:
        if isinstance(operation.compute, Convolution):
            run = functools.partial(differentiate, operation, side, like=like, dtype=grad.dtype)
            return _run_with_sums(spec.sums, run, grad, other)
        return differentiate(operation, side, grad, other, like, spec.sums, operation.compute.precision)

    return _choose_form(spec, transpose, grad, other)


def _choose_form(spec: _WideSpec, compute: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    if spec.compute_dtype.itemsize > 2 or spec.dtype == spec.compute_dtype:
        return compute(*operands)
    return widen_on_cpu(compute, spec.sums, *operands)


def _run_with_sums(dtype: np.dtype, transpose: Callable[..., Any], *operands: jax.Array) -> jax.Array:
    """Runs the transpose of a convolution with its sums in `dtype`; JAX's outputs the dtype of the operands."""
    program = jax.make_jaxpr(transpose)(*operands)
    values: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values.update(zip(program.jaxpr.invars, operands, strict=True))
    for eqn in program.jaxpr.eqns:
        wide = {"preferred_element_type": dtype} if eqn.primitive.name == "conv_general_dilated" else {}
        inputs = (atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars)
        values[eqn.outvars[0]] = eqn.primitive.bind(*inputs, **eqn.params | wide)
    return values[program.jaxpr.outvars[0]]
