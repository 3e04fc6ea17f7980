"""The table of number formats: precision, range, blocks and scales of each."""

import dataclasses
import functools
import math
import re

import ml_dtypes
import numpy as np

from .._base import did_you_mean, dtype_names, parse_dtype, quote
from ._block_formats import MXFP4, MXFP8, NVFP4
from ._float8_format import Float8
from ._formats import Int4, Int8, Quantization


@dataclasses.dataclass(frozen=True)
class NumberFormat:
    """Numbers that are rounded to nearest, ties to even, with subnormal numbers. All integers are subnormal."""

    name: str  # canonical
    dtype: str  # of the elements
    mantissa_bits: int  # the number of bits below the leading one
    min_exponent: int  # the exponent of the smallest normal number
    max: float  # the largest finite number
    block: int = 0  # the number of elements of the last axis that share a scale; 0 for a format without scales
    # The dtype of scales: float32 (amax over `max`), e8m0 (powers of two), or e4m3, and then the tensor has one more.
    scale: str = ""

    @property
    def max_exponent(self) -> int:
        return math.frexp(self.max)[1] - 1

    @property
    def has_integers(self) -> bool:
        return self.dtype.startswith("int")

    @property
    def least_exponent(self) -> int:
        """The exponent of the smallest number."""
        return self.min_exponent - self.mantissa_bits

    @property
    def eps(self) -> float:
        """The distance from 1 to the next number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    def find_thresholds(self, dtype: np.dtype) -> tuple[float, float, float]:
        """Returns the largest magnitudes that become zero, at most subnormal, and finite."""
        smallest_normal = math.ldexp(1.0, self.min_exponent)
        half_a_step = math.ldexp(1.0, self.least_exponent - 1)
        step = math.ldexp(1.0, self.max_exponent - self.mantissa_bits)
        # A tie goes to the even neighbor: zero, the smallest normal number, or above the largest number if that is odd.
        is_odd = (self.max / step) % 2 == 1
        return (
            _round_down(half_a_step, dtype, inclusive=True),
            _round_down(smallest_normal - half_a_step, dtype, inclusive=False),
            _round_down(self.max + step / 2, dtype, inclusive=not is_odd),
        )


def _round_down(bound: float, dtype: np.dtype, inclusive: bool) -> float:
    """Returns the largest number of a dtype below a bound, or the bound itself if `inclusive`."""
    with np.errstate(over="ignore"):
        found = dtype.type(bound)
    if float(found) > bound or (float(found) == bound and not inclusive):
        found = np.nextafter(found, dtype.type(0))
    return float(found)


# The dtype of elements, the default block and the dtype of scales.
_IN_BLOCKS = {
    "int8": ("int8", 128, "float32"),
    "int4": ("int4", Int4.block_size, "float32"),
    "mxfp8": ("float8_e4m3fn", MXFP8.block_size, "float8_e8m0fnu"),
    "mxfp8_e5m2": ("float8_e5m2", MXFP8.block_size, "float8_e8m0fnu"),
    "mxfp4": ("float4_e2m1fn", MXFP4.block_size, "float8_e8m0fnu"),
    "nvfp4": ("float4_e2m1fn", NVFP4.block_size, "float8_e4m3fn"),
}
_SPELLING = re.compile(rf"({'|'.join(_IN_BLOCKS)})\s*(?:/\s*(\d+))?")
_NO_FORMAT = ("float8_e8m0fnu",)  # powers of two for scales: no sign, no zero


def parse_format(name: object) -> NumberFormat:
    """Reads the name of a floating dtype, in any spelling that policies take, or of a block-scaled format.

    Block-scaled formats are `"int8"` and `"int4"` (blocks of 128), `"mxfp8"`, `"mxfp8_e5m2"` and `"mxfp4"` (of 32), and
    `"nvfp4"` (of 16). A block size may follow.

    >>> parse_format("bf16").name, parse_format("int4").name, parse_format("INT8 / 64").name, parse_format("nvfp4").name
    ('bfloat16', 'int4', 'int8/64', 'nvfp4')
    """
    found = _SPELLING.fullmatch(name.strip().lower()) if isinstance(name, str) else None
    if found is not None and int(found[2] or 1) > 0:
        dtype, default, scale = _IN_BLOCKS[found[1]]
        block = int(found[2] or default)
        spelled = found[1] if block == default else f"{found[1]}/{block}"
        return dataclasses.replace(find_format(np.dtype(dtype)), name=spelled, block=block, scale=scale)
    try:
        dtype = parse_dtype(name)  # pyright: ignore[reportArgumentType]: anything may come
    except ValueError:
        dtype = None
    if dtype is None or dtype.name in _NO_FORMAT:
        known = [spelling for spelling in dtype_names() if spelling not in _NO_FORMAT]
        remedy = did_you_mean(name, [*known, *_IN_BLOCKS, "int8/64", "int4/32"])
        raise ValueError(f"Unknown format {quote(name)}. {remedy} For example: 'float16', 'float8_e4m3fn', 'int8/64'.")
    return find_format(dtype)


@functools.cache
def find_format(dtype: np.dtype) -> NumberFormat:
    """Returns the format of a floating dtype, or of the symmetric integers of an integer dtype."""
    if dtype.name.startswith("int"):
        info = ml_dtypes.iinfo(dtype)
        return NumberFormat(dtype.name, dtype.name, info.bits - 1, info.bits - 1, info.max)
    info = ml_dtypes.finfo(dtype)
    min_exponent = math.frexp(float(info.smallest_normal))[1] - 1
    return NumberFormat(dtype.name, dtype.name, info.nmant, min_exponent, float(info.max))


def find_operand_format(quantization: Quantization, *, is_gradient: bool = False) -> NumberFormat:
    """Returns the format to which operands of matmuls are rounded: weights, inputs or gradients of outputs."""
    if isinstance(quantization, Float8):
        return parse_format("float8_e5m2" if is_gradient else "float8_e4m3fn")
    if isinstance(quantization, Int8):
        return parse_format("int8")
    is_e5m2 = is_gradient and isinstance(quantization, MXFP8) and quantization.gradients == "e5m2"
    size = quantization.block_size
    blocks = f"/{size}" if size > 0 else ""  # int4 with a scale for each channel is measured in blocks, as int8 is
    return parse_format(f"{quantization.kind}{'_e5m2' * is_e5m2}{blocks}")
