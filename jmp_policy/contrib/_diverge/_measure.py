"""Measures the difference of two arrays on the device, and reads the measurements on the host."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._base import at_least_float32, keep_rounding

NOISE = 2.0**-17
"""Relative errors up to 64 rounding errors of float32 are noise: two orders of a sum differ by as much."""


FLOOR = 0.1
"""An array is small if its root mean square is below this fraction of that of all arrays, as in `tune`."""


class Worst(NamedTuple):
    """The element that differs most: its position, and its values in `f` and `g`.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> (row,) = jmp.contrib.diverge(lambda x: 2 * x, lambda x: x + 1)(jnp.arange(3.0)).rows()
    >>> row.worst
    Worst(where=(0,), reference=0.0, value=1.0)
    """

    where: tuple[int, ...]
    reference: float
    value: float


class Measured(NamedTuple):
    """Sums over the elements of two values, in units of their largest magnitude; zeros if both are one array."""

    unit: Any  # the largest finite magnitude of the reference, or of the difference if that is larger
    error: Any  # the sum of squares of the difference
    square: Any  # the sum of squares of the reference
    product: Any  # the sum of products of the reference and the value
    other: Any  # the sum of squares of the value
    page: Any  # the position of the largest difference in the flattened array, in units of `PAGE`
    position: Any  # the rest of the position
    reference: Any  # the element of the reference there
    value: Any  # the element of the value there


def compare(reference: jax.Array, value: jax.Array) -> jax.Array:
    """Measures the difference of two arrays of one shape. Elements that both mask with large negatives do not count.

    Complex numbers are compared by their parts. The error of integers and booleans is the share that differs.
    """
    if reference is value:
        return jnp.zeros(len(Measured._fields), np.float32)
    reference, value = _replicate(reference), _replicate(value)
    if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (reference, value)):
        return _compare_whole(reference, value)
    if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in (reference, value)):
        reference, value = (jnp.stack([x.real, x.imag], -1) for x in (reference, value))
    dtype = max((at_least_float32(x.dtype) for x in (reference, value)), key=lambda dtype: dtype.itemsize)
    reference, value = (lax.convert_element_type(keep_rounding(x), dtype).reshape(-1) for x in (reference, value))
    zero, infinity = np.zeros((), dtype), np.full((), np.inf, dtype)
    is_masked = (reference <= _MASK) & (value <= _HALF_MASK)
    is_equal = (reference == value) | (jnp.isnan(reference) & jnp.isnan(value)) | is_masked
    known = jnp.where(jnp.isfinite(reference) & ~is_masked, reference, zero)
    difference = jnp.where(is_equal, zero, value - reference)
    size = jnp.where(jnp.isnan(difference), infinity, jnp.abs(difference))
    unit = jnp.max(jnp.maximum(jnp.abs(known), jnp.where(size < infinity, size, zero)))
    unit = jnp.where(unit > 0, unit, jnp.ones((), dtype))
    r, d = known / unit, difference / unit
    v = r + d
    where = lax.iota(np.int32, r.size)
    # One reduction of all sums compiles in half the time of one for each.
    operands = [d * d, r * r, r * v, v * v, size, where // PAGE, where % PAGE, reference, value]
    starts = [np.zeros((), operand.dtype) for operand in operands]
    *sums, _, page, position, at_reference, at_value = lax.reduce(operands, starts, _add_and_choose, (0,))
    return jnp.stack([unit, *sums, page.astype(dtype), position.astype(dtype), at_reference, at_value])


def _replicate(x: jax.Array) -> jax.Array:
    """Makes `x` replicated on explicit mesh axes, where a reshape of a sharded axis is an error.

    Code in `jax.sharding.auto_axes` makes values on another mesh than the one in context.
    """
    own, mesh = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    if own.empty or AxisType.Explicit not in (*own.axis_types, *mesh.axis_types):
        return x
    return jax.sharding.reshard(x, NamedSharding(own if mesh.empty else mesh, PartitionSpec()))


def _compare_whole(reference: jax.Array, value: jax.Array) -> jax.Array:
    """Measures the share of elements that differ, as the error of numbers that are all 1."""
    common = np.promote_types(*(np.uint8 if x.dtype == bool else x.dtype for x in (reference, value)))
    reference, value = (lax.convert_element_type(x, common).reshape(-1) for x in (reference, value))
    is_different = reference != value
    size, share = np.float32(reference.size), jnp.mean(is_different, dtype=np.float32)
    where = jnp.argmax(is_different)
    place = where // PAGE, where % PAGE, reference[where], value[where]
    sums = np.float32(1), size * share**2, size, size * (1 - share), size * (1 - share) ** 2
    return jnp.stack([*sums, *(number.astype(np.float32) for number in place)])


def stack(rows: Sequence[jax.Array]) -> jax.Array:
    """Stacks measurements, `(comparisons, len(Measured._fields))`, in the widest dtype."""
    dtype = np.result_type(np.float32, *(row.dtype for row in rows))
    return jnp.stack([row.astype(dtype) for row in rows]) if rows else jnp.zeros((0, len(Measured._fields)), dtype)


def _add_and_choose(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """Adds the first four numbers, and takes the others where the fifth is larger."""
    is_first = a[4] >= b[4]
    pairs = [*zip(a, b, strict=True)]
    return [*(x + y for x, y in pairs[:4]), *(lax.select(is_first, x, y) for x, y in pairs[4:])]


PAGE = 1 << 20
"""Positions are stored in two floats, since float32 does not have all integers above 2**24."""

_MASK, _HALF_MASK = -1e8, -3e4
"""Elements below these in the reference and in the other value are masks, not values."""


def combine(found: Sequence[tuple[np.ndarray, int]]) -> float:
    """Returns the largest relative error of several values. Each has measurements by iteration, and a size."""
    errors, squares, counts = [], [], []
    for measured, size in found:
        scale = measured[:, 0] ** 2
        errors.append(_sum_known(scale, measured[:, 1]))
        squares.append(float(np.sum(scale * measured[:, 2])))
        counts.append(len(measured) * size if np.any(scale) else 0)  # equal values are not measured
    least = FLOOR**2 * sum(squares) / max(1, sum(counts))
    bases = [max(square, least * count) for square, count in zip(squares, counts, strict=True)]
    ratios = [_divide(error, base) for error, base in zip(errors, bases, strict=True)]
    return math.sqrt(max(ratios, default=0.0))


def _sum_known(scale: np.ndarray, sums: np.ndarray) -> float:
    """Adds up sums of squares. Nan becomes infinity."""
    used = np.where(scale > 0, np.where(np.isnan(sums), np.inf, sums), 0.0)
    return float(np.sum(np.where(used > 0, scale * used, 0.0)))


def _divide(error: float, base: float) -> float:
    return 0.0 if error == 0 else math.inf if base == 0 else error / base


def measure_cosine(found: Sequence[tuple[np.ndarray, int]]) -> float:
    """Returns the cosine between all elements of both sides: 1 if they are equal."""
    m = Measured(*np.concatenate([measured for measured, _ in found]).T)
    product, square, other = (float(np.sum(m.unit**2 * part)) for part in (m.product, m.square, m.other))
    if square == other == product:
        return 1.0
    return product / math.sqrt(square * other) if square * other > 0 else 0.0


def describe_worst(found: Sequence[tuple[np.ndarray, int]], shapes: Sequence[tuple[int, ...]]) -> Worst | None:
    """Finds the element with the largest difference in units of the largest element."""
    worst, largest = None, 0.0
    for (measured, _), shape in zip(found, shapes, strict=True):
        m = Measured(*measured.T)
        with np.errstate(invalid="ignore", divide="ignore"):
            sizes = np.abs(m.value - m.reference) / m.unit
        sizes = np.where(m.error == 0, 0.0, np.where(np.isnan(sizes), np.inf, sizes))
        i = int(np.argmax(sizes))
        if sizes[i] > largest:
            largest = float(sizes[i])
            index = np.unravel_index(int(m.page[i]) * PAGE + int(m.position[i]), shape)
            worst = Worst(tuple(map(int, index)), float(m.reference[i]), float(m.value[i]))
    return worst
