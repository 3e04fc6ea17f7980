"""What an equation costs by itself."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ._primitives import Fact, having
from ._program import Atom, is_float
from ._walk import walk

MOVING = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS) | {"select_n", "link", "carry"}
"""Steps that only move or choose elements, those between a body and what is around it included."""

_OVER_OPERANDS = ("reduce", "cum", "scatter", "argm", "sort")
"""Operations whose work depends on what they read. Windows overlap, so that their work depends on what they make."""


def count_flops(eqn: JaxprEqn) -> int:
    """Counts the floating-point operations of an equation: a multiplication and an addition are two, any other is one.

    XLA counts like this, too. A product with the padding of a convolution does not count.

    >>> import jax, jax.numpy as jnp
    >>> eqn = jax.make_jaxpr(lambda x, y: x @ y)(jnp.ones((2, 3)), jnp.ones((3, 5))).eqns[0]
    >>> count_flops(eqn)
    60
    """
    name = eqn.primitive.name
    if name in _FLOPS:
        return _FLOPS[name](eqn)
    if name in MOVING or name == "convert_element_type":
        return 0
    if not any(is_float(atom) for atom in (*eqn.invars, *eqn.outvars)):
        return 0
    if "window_dimensions" in eqn.params:
        return _count_windows(eqn)
    atoms = eqn.invars if name.startswith(_OVER_OPERANDS) else eqn.outvars
    return max((_size(atom) for atom in atoms), default=0) * _count_combining(eqn)


def count_bytes(eqn: JaxprEqn) -> int:
    """Counts the bytes that an equation reads and writes."""
    return sum(map(_count_atom_bytes, (*eqn.invars, *eqn.outvars)))


def count_products(eqn: JaxprEqn) -> int:
    """Counts the products that a matmul sums for each number of its result: 1 for an outer product."""
    if eqn.primitive.name == "conv_general_dilated":
        return math.prod(_read_kernel(eqn))
    return math.prod(_shape(eqn.invars[0])[axis] for axis in _read_dimensions(eqn)[0][0])


def _count_dot(eqn: JaxprEqn) -> int:
    return 2 * _size(eqn.outvars[0]) * count_products(eqn)


def _count_ragged_dot(eqn: JaxprEqn) -> int:
    """Each row of the left side meets the matrix of its own group alone."""
    left, right = (_shape(atom) for atom in eqn.invars[:2])
    (_, right_contracting), (_, right_batch) = _read_dimensions(eqn)
    groups = eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    shared = {*right_contracting, *right_batch, *groups}
    return 2 * math.prod(left) * math.prod(size for axis, size in enumerate(right) if axis not in shared)


def _count_convolution(eqn: JaxprEqn) -> int:
    numbers, out = eqn.params["dimension_numbers"], _shape(eqn.outvars[0])
    channels, *spatial = _read_kernel(eqn)
    positions = math.prod(_count_valid_positions(eqn, axis) for axis in range(len(spatial)))
    batch, features = (out[axis] for axis in numbers.out_spec[:2])
    return 2 * batch * features * channels * positions


def _read_kernel(eqn: JaxprEqn) -> tuple[int, ...]:
    """The input channels of each group of a convolution, and the sizes of its kernel."""
    shape = _shape(eqn.invars[1])
    return tuple(shape[axis] for axis in eqn.params["dimension_numbers"].rhs_spec[1:])


def _count_valid_positions(eqn: JaxprEqn, axis: int) -> int:
    """How many pairs of an output and a kernel position along an axis meet a number that is not padding."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    size = _shape(eqn.invars[0])[numbers.lhs_spec[2 + axis]]
    dilation = params["lhs_dilation"][axis]
    outputs = np.arange(_shape(eqn.outvars[0])[numbers.out_spec[2 + axis]]) * params["window_strides"][axis]
    kernel = np.arange(_read_kernel(eqn)[1 + axis]) * params["rhs_dilation"][axis]
    met = outputs[:, None] + kernel - params["padding"][axis][0]
    return int(np.count_nonzero((met >= 0) & (met <= (size - 1) * dilation) & (met % dilation == 0)))


def _count_windows(eqn: JaxprEqn) -> int:
    """A window of n numbers, padding included, takes n - 1 steps; one that scatters adds its result in another."""
    name, window = eqn.primitive.name, math.prod(eqn.params["window_dimensions"])
    if name.startswith("select_and_scatter"):
        return _size(eqn.invars[1 if name == "select_and_scatter" else 0]) * window
    return _size(eqn.outvars[0]) * (window - 1) * _count_combining(eqn)


def _count_combining(eqn: JaxprEqn) -> int:
    """Counts the operations that make one number of two; a reduction may hold a program that does."""
    if eqn.primitive.name == "select_and_gather_add":  # a comparison chooses among pairs of numbers
        return 3
    if eqn.primitive.name not in ("reduce", "reduce_window"):
        return 1
    steps = walk(eqn.params["jaxpr"])
    return sum(count_flops(step.eqn) for step in steps if step.name == step.eqn.primitive.name)


_FLOPS = {
    "dot_general": _count_dot,
    "scaled_dot": _count_dot,
    "conv_general_dilated": _count_convolution,
    "ragged_dot_general": _count_ragged_dot,
    "one_minus_square": lambda eqn: 2 * _size(eqn.outvars[0]),
    "polynomial": lambda eqn: 2 * (len(eqn.invars) - 2) * _size(eqn.outvars[0]),  # all but one operand are coefficients
}


def _read_dimensions(eqn: JaxprEqn) -> Any:
    if "dimension_numbers" in eqn.params:
        return eqn.params["dimension_numbers"]
    return eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers


def _size(atom: Atom) -> int:
    return math.prod(_shape(atom))


def _count_atom_bytes(atom: Atom) -> int:
    return _size(atom) * getattr(getattr(atom.aval, "dtype", None), "itemsize", 0)


def _shape(atom: Atom) -> Sequence[int]:
    return getattr(atom.aval, "shape", ())
