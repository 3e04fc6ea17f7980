"""Quantized formats: what a policy may say of weights and activations beyond a dtype. Data only."""

import dataclasses
import re
from typing import Any

from .._base import did_you_mean, quote
from ._block_formats import (
    MXFP4 as MXFP4,
    MXFP8 as MXFP8,
    NVFP4 as NVFP4,
    BlockFormat as BlockFormat,
    KeptNVFP4 as KeptNVFP4,
    draws_noise as draws_noise,
    find_kept_name as find_kept_name,
    keep_module as keep_module,
    keeps_names as keeps_names,
)
from ._float8_format import (
    CurrentScaling as CurrentScaling,
    DelayedScaling as DelayedScaling,
    Float8 as Float8,
    check_count,
    check_flag,
    spell_options,
)

DEFAULT_MIN_SIZE = 4096
"""The number of elements below which a product takes less time than the conversions around it."""


@dataclasses.dataclass(frozen=True)
class Int8:
    """Weights in 8 bits, symmetric, a scale per output channel; activations too, unless told otherwise.

    With `activations` each row of a layer's input is quantized as it comes (dynamically, a scale per row), and the
    product is one of integers, int8 by int8 into int32. Without, the weights alone are stored in 8 bits.

    Args:
      activations: whether inputs are quantized as well.
      min_size: the number of elements below which a weight is left in the compute dtype: a small product takes less
        time than the conversions around it.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Source: Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
    CVPR 2018; Dettmers et al., LLM.int8(), NeurIPS 2022 (a scale per row and column).

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.Int8()), str(jmp.quant.Int8(activations=False))
    ('int8', 'int8(activations=false)')
    """

    activations: bool = True
    min_size: int = DEFAULT_MIN_SIZE

    def __post_init__(self) -> None:
        check_flag(self, "activations")
        check_count(self, "min_size", 0)

    @property
    def bits(self) -> int:
        """The bits of a stored weight."""
        return 8

    @property
    def for_tables(self) -> "Int8":
        """The format of the tables of embeddings."""
        return self

    def __str__(self) -> str:
        return "int8" + spell_options(self, "activations", "min_size")


PER_CHANNEL = -1
"""The block size of `Int4` that stands for one block per output channel, as in Keras."""


@dataclasses.dataclass(frozen=True)
class Int4:
    """Weights in 4 bits, asymmetric, a scale and a zero point per block of inputs of an output channel.

    Activations stay in the compute dtype, and so does the product: 4 bits are for memory. The tables of embeddings have
    8 bits, unless told otherwise: a token reads a row alone, where no sum evens the errors out, and a table that
    computes the logits too lost a small GPT more than all of its other layers.

    Args:
      block_size: how many weights, along the axes that are summed over, share a scale. It divides their number; a
        weight with fewer has one block, and so has every output channel where it is -1.
      min_size: as for `Int8`.
      table_bits: 8 or 4, for the tables of embeddings.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Source: Frantar et al., GPTQ, ICLR 2023, section 4 (groups of 128); Keras's `int4/128` policies.

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.Int4()), str(jmp.quant.Int4(block_size=64)), str(jmp.quant.Int4(block_size=-1))
    ('int4/128', 'int4/64', 'int4/-1')
    """

    block_size: int = 128
    min_size: int = DEFAULT_MIN_SIZE
    table_bits: int = 8

    def __post_init__(self) -> None:
        if self.block_size != PER_CHANNEL:
            check_count(self, "block_size", 1)
        check_count(self, "min_size", 0)
        if type(self.table_bits) is not int or self.table_bits not in (4, 8):
            raise ValueError(f"table_bits is 8 or 4, got {self.table_bits!r}. For example: Int4(table_bits=4).")

    @property
    def bits(self) -> int:
        """The bits of a stored weight."""
        return 4

    @property
    def for_tables(self) -> "Int8 | Int4":
        """The format of the tables of embeddings."""
        return Int8(activations=False, min_size=self.min_size) if self.table_bits == 8 else self

    def __str__(self) -> str:
        return f"int4/{self.block_size}" + spell_options(self, "min_size", "table_bits")


StoredFormat = Int8 | Int4 | BlockFormat
"""Formats in which weights are stored."""

Quantization = StoredFormat | Float8

_KINDS: dict[str, type[Quantization]] = {
    "int8": Int8,
    "int4": Int4,
    "float8": Float8,
    "mxfp8": MXFP8,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
KINDS = tuple(_KINDS)
"""What the strings of quantizations begin with."""

_SLASH = {"int4": "block_size", "float8": "amax_history_length"} | dict.fromkeys(
    ("mxfp8", "mxfp4", "nvfp4"), "block_size"
)
_WORDS = ("recipe", "gradients", "scale_rounding", "keep")
_SPELLING = re.compile(r"(?P<kind>[a-z0-9]*)\s*(/(?P<slash>[^()]*))?\s*(\((?P<options>.*)\))?")


def stored_format_of(quantization: Quantization | None) -> StoredFormat | None:
    """A quantization, if it is one by which weights can be stored."""
    return quantization if isinstance(quantization, StoredFormat) else None


def parse_quantization(spec: object, *, where: str = "") -> Quantization | None:
    """Reads a quantization: one of the classes, a string such as `"int8"`, `"int4/64"` or `"float8"`, or `None`.

    Args:
      spec: what to read; spaces and case of a string are forgiven.
      where: what the error message says of the place it stands in.

    Raises:
      ValueError: it is none.

    >>> parse_quantization("INT4 / 64"), parse_quantization("int8(activations=false)")
    (Int4(block_size=64, min_size=4096, table_bits=8), Int8(activations=False, min_size=4096))
    """
    if spec is None or isinstance(spec, Quantization):
        return spec
    found = _SPELLING.fullmatch(spec.strip().lower()) if isinstance(spec, str) else None
    if found is None or found["kind"] not in _KINDS:
        remedy = did_you_mean(found["kind"] if found else spec, (*KINDS, "int4/64"))
        raise ValueError(f"Unknown quantization {quote(spec)}{where}. {remedy} For example: 'int8'.")
    kind, place = found["kind"], f" in {quote(spec)}{where}"
    pairs = [] if found["slash"] is None else [(_find_slash_field(kind, found["slash"], place), found["slash"])]
    options = (found["options"] or "").strip()
    pairs += [_parse_option(kind, piece, place) for piece in options.split(",") if options]
    given: dict[str, Any] = {}
    for name, value in pairs:
        if name in given:
            raise ValueError(f"{quote(name)} is given twice{place}. For example: {_show_example(kind)}.")
        given[name] = value if name in _WORDS else _parse_value(value, kind, place)
    try:
        return _KINDS[kind](**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"In {quote(spec)}{where}: {error}") from None


def _find_slash_field(kind: str, slash: str, place: str) -> str:
    """What a number after a slash says."""
    if kind not in _SLASH:
        raise ValueError(f"{kind} takes no '/{slash.strip()}'{place}. For example: {_show_example(kind)}.")
    return _SLASH[kind]


def _parse_option(kind: str, piece: str, place: str) -> tuple[str, str]:
    """The name and value of `name=value`."""
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
