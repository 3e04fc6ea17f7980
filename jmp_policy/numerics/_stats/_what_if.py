"""Number formats: thresholds of each format, blocks, and the squared errors of a cast."""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax import lax

from ..._base import at_least_float32, did_you_mean, dtype_names, parse_dtype, quote
from ._record import add_together, add_up, bits_like, bits_of, exponent_bias, mantissa_bits


def widen(x: jax.Array) -> jax.Array:
    """Converts a tensor to float32, or leaves it in float64, with its subnormal numbers."""
    if x.dtype != jax.numpy.bfloat16:
        return lax.convert_element_type(x, at_least_float32(x.dtype))
    # A conversion may flush subnormal numbers.
    bits = lax.convert_element_type(lax.bitcast_convert_type(x, np.uint16), np.uint32)
    return lax.bitcast_convert_type(bits << np.uint32(16), np.float32)


def split_blocks(x: jax.Array, length: int, *, keeps_last: bool = False) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits the last axes into blocks of at most `length` elements, padded with zeros where needed.

    Axes are never joined, and those before the split stay, so that a sharded tensor is not moved. With `keeps_last`,
    the last axis stays too: a TPU then adds up whole vectors, and compiles in one second instead of forty.
    Returns the tensor with a leading axis of length 1, and the axes of a block.

    >>> blocks, axes = split_blocks(jax.numpy.ones((8, 512, 4, 16)), 255)
    >>> blocks.shape, axes
    ((1, 8, 256, 2, 4, 16), (3, 4, 5))
    >>> blocks, axes = split_blocks(jax.numpy.ones((8, 512, 4, 16)), 255, keeps_last=True)
    >>> blocks.shape, axes
    ((1, 8, 16, 32, 4, 16), (3, 4))
    """
    if keeps_last and x.ndim == 1:
        x = lax.expand_dims(x, (0,))
    shape = x.shape
    first = end = x.ndim - keeps_last
    while first and shape[first - 1] <= length:
        first -= 1
        length //= shape[first]
    if first and length > 1:
        shape, end = (*shape[: first - 1], *_split_axis(shape[first - 1], length), *shape[first:]), end + 1
        missing = math.prod(shape) // (x.size // x.shape[first - 1]) - x.shape[first - 1]
        if missing:
            widths = [(0, missing if axis == first - 1 else 0, 0) for axis in range(x.ndim)]
            x = lax.pad(x, x.dtype.type(0), widths)
    return lax.reshape(x, (1, *shape)), tuple(range(first + 1, end + 1))


def _split_axis(axis: int, length: int) -> tuple[int, int]:
    """Returns the number and length of the blocks of an axis; their product may exceed its length."""
    divisor = max(size for size in range(1, length + 1) if axis % size == 0)
    if 2 * divisor >= length:
        return axis // divisor, divisor
    blocks = -(-axis // length)
    return blocks, -(-axis // blocks)


DEFAULT_BLOCK = 128
"""Number of integers along the last axis that share a scale."""


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A floating format, rounded to nearest, ties to even, with subnormal numbers."""

    name: str  # canonical
    mantissa_bits: int  # the number of bits below the leading one
    min_exponent: int  # the exponent of the smallest normal number
    max: float  # the largest finite number

    @property
    def max_exponent(self) -> int:
        return math.frexp(self.max)[1] - 1

    def find_thresholds(self, dtype: np.dtype) -> tuple[float, float, float]:
        """Returns the largest magnitudes that become zero, at most subnormal, and finite."""
        smallest_normal = math.ldexp(1.0, self.min_exponent)
        half_a_step = math.ldexp(1.0, self.min_exponent - self.mantissa_bits - 1)
        step = math.ldexp(1.0, self.max_exponent - self.mantissa_bits)
        # A tie goes to the even neighbor: zero, the smallest normal number, or above the largest number if that is odd.
        is_odd = (self.max / step) % 2 == 1
        return (
            _round_down(half_a_step, dtype, inclusive=True),
            _round_down(smallest_normal - half_a_step, dtype, inclusive=False),
            _round_down(self.max + step / 2, dtype, inclusive=not is_odd),
        )


@dataclasses.dataclass(frozen=True)
class IntegerFormat:
    """Symmetric integers up to `max`; `block` elements of the last axis share a scale, their amax over `max`."""

    name: str
    max: int
    block: int


@dataclasses.dataclass(frozen=True)
class ScaledFormat:
    """Floats in blocks: `block` elements of the last axis share a scale, as in `quant.MXFP8`.

    With `has_tensor_scale`, scales are e4m3 and the tensor has one more, as in NVFP4; else they are powers of two.
    """

    name: str
    dtype: str
    block: int
    has_tensor_scale: bool

    @property
    def numbers(self) -> FloatFormat:
        """The format of the elements before scaling."""
        return _describe(np.dtype(self.dtype))


