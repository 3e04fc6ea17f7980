"""The cost of an equation, and the number of elements that a half-precision sum adds."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ._primitives import Fact, having
from ._program import Atom, Step, array_dtype, is_float, shape_of, walk

MOVING = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS) | {"select_n", "link", "carry"}
"""Steps that only move or choose elements."""

_OVER_OPERANDS = ("reduce", "cum", "scatter", "argm", "sort")
"""Prefixes of operations whose cost depends on their operands. Windows overlap, so theirs depends on the output."""


def count_flops(eqn: JaxprEqn) -> int:
    """Counts floating-point operations as XLA does: a multiply-add is two, and products with padding do not count."""
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
    atoms = (*eqn.invars, *eqn.outvars)
    return sum(_size(atom) * getattr(getattr(atom.aval, "dtype", None), "itemsize", 0) for atom in atoms)


def count_products(eqn: JaxprEqn) -> int:
    """Counts the products per output element of a matmul or convolution: 1 for an outer product."""
    if eqn.primitive.name == "conv_general_dilated":
        return math.prod(_read_kernel(eqn))
    return math.prod(shape_of(eqn.invars[0])[axis] for axis in _read_dimensions(eqn)[0][0])


def _count_dot(eqn: JaxprEqn) -> int:
    return 2 * _size(eqn.outvars[0]) * count_products(eqn)


def _count_ragged_dot(eqn: JaxprEqn) -> int:
    """Each row of the left operand is multiplied by the matrix of its group only."""
    left, right = (shape_of(atom) for atom in eqn.invars[:2])
    (_, right_contracting), (_, right_batch) = _read_dimensions(eqn)
    groups = eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    shared = {*right_contracting, *right_batch, *groups}
    return 2 * math.prod(left) * math.prod(size for axis, size in enumerate(right) if axis not in shared)


def _count_convolution(eqn: JaxprEqn) -> int:
    numbers, out = eqn.params["dimension_numbers"], shape_of(eqn.outvars[0])
    channels, *spatial = _read_kernel(eqn)
    positions = math.prod(_count_valid_positions(eqn, axis) for axis in range(len(spatial)))
    batch, features = (out[axis] for axis in numbers.out_spec[:2])
    return 2 * batch * features * channels * positions


def _read_kernel(eqn: JaxprEqn) -> tuple[int, ...]:
    """Returns the input channels per group of a convolution, then the sizes of its kernel."""
    shape = shape_of(eqn.invars[1])
    return tuple(shape[axis] for axis in eqn.params["dimension_numbers"].rhs_spec[1:])


def _count_valid_positions(eqn: JaxprEqn, axis: int) -> int:
    """Counts the pairs of an output and a kernel position along an axis that read an element, not padding."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    size = shape_of(eqn.invars[0])[numbers.lhs_spec[2 + axis]]
    dilation = params["lhs_dilation"][axis]
    outputs = np.arange(shape_of(eqn.outvars[0])[numbers.out_spec[2 + axis]]) * params["window_strides"][axis]
    kernel = np.arange(_read_kernel(eqn)[1 + axis]) * params["rhs_dilation"][axis]
    met = outputs[:, None] + kernel - params["padding"][axis][0]
    return int(np.count_nonzero((met >= 0) & (met <= (size - 1) * dilation) & (met % dilation == 0)))


def _count_windows(eqn: JaxprEqn) -> int:
    """A window of n elements, with padding, combines n - 1 times; one that scatters also adds its result."""
    name, window = eqn.primitive.name, math.prod(eqn.params["window_dimensions"])
    if name.startswith("select_and_scatter"):
        return _size(eqn.invars[1 if name == "select_and_scatter" else 0]) * window
    return _size(eqn.outvars[0]) * (window - 1) * _count_combining(eqn)


def _count_combining(eqn: JaxprEqn) -> int:
    """Counts the operations that combine two elements; a reduction may have a jaxpr for it."""
    if eqn.primitive.name == "select_and_gather_add":  # compares pairs of elements
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
    return math.prod(shape_of(atom))


HALF = frozenset((np.dtype(np.float16), np.dtype(jnp.bfloat16)))

