"""Products of half-precision numbers that hand over their sums unrounded, forward and backward."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax import core, lax
from jax.extend.core import Literal

from ..._base import at_least_float32, vary
from ..._jaxpr import PRODUCT_SCOPE
from ._amax_history import varying_axes
from ._bilinear import Bilinear, Convolution, without_preferred_dtype
from ._block_product import is_matmul
from ._float8_product import grad_left, grad_right


def wide_product(
    operation: Bilinear, left: jax.Array, right: jax.Array, dtype: np.dtype, compute_dtype: np.dtype
) -> jax.Array:
    """Computes `operation(left, right)` of operands in one dtype, and hands the sums over in another.

    The reverse-mode derivative multiplies operands in the compute dtype alone, too, and sums in float32: JAX's own has
    a float32 operand, and rounds the gradient of the weight before a float32 weight gets it. There is no forward-mode
    derivative. In `jax.shard_map` the gradient of a weight that devices share is summed in the dtype of the weight.

    Args:
      operation: what to compute; its own `preferred_element_type` is not read.
      left: in the compute dtype; or as it is stored, as the right operand.
      right: as it is stored, which its gradient is, too.
      dtype: of the result, as `Policy.accumulate_dtype` has it.
      compute_dtype: what the operands, and the gradient of the result, are rounded to.

    Returns:
      The result in `dtype`.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.3.

    >>> import jax.numpy as jnp
    >>> from jmp_policy.quant._products._bilinear import Einsum, label_einsum
    >>> x, w = jnp.full((1, 3), 1 / 256, jnp.bfloat16), jnp.full((3, 1), 1 + 1 / 128)
    >>> wide_product(label_einsum(2, 2, Einsum("ab,bc->ac")), x, w, jnp.float32, jnp.bfloat16).tolist()
    [[0.011810302734375]]
    """
    dtype, compute_dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype)), np.dtype(compute_dtype)
    operation = without_preferred_dtype(operation)
    if not _has_our_derivative(operation, left.shape, right.shape):
        return operation.compute(left.astype(compute_dtype), right.astype(compute_dtype), dtype)
    # In `shard_map` a custom derivative varies over devices as its operand does, and JAX sums what they share.
    axes = tuple(varying_axes(left, right))
    left, right = vary(left, axes), vary(right, axes)
    types, config = (jax.typeof(left), jax.typeof(right)), cast(Any, jax.config)
    spec = _ProductSpec(operation, dtype, compute_dtype, *types, config.jax_default_matmul_precision)
    return _product(spec, left, right)


@dataclasses.dataclass(frozen=True)
class _ProductSpec:
    """What a product is, without its numbers.

    Attributes:
      operation: what to compute.
      dtype: of the result.
      compute_dtype: of the operands of every product.
      left: the type of the left operand, as it is stored: its shape, and how it lies on devices.
      right: the type of the right operand, likewise.
      precision: the default one where the product was computed; its gradients are where another may be.
    """

    operation: Bilinear
    dtype: np.dtype
    compute_dtype: np.dtype
    left: core.ShapedArray
    right: core.ShapedArray
    precision: str | None

    @property
    def sums(self) -> np.dtype:
        """The dtype of the sums of the backward pass."""
        return at_least_float32(self.dtype)


def _has_our_derivative(operation: Bilinear, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether the gradients of an operation are products as well: not where an einsum sums or repeats one operand."""
    return isinstance(operation.compute, Convolution) or is_matmul(operation, left, right)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: _ProductSpec, left: jax.Array, right: jax.Array) -> jax.Array:
    return _forward(spec, left, right)[0]


def _forward(spec: _ProductSpec, left: jax.Array, right: jax.Array) -> tuple[jax.Array, Any]:
    # Which are kept for the backward pass, as without this function.
    left, right = left.astype(spec.compute_dtype), right.astype(spec.compute_dtype)
    compute = functools.partial(spec.operation.compute, preferred=spec.dtype)
    return _choose_form(spec, compute, left, right), (left, right)


def _backward(spec: _ProductSpec, residuals: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    left, right = residuals
    grad, compute = grad.astype(spec.compute_dtype), spec.operation.compute
    with jax.default_matmul_precision(spec.precision):
        if isinstance(compute, Convolution):
            left_grad, right_grad = _grads_of_convolution(spec, left, right, grad)
        else:
            options = {"dtype": spec.sums, "precision": compute.precision}
            to_left = lambda grad, right: grad_left(spec.operation, grad, right, spec.left, **options)
            to_right = lambda grad, left: grad_right(spec.operation, grad, left, spec.right, **options)
            left_grad = _choose_form(spec, to_left, grad, right)
            right_grad = _choose_form(spec, to_right, grad, left)
    return left_grad.astype(spec.left.dtype), right_grad.astype(spec.right.dtype)


_product.defvjp(_forward, _backward)


def _choose_form(spec: _ProductSpec, compute: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """Computes a product of operands in the compute dtype; on a CPU they are cast to the dtype of the sums before.

    XLA has no kernel for some of them there, if the result is wider: "Unsupported element type for DotThunk::Execute:
    BF16 x BF16 = F32" in 6 of 54 products under `vmap`, jax 0.10.2 and 0.12; barriers around them change nothing. Where
    it has one, it casts them, too.
    """
    if spec.compute_dtype.itemsize > 2 or spec.dtype == spec.compute_dtype:
        return compute(*operands)
    widen = lambda *operands: compute(*(operand.astype(spec.sums) for operand in operands))
    with jax.named_scope(PRODUCT_SCOPE):
        return lax.platform_dependent(*operands, cpu=widen, default=compute)


def _grads_of_convolution(
    spec: _ProductSpec, left: jax.Array, right: jax.Array, grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of both operands of a convolution, which are convolutions too, in the dtype of sums.

    JAX's transpose keeps the dtype of the operands, and there is no way to ask it for another one: so the convolutions
    that it writes are run with the dtype of the sums. What stands around them only moves numbers.
    """
    convolve = spec.operation.compute
    to_left = lambda grad, right: jax.linear_transpose(
        lambda left: convolve(left, right), spec.left.update(dtype=right.dtype)
    )(grad)
    to_right = lambda grad, left: jax.linear_transpose(
        lambda right: convolve(left, right), spec.right.update(dtype=left.dtype)
    )(grad)
    run = functools.partial(_run_with_sums, spec.sums)
    return (
        _choose_form(spec, functools.partial(run, to_left), grad, right),
        _choose_form(spec, functools.partial(run, to_right), grad, left),
    )


def _run_with_sums(dtype: np.dtype, transpose: Callable[..., Any], *operands: jax.Array) -> jax.Array:
    program = jax.make_jaxpr(transpose)(*operands)
    values: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values.update(zip(program.jaxpr.invars, operands, strict=True))
    for eqn in program.jaxpr.eqns:
        wide = {"preferred_element_type": dtype} if eqn.primitive.name == "conv_general_dilated" else {}
        inputs = (atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars)
        values[eqn.outvars[0]] = eqn.primitive.bind(*inputs, **eqn.params | wide)
    return values[program.jaxpr.outvars[0]]
