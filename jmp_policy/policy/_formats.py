"""Quantized formats of a policy with their strings, and the table of number formats. Data only."""

import dataclasses
import functools
import math
import re
from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np

from .._base import did_you_mean, dtype_names, parse_dtype, quote
from ._block_formats import MXFP4, MXFP8, NVFP4, BlockFormat, CheckedFormat, Float8


@dataclasses.dataclass(frozen=True)
class Int8(CheckedFormat):
    """Symmetric 8-bit integer weights with a scale per output channel; by default int8 activations too.

    With `activations`, each row of a layer's input is quantized dynamically, with its own scale, and the matmul
    multiplies int8 by int8 into int32. Without, only weights are stored in int8.

    Args:
      activations: if True, inputs are quantized as well. If False, matmuls multiply the int8 values in the compute
        dtype, and scale their sums in float32.
      act_scale: `"dynamic"`, or `"static"` for one constant scale of each layer's inputs, from
        `quantize(..., input_clips=calibrate(...))`. Inputs are not measured: larger ones are clipped, infinities too,
        and a nan becomes an arbitrary integer. Weights that are not stored as int8, and embedding tables, use
        dynamic scales.
      min_size: weights with fewer elements stay in the compute dtype, since the casts around a small matmul take longer
        than the matmul.
      attention: if True, Flax's attention layers multiply queries by keys, and probabilities by values, in 8 bits too;
        under `autocast` so do `jax.nn.dot_product_attention` and the attention layers of Equinox and Haiku.
        In nnx, calls with dropout or `sow_weights` do not.

    Raises:
      TypeError, ValueError: an argument has the wrong type or an unknown value.

    Source: Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
    CVPR 2018; Dettmers et al., LLM.int8(), NeurIPS 2022 (a scale per row and column).

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.Int8()), str(jmp.quant.Int8(activations=False))
    ('int8', 'int8(activations=false)')
    >>> str(jmp.quant.Int8(act_scale="static"))
    'int8(act_scale=static)'
    """

    kind = "int8"
    bits: ClassVar[int] = 8
    """Bits per stored weight."""

    activations: bool = True
    min_size: int = 4096
    act_scale: Literal["dynamic", "static"] = "dynamic"
    attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.act_scale == "static" and not self.activations:
            raise ValueError(
                "act_scale='static' is for quantized inputs, and activations=False leaves them unquantized. "
                "For example: Int8(act_scale='static')."
            )

    @property
    def for_tables(self) -> "Int8":
        """The format of embedding tables."""
        return dataclasses.replace(self, act_scale="dynamic")


PER_CHANNEL = -1
"""The block size of `Int4` for one block per output channel, as in Keras."""


@dataclasses.dataclass(frozen=True)
class Int4(CheckedFormat):
    """Asymmetric 4-bit integer weights; each block of inputs of an output channel has a scale and a zero point.

    By default activations and matmuls stay in the compute dtype: 4 bits save memory, not time. Embedding tables have 8
    bits by default, because a lookup reads single rows, whose errors do not average out.

    Args:
      block_size: number of weights along the contracted axes that share a scale. The inputs of a weight are padded with
        zeros to whole blocks. A weight with fewer inputs has one block; -1 means one block per output channel.
      min_size: see `Int8`.
      table_bits: 8 or 4, for embedding tables.
      activations: if True (W4A8), each row of a layer's input is quantized to int8 dynamically, as for `Int8`. Each
        block is multiplied in integers into int32, and the sums are scaled and added in float32. Convolutions, and
        weights of `awq`, round the weight alone.

    Raises:
      TypeError, ValueError: an argument has the wrong type or an unknown value.

    Source: Frantar et al., GPTQ, ICLR 2023, section 4 (groups of 128); Keras's `int4/128` policies; Lin et al., QServe,
    MLSys 2025 (4-bit weights with 8-bit activations).

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.Int4()), str(jmp.quant.Int4(block_size=64)), str(jmp.quant.Int4(block_size=-1))
    ('int4/128', 'int4/64', 'int4/-1')
    >>> str(jmp.quant.Int4(activations=True))
    'int4/128(activations=true)'
    """

    kind = "int4"
    slash = "block_size"
    least, also = {"block_size": 1}, {"block_size": PER_CHANNEL}
    bits: ClassVar[int] = 4
    """Bits per stored weight."""

    block_size: int = 128
    min_size: int = 4096
    table_bits: int = 8
    activations: bool = False

    def __post_init__(self) -> None:
        if type(self.table_bits) is not int or self.table_bits not in (4, 8):
            raise ValueError(f"table_bits is 8 or 4, got {self.table_bits!r}. For example: Int4(table_bits=4).")
        super().__post_init__()

    @property
    def for_tables(self) -> "Int8 | Int4":
        """The format of embedding tables."""
        return Int8(activations=self.activations, min_size=self.min_size) if self.table_bits == 8 else self


