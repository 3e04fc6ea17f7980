"""A bilinear operation and its two transposes, on operands of dtypes that differ."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._bilinear import Bilinear, Convolution, Labels


def multiply(operation: Bilinear, left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    """The result of the operation, summed in `dtype`. Convolutions are computed in it, for want of an 8-bit one."""
    compute = operation.compute
    if isinstance(compute, Convolution):
        return _convolution(operation, dtype)(left.astype(dtype), right.astype(dtype))
    return _contraction(left, operation.left, right, operation.right, operation.out, dtype, compute.out_sharding)


def pulled_left(operation: Bilinear, grad: jax.Array, right: jax.Array, like: Any, dtype: Any) -> jax.Array:
    """The gradient of the left operand, whose type is `like`, by that of the result."""
    if isinstance(operation.compute, Convolution):
        of_left = lambda left: _convolution(operation, dtype)(left, right.astype(dtype))
        (pulled,) = jax.linear_transpose(of_left, like.update(dtype=dtype))(grad.astype(dtype))
        return pulled
    sharding = _explicit_sharding(like)
    return _contraction(grad, operation.out, right, operation.right, operation.left, dtype, sharding)


def pulled_right(operation: Bilinear, grad: jax.Array, left: jax.Array, like: Any, dtype: Any) -> jax.Array:
    """The gradient of the right operand, whose type is `like`, by that of the result."""
    if isinstance(operation.compute, Convolution):
        of_right = lambda right: _convolution(operation, dtype)(left.astype(dtype), right)
        (pulled,) = jax.linear_transpose(of_right, like.update(dtype=dtype))(grad.astype(dtype))
        return pulled
    sharding = _explicit_sharding(like)
    return _contraction(left, operation.left, grad, operation.out, operation.right, dtype, sharding)


def of_left(operation: Bilinear) -> Bilinear:
    """The labels by which the gradient of the left operand is a product of those of the result and of the right."""
    return dataclasses.replace(operation, left=operation.out, out=operation.left)


def of_right(operation: Bilinear) -> Bilinear:
    """The labels by which the gradient of the right operand is a product of those of the left and of the result."""
    return dataclasses.replace(operation, right=operation.out, out=operation.right)


def _convolution(operation: Bilinear, dtype: Any) -> Any:
    assert isinstance(operation.compute, Convolution)
    return dataclasses.replace(operation.compute, preferred_element_type=None)


def _explicit_sharding(like: Any) -> NamedSharding | None:
    """How a gradient lies on a mesh whose axes are part of types: as its operand, which JAX cannot infer."""
    return like.sharding if AxisType.Explicit in like.sharding.mesh.axis_types else None


def _contraction(
    left: jax.Array,
    left_labels: Labels,
    right: jax.Array,
    right_labels: Labels,
    out: Labels,
    dtype: Any,
    sharding: NamedSharding | PartitionSpec | None,
) -> jax.Array:
    """The product of two labelled arrays by one `dot_general`, its axes in the order of `out`, and sharded so."""
    shared = [label for label in left_labels if label in right_labels]
    summed, batch = ([x for x in shared if (x in out) == kept] for kept in (False, True))
    where = lambda labels: (tuple(map(left_labels.index, labels)), tuple(map(right_labels.index, labels)))
    made = [*batch, *(x for x in (*left_labels, *right_labels) if x not in shared)]
    options = {} if sharding is None else {"out_sharding": _reordered(sharding, out, made)}
    product = lax.dot_general(left, right, (where(summed), where(batch)), preferred_element_type=dtype, **options)
    order = tuple(map(made.index, out))
    return product if order == tuple(range(len(out))) else lax.transpose(product, order)


def _reordered(sharding: NamedSharding | PartitionSpec, labels: Labels, order: list[Any]) -> Any:
    """The sharding of an array by those of the same array with its axes in another order."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    by_label = dict(zip(labels, spec, strict=False))  # a spec may leave the last axes out
    reordered = PartitionSpec(*map(by_label.get, order))
    return NamedSharding(sharding.mesh, reordered) if isinstance(sharding, NamedSharding) else reordered
