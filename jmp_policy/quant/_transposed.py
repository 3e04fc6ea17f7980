"""A bilinear operation and its two transposes, on operands of dtypes that differ."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._bilinear import Bilinear, Convolution, Labels
from ._varying import varying_axes, varying_over


def multiply(operation: Bilinear, left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    """The result of the operation, summed in `dtype`. Convolutions are computed in it, for want of an 8-bit one."""
    if isinstance(operation.compute, Convolution):
        return _convolution(operation, dtype)(left.astype(dtype), right.astype(dtype))
    return _contraction(left, operation.left, right, operation.right, operation.out, dtype)


def pulled_left(
    operation: Bilinear, grad: jax.Array, right: jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """The gradient of the left operand, which has this shape, by that of the result."""
    if isinstance(operation.compute, Convolution):
        of_left = lambda left: _convolution(operation, dtype)(left, right.astype(dtype))
        (pulled,) = jax.linear_transpose(of_left, _like(grad, shape, dtype))(grad.astype(dtype))
        return pulled
    return _contraction(grad, operation.out, right, operation.right, operation.left, dtype)


def pulled_right(
    operation: Bilinear, grad: jax.Array, left: jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """The gradient of the right operand, which has this shape, by that of the result."""
    if isinstance(operation.compute, Convolution):
        of_right = lambda right: _convolution(operation, dtype)(left.astype(dtype), right)
        (pulled,) = jax.linear_transpose(of_right, _like(grad, shape, dtype))(grad.astype(dtype))
        return pulled
    return _contraction(left, operation.left, grad, operation.out, operation.right, dtype)


def of_left(operation: Bilinear) -> Bilinear:
    """The labels by which the gradient of the left operand is a product of those of the result and of the right."""
    return dataclasses.replace(operation, left=operation.out, out=operation.left)


def of_right(operation: Bilinear) -> Bilinear:
    """The labels by which the gradient of the right operand is a product of those of the left and of the result."""
    return dataclasses.replace(operation, right=operation.out, out=operation.right)


def _convolution(operation: Bilinear, dtype: Any) -> Any:
    assert isinstance(operation.compute, Convolution)
    return dataclasses.replace(operation.compute, preferred_element_type=None)


def _like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What stands for an array that varies over devices as another does."""
    return varying_over(jnp.zeros(shape, dtype), varying_axes(x))


def _contraction(
    left: jax.Array, left_labels: Labels, right: jax.Array, right_labels: Labels, out: Labels, dtype: Any
) -> jax.Array:
    """The product of two labelled arrays by one `dot_general`, its axes in the order of `out`."""
    shared = [label for label in left_labels if label in right_labels]
    summed, batch = ([x for x in shared if (x in out) == kept] for kept in (False, True))
    where = lambda labels: (tuple(map(left_labels.index, labels)), tuple(map(right_labels.index, labels)))
    product = lax.dot_general(left, right, (where(summed), where(batch)), preferred_element_type=dtype)
    made = [*batch, *(x for x in (*left_labels, *right_labels) if x not in shared)]
    order = tuple(map(made.index, out))
    return product if order == tuple(range(len(out))) else lax.transpose(product, order)
