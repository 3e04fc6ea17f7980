"""Calls of JAX's operations as bilinear operations and their operands."""

from typing import Any, NamedTuple

import jax
from jax import lax

from ._bilinear import Bilinear, Convolution, Dot, Einsum, convolution, dot, einsum


class Call(NamedTuple):
    """A call of one of JAX's operations.

    Attributes:
      operation: what it computes.
      lhs: its left operand.
      rhs: its right operand.
    """

    operation: Bilinear
    lhs: jax.Array
    rhs: Any


def dot_general(
    lhs: jax.Array,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> Call:
    """A call of `lax.dot_general`, with its arguments."""
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    numbers = ((_axes(left_sum), _axes(right_sum)), (_axes(left_batch), _axes(right_batch)))
    return Call(dot(lhs.ndim, rhs.ndim, Dot(numbers, precision, preferred_element_type, out_sharding)), lhs, rhs)


def einsum_of_two(
    equation: str,
    lhs: jax.Array,
    rhs: Any,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Call:
    """A call of `jnp.einsum` of two operands, with its arguments."""
    return Call(einsum(lhs.ndim, rhs.ndim, Einsum(equation, precision, preferred_element_type, out_sharding)), lhs, rhs)


def conv_general_dilated(
    lhs: jax.Array,
    rhs: Any,
    window_strides: Any,
    padding: Any,
    *,
    dimension_numbers: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    **options: Any,
) -> Call:
    """A call of `lax.conv_general_dilated`, with its arguments but for the dilations by position."""
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    padding = padding if isinstance(padding, str) else tuple(tuple(p) for p in padding)
    given = {"window_strides": tuple(window_strides), "padding": padding, "dimension_numbers": numbers, **options}
    given |= {} if out_sharding is None else {"out_sharding": out_sharding}
    hashable = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Call(convolution(lhs.ndim, Convolution(tuple(hashable.items()), preferred_element_type)), lhs, rhs)


def _axes(axes: Any) -> tuple[int, ...]:
    return tuple(int(axis) for axis in axes)