Format = FloatFormat | IntegerFormat | ScaledFormat

_INTEGERS = {"int8": 127, "int4": 7}
_SCALED = {
    "mxfp8": ("float8_e4m3fn", 32),
    "mxfp8_e5m2": ("float8_e5m2", 32),
    "mxfp4": ("float4_e2m1fn", 32),
    "nvfp4": ("float4_e2m1fn", 16),
}
_IN_BLOCKS = re.compile(rf"({'|'.join((*_INTEGERS, *_SCALED))})\s*(?:/\s*(\d+))?")
_NO_FORMAT = ("float8_e8m0fnu",)  # powers of two for scales: no sign, no zero


def parse_format(name: object) -> Format:
    """Reads the name of a floating dtype, in any spelling that policies take, or of a block-scaled format.

    Block-scaled formats are `"int8"` and `"int4"` (blocks of 128), `"mxfp8"`, `"mxfp8_e5m2"` and `"mxfp4"` (of 32), and
    `"nvfp4"` (of 16). A block size may follow.

    >>> parse_format("bf16").name, parse_format("int4").name, parse_format("INT8 / 64").name, parse_format("nvfp4").name
    ('bfloat16', 'int4', 'int8/64', 'nvfp4')
    """
    found = _IN_BLOCKS.fullmatch(name.strip().lower()) if isinstance(name, str) else None
    if found is not None and int(found[2] or 1) > 0:
        kind, (dtype, default) = found[1], _SCALED.get(found[1], ("", DEFAULT_BLOCK))
        block = int(found[2] or default)
        spelled = kind if block == default else f"{kind}/{block}"
        if kind in _INTEGERS:
            return IntegerFormat(spelled, _INTEGERS[kind], block)
        return ScaledFormat(spelled, dtype, block, has_tensor_scale=kind == "nvfp4")
    try:
        dtype = parse_dtype(name)  # pyright: ignore[reportArgumentType]: anything may come
    except ValueError:
        dtype = None
    if dtype is None or dtype.name in _NO_FORMAT:
        known = [spelling for spelling in dtype_names() if spelling not in _NO_FORMAT]
        remedy = did_you_mean(name, [*known, *_INTEGERS, *_SCALED, "int8/64", "int4/32"])
        raise ValueError(f"Unknown format {quote(name)}. {remedy} For example: 'float16', 'float8_e4m3fn', 'int8/64'.")
    return _describe(dtype)


@functools.cache
def _describe(dtype: np.dtype) -> FloatFormat:
    info = ml_dtypes.finfo(dtype)
    return FloatFormat(dtype.name, info.nmant, math.frexp(float(info.smallest_normal))[1] - 1, float(info.max))


def _round_down(bound: float, dtype: np.dtype, inclusive: bool) -> float:
    """Returns the largest number of a dtype below a bound, or the bound itself if `inclusive`."""
    with np.errstate(over="ignore"):
        found = dtype.type(bound)
    if float(found) > bound or (float(found) == bound and not inclusive):
        found = np.nextafter(found, dtype.type(0))
    return float(found)


Sums = tuple[jax.Array, jax.Array]
"""High and low parts of sums, `(S,)` each."""


def add_squares(blocks: jax.Array, axes: tuple[int, ...], most: jax.Array, formats: Sequence[FloatFormat]) -> Sums:
    """Adds up squares, and the squared errors of casts to each format, without and with the best power of two as scale.

    Returns twice the sum of squares and a sum for each format: first without scales, then with them. Their units
    differ: see `convert_units`. Blocks are short, since a block is summed in the dtype of its elements.
    """
    grid = _make_grid(most, formats, blocks.dtype)
    # The axis of sums stands before the axes of a block, so that a core reads a block once for all sums.
    row, count = axes[0], 1 + len(formats)
    shape = (*blocks.shape[:row], count, *blocks.shape[row:])
    # XLA:CPU fuses a reduction of two operands, and materializes the operand of a reduction of one.
    squares = []
    for half in (slice(count), slice(count, None)):
        spread = lambda x, half=half: lax.broadcast_in_dim(x[half], shape, (row,))
        x = lax.broadcast_in_dim(blocks, shape, [axis for axis in range(len(shape)) if axis != row])
        # Units differ by row, since XLA would materialize the operands that all rows share.
        x = read_units(x, spread(grid.units))
        errors = _round(x, spread(grid.steps), spread(grid.floors), spread(grid.ceilings)) - x
        squares.append(errors * errors)
    sums = lax.concatenate(add_together(squares, tuple(axis + 1 for axis in axes)), row)
    return add_up(sums, lax.full_like(sums, 0), tuple(axis for axis in range(sums.ndim) if axis != row))