@dataclasses.dataclass(frozen=True)
class E4M3(CheckedFormat):
    """Weights in float8_e4m3fn with float32 scales: for serving the checkpoints of DeepSeek, Qwen and others.

    A scale maps the largest magnitude of its weights to 448. `Float8` is for training instead: its weights stay in the
    parameter dtype. Embedding tables are stored as `Int8`, which is more precise in as many bits.

    Args:
      block_size: each square of this many inputs and outputs shares a scale; squares at the ends may be partial.
        -1 means one scale per output channel.
      activations: if True, inputs of matmuls are rounded dynamically to e4m3 too, with a float32 scale for each row and
        block of inputs; with `block_size=-1`, for each row. The products of each block are summed in float32, and the
        sums are scaled and added. Convolutions round the weight alone. The backward pass runs in the compute dtype.
      min_size: see `Int8`.

    Raises:
      TypeError, ValueError: an argument has the wrong type or an unknown value.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3.2 (1 x 128 tiles of inputs, 128 x 128 blocks of
    weights).

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.E4M3()), str(jmp.quant.E4M3(block_size=-1, activations=True))
    ('e4m3/128', 'e4m3/-1(activations=true)')
    """

    kind = "e4m3"
    slash = "block_size"
    least, also = {"block_size": 1}, {"block_size": PER_CHANNEL}
    bits: ClassVar[int] = 8
    """Bits per stored weight."""

    block_size: int = 128
    activations: bool = False
    min_size: int = 4096

    @property
    def for_tables(self) -> Int8:
        """The format of embedding tables."""
        return Int8(activations=self.activations, min_size=self.min_size)


@dataclasses.dataclass(frozen=True)
class NF4(CheckedFormat):
    """4-bit NormalFloat weights, as in QLoRA: 16 quantiles of a normal distribution, scaled by the largest magnitude.

    Each block of inputs of an output channel has a float32 scale. Matmuls run in the compute dtype, and embedding
    tables are stored as `Int8`.

    Args:
      block_size: as for `Int4`.
      min_size: see `Int8`.

    Raises:
      TypeError, ValueError: an argument has the wrong type or an unknown value.

    Source: Dettmers et al., QLoRA, NeurIPS 2023, section 3 and appendix E. Its blocks lie along the flattened weight.

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.NF4()), str(jmp.quant.NF4(block_size=128))
    ('nf4/64', 'nf4/128')
    """

    kind = "nf4"
    slash = "block_size"
    least, also = {"block_size": 1}, {"block_size": PER_CHANNEL}
    bits: ClassVar[int] = 4
    """Bits per stored weight."""
    activations: ClassVar[bool] = False

    block_size: int = 64
    min_size: int = 4096

    @property
    def for_tables(self) -> Int8:
        """The format of embedding tables."""
        return Int8(activations=False, min_size=self.min_size)


StoredFormat = Int8 | Int4 | E4M3 | NF4 | BlockFormat
"""Formats in which weights can be stored."""

Quantization = StoredFormat | Float8

_KINDS: dict[str, type[Quantization]] = {
    kind.kind: kind for kind in (Int8, Int4, E4M3, NF4, Float8, MXFP8, MXFP4, NVFP4)
}
KINDS = tuple(_KINDS)

_CALIBRATED_INT4 = re.compile(r"^\s*(?:gptq|awq)\s*/\s*4\s*/\s*(-?\d+)", re.IGNORECASE)
_CALIBRATED_INT8 = re.compile(r"^\s*gptq\s*/\s*8\s*/\s*-1\s*$", re.IGNORECASE)
_SPELLING = re.compile(r"(?P<kind>[a-z0-9]*)\s*(/(?P<slash>[^()]*))?(\((?P<options>.*)\))?")


def stored_format_of(quantization: Quantization | None) -> StoredFormat | None:
    """Returns the format if weights can be stored in it, else None."""
    return quantization if isinstance(quantization, StoredFormat) else None


