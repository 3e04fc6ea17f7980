"""Formats that a tensor might be cast to, and where a cast loses numbers: as thresholds, which are data."""

import dataclasses
import functools
import math
import re

import ml_dtypes
import numpy as np

from ..._base import did_you_mean, dtype_names, parse_dtype, quote

DEFAULT_BLOCK = 128
"""How many integers along the last axis share a scale."""


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A floating format, rounded to nearest, ties to even, with subnormal numbers.

    Attributes:
      name: canonical.
      mantissa_bits: how many bits a number has below its first one.
      min_exponent: of the smallest normal number, a power of two.
      max: the largest finite number.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    max: float

    @property
    def max_exponent(self) -> int:
        """The binade of the largest finite number."""
        return math.frexp(self.max)[1] - 1

    def find_thresholds(self, dtype: np.dtype) -> tuple[float, float, float]:
        """The largest magnitudes of a wider dtype that become zero, at most subnormal, and finite.

        >>> parse_format("float16").find_thresholds(np.dtype("float32"))[::2]
        (2.9802322387695312e-08, 65519.99609375)
        """
        smallest_normal = math.ldexp(1.0, self.min_exponent)
        half_a_step = math.ldexp(1.0, self.min_exponent - self.mantissa_bits - 1)
        step = math.ldexp(1.0, self.max_exponent - self.mantissa_bits)
        # A tie goes to the even neighbour: zero, the smallest normal number, and beyond the largest one if that is odd.
        is_odd = (self.max / step) % 2 == 1
        return (
            _round_down(half_a_step, dtype, inclusive=True),
            _round_down(smallest_normal - half_a_step, dtype, inclusive=False),
            _round_down(self.max + step / 2, dtype, inclusive=not is_odd),
        )


@dataclasses.dataclass(frozen=True)
class IntegerFormat:
    """Symmetric integers, of which a block along the last axis shares a scale: its amax over the largest integer.

    Attributes:
      name: canonical.
      max: the largest integer, 127 or 7.
      block: how many numbers share a scale, or all of the axis if it is shorter.
    """

    name: str
    max: int
    block: int


@dataclasses.dataclass(frozen=True)
class ScaledFormat:
    """Floating numbers, of which a block along the last axis shares a scale, as `quant.MXFP8` and its like have them.

    Attributes:
      name: canonical.
      dtype: the name of the floating dtype of the numbers.
      block: how many numbers share a scale.
      has_tensor_scale: whether scales are e4m3, beside one for the tensor, as in NVFP4; else they are powers of two.
    """

    name: str
    dtype: str
    block: int
    has_tensor_scale: bool

    @property
    def numbers(self) -> FloatFormat:
        """The format of the numbers, before they are scaled."""
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
    """Reads a format that numbers may be cast to.

    Args:
      name: a floating dtype in any spelling that policies take (`"float16"`, `"bf16"`, `"float8_e4m3fn"`,
        `jnp.float8_e5m2`); or what has a scale per block of the last axis: integers, `"int8"`, `"int4"` (blocks of
        128), `"int4/32"`; and floats, `"mxfp8"`, `"mxfp8_e5m2"`, `"mxfp4"` (blocks of 32), `"nvfp4"` (of 16),
        `"mxfp8/64"`.

    Raises:
      ValueError: it is none.

    >>> parse_format("bf16").name, parse_format("int4").name, parse_format("INT8 / 64").name, parse_format("nvfp4").name
    ('bfloat16', 'int4', 'int8/64', 'nvfp4')
    """
    found = _IN_BLOCKS.fullmatch(name.strip().lower()) if isinstance(name, str) else None
    if found is not None and (found[2] is None or int(found[2]) > 0):
        return _make_format(found[1], None if found[2] is None else int(found[2]))
    try:
        dtype = parse_dtype(name)  # pyright: ignore[reportArgumentType]: anything may come
    except ValueError:
        dtype = None
    if dtype is None or dtype.name in _NO_FORMAT:
        known = [spelling for spelling in dtype_names() if spelling not in _NO_FORMAT]
        remedy = did_you_mean(name, [*known, *_INTEGERS, *_SCALED, "int8/64", "int4/32"])
        raise ValueError(f"Unknown format {quote(name)}. {remedy} For example: 'float16', 'float8_e4m3fn', 'int8/64'.")
    return _describe(dtype)


def _make_format(kind: str, block: int | None) -> IntegerFormat | ScaledFormat:
    """A format of blocks of so many numbers; `None` stands for the default."""
    dtype, default = _SCALED.get(kind, ("", DEFAULT_BLOCK))
    block = default if block is None else block
    name = kind if block == default else f"{kind}/{block}"
    if kind in _INTEGERS:
        return IntegerFormat(name, _INTEGERS[kind], block)
    return ScaledFormat(name, dtype, block, has_tensor_scale=kind == "nvfp4")


@functools.cache
def _describe(dtype: np.dtype) -> FloatFormat:
    info = ml_dtypes.finfo(dtype)
    return FloatFormat(dtype.name, info.nmant, math.frexp(float(info.smallest_normal))[1] - 1, float(info.max))


def _round_down(bound: float, dtype: np.dtype, inclusive: bool) -> float:
    """The largest number of a dtype below a bound, or the bound itself."""
    with np.errstate(over="ignore"):
        found = dtype.type(bound)
    if float(found) > bound or (float(found) == bound and not inclusive):
        found = np.nextafter(found, dtype.type(0))
    return float(found)