def convert_units(sums: Sums, most: jax.Array, formats: Sequence[FloatFormat]) -> Sums:
    """Converts the sums to units of `4**find_exponent(most)`."""
    high, low = sums
    units = _make_grid(most, formats, high.dtype).squared_units
    return high * units, low * units


def find_exponent(most: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the exponent of magnitudes, given their bits, less one: its power of two and the inverse are normal."""
    fields = lax.convert_element_type(most >> most.dtype.type(mantissa_bits(dtype)), np.int32)
    return fields - np.int32(exponent_bias(dtype) + 1)


def read_units(x: jax.Array, units: jax.Array) -> jax.Array:
    """Returns magnitudes times `units`, and zero where they are not finite."""
    x = lax.abs(x * units)
    return lax.select(lax.lt(x, lax.full_like(x, np.inf)), x, lax.full_like(x, 0))


class _Grid(NamedTuple):
    """The numbers of a format, a row per sum."""

    units: jax.Array  # factors of magnitudes
    # Added to the bits of an element's power of two. The last bit of the result is the last bit of the format.
    steps: np.ndarray
    floors: jax.Array  # the bits of that result for subnormal elements
    ceilings: jax.Array  # the largest number
    squared_units: jax.Array  # factors of the sums of squares, for units that all rows share


def _make_grid(most: jax.Array, formats: Sequence[FloatFormat], dtype: np.dtype) -> _Grid:
    """Scales the numbers of formats to a tensor.

    The best scale moves the largest magnitude into the last binade of the format, or one below if it exceeds the
    largest number there. The rows are those of `add_squares`: where squares are added up, zero is the only value of the
    format.
    """
    width, bias, exponent = mantissa_bits(dtype), exponent_bias(dtype), find_exponent(most, dtype)
    one, never = bits_like((1.0,), dtype)[0], -4 * bias
    # A format with as many bits loses nothing.
    kept = [never if each.mantissa_bits >= width else width - each.mantissa_bits for each in formats]
    largest = [never, *(each.max_exponent for each in formats)] * 2
    digits = [never, *kept] * 2
    smallest = [never, *(each.min_exponent for each in formats)] * 2
    mantissas = [1.0, *(each.max / 2.0**each.max_exponent for each in formats)] * 2
    is_scaled = np.array([*[False] * (2 + len(formats)), *[True] * len(formats)])
    bounds = np.where(is_scaled, mantissas, np.inf).astype(dtype)
    mantissa = lax.bitcast_convert_type((most & (most.dtype.type(1 << width) - 1)) | one, dtype)  # between 1 and 2
    is_larger = lax.gt(lax.broadcast(mantissa, bounds.shape), bounds)
    room = lax.broadcast(np.int32(bias - 1) - exponent, bounds.shape)  # at the end of a dtype the largest may saturate
    lowered = lax.min(lax.convert_element_type(is_larger, np.int32), room)
    # Exponents of units, floors, ceilings and squared units, shifted by the exponent of the tensor or by its scale.
    none = np.zeros_like(is_scaled)
    powers = np.array([none, np.add(digits, smallest), largest, none], np.int32)
    own = np.array([none, *[np.array(largest) - 1] * 2, none], np.int32)
    is_own = np.stack([none, is_scaled, is_scaled, ~none])
    moved = lax.select(is_own, own, lax.broadcast(exponent, own.shape))
    weights = np.repeat(np.array([[1], [0], [0], [-2]], np.int32), is_scaled.size, 1)
    moved += lax.broadcast(lowered, (4,)) * weights
    fields = lax.clamp(np.int32(1), powers - moved + np.int32(bias), np.int32(2 * bias))
    fractions = bits_like(mantissas, dtype) - one
    below = np.stack([fractions * 0, fractions * 0, fractions, fractions * 0])
    bits = (lax.convert_element_type(fields, most.dtype) << most.dtype.type(width)) | below
    # Without the barrier XLA recomputes `bits` for each row, and compiles for longer.
    bits = lax.optimization_barrier(bits)
    units, floors, ceilings, squared_units = (lax.index_in_dim(bits, i, keepdims=False) for i in range(4))
    as_floats = lambda bits: lax.bitcast_convert_type(bits, dtype)
    steps = np.maximum(digits, -2 * bias).astype(most.dtype) << width
    return _Grid(as_floats(units), steps, floors, as_floats(ceilings), as_floats(squared_units))


def _round(x: jax.Array, steps: jax.Array, floors: jax.Array, ceilings: jax.Array) -> jax.Array:
    """Rounds to the nearest number of a grid, ties to even, and clips to the largest.

    Adding a number whose last bit is the last bit of the format rounds away all smaller bits.
    """
    binades = bits_of(x) & bits_like((np.inf,), x.dtype)[0]
    large = lax.bitcast_convert_type(lax.max(binades + steps, floors), x.dtype)
    return lax.min((x + large) - large, ceilings)