def parse_quantization(spec: object, *, where: str = "") -> Quantization | None:
    """Reads a quantization from an instance, None, or a string; `where` says in errors where it was given.

    >>> parse_quantization("INT4 / 64"), parse_quantization("int8(min_size=0)").min_size
    (Int4(block_size=64, min_size=4096, table_bits=8, activations=False), 0)
    >>> parse_quantization("gptq/4/64") == parse_quantization("int4/64")
    True
    """
    if spec is None or isinstance(spec, Quantization):
        return spec
    spec = _translate_calibrated(spec) if isinstance(spec, str) else spec
    found = _SPELLING.fullmatch(spec.strip().lower()) if isinstance(spec, str) else None
    if found is None or found["kind"] not in _KINDS:
        suggestion = did_you_mean(found["kind"] if found else spec, (*KINDS, "int4/64"))
        raise ValueError(f"Unknown quantization {quote(spec)}{where}. {suggestion} For example: 'int8'.")
    kind, place = found["kind"], f" in {quote(spec)}{where}"
    pairs = []
    if found["slash"] is not None:
        if not _KINDS[kind].slash:
            raise ValueError(f"{kind} takes no '/{found['slash'].strip()}'{place}. For example: {_show_example(kind)}.")
        pairs.append((_KINDS[kind].slash, found["slash"]))
    options = (found["options"] or "").strip()
    pairs += [_parse_option(kind, piece, place) for piece in options.split(",") if options]
    given: dict[str, Any] = {}
    for name, value in pairs:
        if name in given:
            raise ValueError(f"{quote(name)} is given twice{place}. For example: {_show_example(kind)}.")
        is_number = _KINDS[kind].__annotations__[name] in (int, bool)
        given[name] = _parse_value(value, kind, place) if is_number else value
    try:
        return _KINDS[kind](**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"In {quote(spec)}{where}: {error}") from None


def _translate_calibrated(spec: str) -> str:
    """Translates Keras's `gptq/4/128` and `awq/4/128` to the format that such weights are stored in.

    >>> _translate_calibrated("gptq/4/64"), _translate_calibrated("gptq/8/-1"), _translate_calibrated("gptq/8/64")
    ('int4/64', 'int8(activations=false)', 'gptq/8/64')
    """
    stored = _CALIBRATED_INT4.sub(r"int4/\1", spec)
    return _CALIBRATED_INT8.sub("int8(activations=false)", stored)


def _parse_option(kind: str, piece: str, place: str) -> tuple[str, str]:
    name, _, value = (part.strip() for part in piece.partition("="))
    known = [field.name for field in dataclasses.fields(_KINDS[kind])]
    if name not in known:
        raise ValueError(
            f"{quote(name)} is not an option of {kind}{place}. {did_you_mean(name, known)} "
            f"For example: {_show_example(kind)}."
        )
    return name, value


def _parse_value(text: str, kind: str, place: str) -> int | bool:
    words = {"true": True, "false": False}
    text = text.strip()
    if text in words:
        return words[text]
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{quote(text)}{place} is neither a number nor true or false. For example: {_show_example(kind)}."
        ) from None


def _show_example(kind: str) -> str:
    return repr(f"{_KINDS[kind](min_size=0)}")


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
_BLOCK_SPELLING = re.compile(rf"({'|'.join(_IN_BLOCKS)})\s*(?:/\s*(\d+))?")
_NO_FORMAT = ("float8_e8m0fnu",)  # powers of two for scales: no sign, no zero


def parse_format(name: object) -> NumberFormat:
    """Reads the name of a floating dtype, in any spelling that policies take, or of a block-scaled format.

    Block-scaled formats are `"int8"` and `"int4"` (blocks of 128), `"mxfp8"`, `"mxfp8_e5m2"` and `"mxfp4"` (of 32), and
    `"nvfp4"` (of 16). A block size may follow.

    >>> parse_format("bf16").name, parse_format("int4").name, parse_format("INT8 / 64").name, parse_format("nvfp4").name
    ('bfloat16', 'int4', 'int8/64', 'nvfp4')
    """
    found = _BLOCK_SPELLING.fullmatch(name.strip().lower()) if isinstance(name, str) else None
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
    if isinstance(quantization, E4M3):
        return parse_format("float8_e4m3fn")
    is_e5m2 = is_gradient and isinstance(quantization, MXFP8) and quantization.gradients == "e5m2"
    size = quantization.block_size
    blocks = f"/{size}" if size > 0 else ""  # int4 with a scale for each channel is measured in blocks, as int8 is
    # The 16 values of nf4 have no exponents, and are nearer to int4's than to another format's.
    kind = "int4" if isinstance(quantization, NF4) else quantization.kind
    return parse_format(f"{kind}{'_e5m2' * is_e5m2}{blocks}")