REMEDY = (
    "sum in float32: cast first, as jnp.sum does, or wrap the call, "
    "as in jmp.force_full_precision(nn.avg_pool)(x, (2, 2))"
)
"""Suggestion for half-precision sums. Flax pools in a function, which ignores the dtype of a layer and a policy."""


class FloatSum(NamedTuple):
    """A sum or product of `numbers` elements by the primitive `name`."""

    name: str
    numbers: int
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.name} of {self.numbers} numbers in {self.dtype}"


def find_half_sum(step: Step) -> FloatSum | None:
    """Returns the half-precision sum or product of several elements that a step computes, or None."""
    return _find_sum(step, lambda dtype: dtype in HALF)


def find_sum(step: Step) -> FloatSum | None:
    """Returns the floating sum or product of several elements that a step computes, or None."""
    return _find_sum(step, lambda dtype: jnp.issubdtype(dtype, jnp.inexact))


def _find_sum(step: Step, is_wanted: Callable[[np.dtype], bool]) -> FloatSum | None:
    count = _COUNTS.get(step.name)
    dtypes = (array_dtype(var) for var in step.results)
    dtype = next((dtype for dtype in dtypes if dtype is not None and is_wanted(dtype)), None)
    if count is None or dtype is None:
        return None
    if step.name in ("reduce", "reduce_window"):  # with a function of the user, which may only choose
        inside = [one for one in walk(step.eqn.params["jaxpr"]) if one.name not in _CHOOSING]
        if not any(array_dtype(var) == dtype for one in inside for var in one.results):
            return None
    numbers = count(step)
    return FloatSum(step.name, numbers, dtype) if numbers > 1 else None


_CHOOSING = ("max", "min", "clamp", "select_n", "abs", "neg", "link", "constant")


def _count_in_window(step: Step) -> int:
    """Counts the elements of a window, without the zeros that dilation inserts."""
    params, shape = step.eqn.params, step.operands[0].aval.shape
    names = ("window_dimensions", "base_dilation", "window_dilation")
    axes = zip(shape, *(params[name] for name in names), strict=True)
    return math.prod(min(size, _divide_up(window * math.gcd(gap, stride), gap)) for size, window, gap, stride in axes)


def _count_overlapping_windows(step: Step) -> int:
    """Counts the windows that contain one element."""
    params = step.eqn.params
    pairs = zip(params["window_dimensions"], params["window_strides"], strict=True)
    return math.prod(_divide_up(window, stride) for window, stride in pairs)


def count_scattered_rows(eqn: JaxprEqn) -> int:
    """Counts the rows that a scatter adds: 1 if no two of them meet in an element."""
    window = eqn.params["dimension_numbers"].update_window_dims
    sizes = [size for axis, size in enumerate(shape_of(eqn.invars[-1])) if axis not in window]
    return 1 if eqn.params["unique_indices"] else math.prod(sizes)


def _count_meeting(eqn: JaxprEqn) -> int:
    """Counts the elements that a scatter adds to one element, on average over all that its indices can reach."""
    if count_scattered_rows(eqn) == 1:
        return 1
    numbers, updates = eqn.params["dimension_numbers"], shape_of(eqn.invars[-1])
    reached = list(shape_of(eqn.invars[0]))
    left_out = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [axis for axis in range(len(reached)) if axis not in left_out]
    for axis, window in zip(kept, numbers.update_window_dims, strict=True):
        if axis not in numbers.scatter_dims_to_operand_dims:
            reached[axis] = updates[window]
    return _divide_up(math.prod(updates), max(math.prod(reached), 1))


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


_COUNTS = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_prod", "reduce"),
        lambda step: _size(step.operands[0]) // max(_size(step.results[0]), 1),
    ),
    **dict.fromkeys(("reduce_window_sum", "reduce_window"), _count_in_window),
    "select_and_scatter_add": _count_overlapping_windows,  # max pooling's gradient adds where windows overlap
    **dict.fromkeys(
        ("scatter-add", "scatter_add", "scatter-mul", "scatter-sub"), lambda step: _count_meeting(step.eqn)
    ),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cumlogsumexp"), lambda step: shape_of(step.operands[0])[step.eqn.params["axis"]]
    ),
}
"""Counts, by primitive, the elements that are combined into one."""

HALF_SUMS = frozenset(_COUNTS)
