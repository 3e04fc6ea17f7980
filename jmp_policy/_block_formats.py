"""Formats in which a block of numbers shares a scale: MXFP8, MXFP4 and NVFP4. Data only."""

import dataclasses
from typing import Literal

from ._float8_format import check_count, check_flag, check_word, spell_options

_MIN_SIZE = 4096
"""The number of elements below which a product takes less time than the conversions around it, as for integers."""


@dataclasses.dataclass(frozen=True)
class MXFP8:
    """Numbers of 8 bits in blocks of 32, each with a scale that is a power of two: for training, and for storage.

    Each operand of each of the three products of a layer, forward and backward, is rounded in blocks along the axis
    that this product sums over. Nothing is kept from step to step. Weights stay in the parameter dtype in training;
    `quant.quantize` stores them as e4m3.

    A weight is in blocks if the block size divides the number of its inputs; else it stays in the compute dtype, and
    `jmp_policy.explain` says so. Outputs and rows may be any number: the products of the backward pass, which sum over
    them, add zeros. The tables of embeddings stay as they are. Convolutions compute in the compute dtype with the
    rounded weight.

    Args:
      activations: whether inputs and gradients are rounded as well, and products multiply numbers of 8 bits; else
        weights alone are rounded, and products are in the compute dtype.
      block_size: how many numbers share a scale. Hardware multiplies blocks of 32; others are computed in wider
        arithmetic everywhere.
      gradients: `"e4m3"`, or `"e5m2"` for more range and one bit less.
      scale_rounding: `"up"`, so that no number of a block is beyond the largest of the format; or `"floor"`, the rule
        of the OCP text, which clips the largest number of some blocks by up to an eighth.
      min_size: the number of elements below which a weight is left in the compute dtype: a small product takes less
        time than the conversions around it.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Source: OCP Microscaling Formats (MX) Specification 1.0, 2023; Mishra et al., Recipes for Pre-training LLMs with
    MXFP8, 2025 (e4m3 for all operands, scales rounded up).

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.MXFP8()), str(jmp.quant.MXFP8(block_size=64, gradients="e5m2"))
    ('mxfp8', 'mxfp8/64(gradients=e5m2)')
    """

    activations: bool = True
    block_size: int = 32
    gradients: Literal["e4m3", "e5m2"] = "e4m3"
    scale_rounding: Literal["up", "floor"] = "up"
    min_size: int = _MIN_SIZE

    def __post_init__(self) -> None:
        _check_common(self)
        check_word(self, "gradients", ("e4m3", "e5m2"))
        check_word(self, "scale_rounding", ("floor", "up"))

    @property
    def bits(self) -> int:
        """The bits of a stored number."""
        return 8

    def __str__(self) -> str:
        return _spell(self, "mxfp8", 32, "activations", "gradients", "scale_rounding", "min_size")


@dataclasses.dataclass(frozen=True)
class MXFP4:
    """Weights of 4 bits of floating point in blocks of 32, each with a scale that is a power of two: for storage.

    As `MXFP8` otherwise. Products are in the compute dtype, unless told otherwise: 4 bits are for memory.

    Args:
      activations: whether inputs and gradients are rounded to 4 bits as well.
      block_size, scale_rounding, min_size: as for `MXFP8`.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.MXFP4()), str(jmp.quant.MXFP4(block_size=16))
    ('mxfp4', 'mxfp4/16')
    """

    activations: bool = False
    block_size: int = 32
    scale_rounding: Literal["up", "floor"] = "up"
    min_size: int = _MIN_SIZE

    def __post_init__(self) -> None:
        _check_common(self)
        check_word(self, "scale_rounding", ("floor", "up"))
        _check_even(self)

    @property
    def bits(self) -> int:
        """The bits of a stored number."""
        return 4

    def __str__(self) -> str:
        return _spell(self, "mxfp4", 32, "activations", "scale_rounding", "min_size")


@dataclasses.dataclass(frozen=True)
class NVFP4:
    """Numbers of 4 bits of floating point in blocks of 16: for training, and for storage.

    The scale of a block is an e4m3, and a float32 scale for the whole tensor keeps those in range. As `MXFP8`
    otherwise.

    Args:
      activations, min_size: as for `MXFP8`.
      block_size: how many numbers share a scale. Hardware multiplies blocks of 16.
      square_weights: whether the blocks of weights are of 16 inputs by 16 outputs, so that the backward pass multiplies
        by the numbers that the forward pass multiplied by. Without activations they never are.
      hadamard: whether the gradient of a weight mixes 16 rows of both operands before they are rounded (a Hadamard
        transform with fixed signs), which spreads an outlier among them.
      stochastic_rounding: whether gradients are rounded up or down at random, right on average. That needs a key: in
        linen `rngs={"rounding": key}`.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Source: NVIDIA, Pretraining Large Language Models with NVFP4, 2025.

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.NVFP4()), str(jmp.quant.NVFP4(hadamard=True))
    ('nvfp4', 'nvfp4(hadamard=true)')
    """

    activations: bool = True
    block_size: int = 16
    square_weights: bool = True
    hadamard: bool = False
    stochastic_rounding: bool = False
    min_size: int = _MIN_SIZE

    def __post_init__(self) -> None:
        _check_common(self)
        for name in ("square_weights", "hadamard", "stochastic_rounding"):
            check_flag(self, name)
        _check_even(self)

    @property
    def bits(self) -> int:
        """The bits of a stored number."""
        return 4

    def __str__(self) -> str:
        options = ("activations", "square_weights", "hadamard", "stochastic_rounding", "min_size")
        return _spell(self, "nvfp4", 16, *options)


BlockFormat = MXFP8 | MXFP4 | NVFP4
"""Formats in which a block of numbers shares a scale."""


def _check_common(format: BlockFormat) -> None:
    check_flag(format, "activations")
    check_count(format, "block_size", 1, such_as=32)
    check_count(format, "min_size", 0)


def _check_even(format: MXFP4 | NVFP4) -> None:
    """Checks that a block is a number of whole bytes."""
    if format.block_size % 2:
        name = type(format).__name__
        raise ValueError(
            f"block_size of a format of 4 bits is even, got {format.block_size}. For example: {name}(block_size=16)."
        )


def _spell(format: BlockFormat, name: str, block_size: int, *options: str) -> str:
    slash = "" if format.block_size == block_size else f"/{format.block_size}"
    return f"{name}{slash}" + spell_options(format, *options)
