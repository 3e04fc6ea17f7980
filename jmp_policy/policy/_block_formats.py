"""Formats in which a block of numbers shares a scale: MXFP8, MXFP4 and NVFP4. Data only."""

import dataclasses
import functools
import re
from typing import Literal

from .._base import quote
from ._float8_format import check_count, check_flag, check_word, spell_options

_MIN_SIZE = 4096
"""The number of elements below which a product takes less time than the conversions around it, as for integers."""

_NO_NAMES = "none"
_KEPT_NAMES = (
    "head|lm_head|logits|logits_dense|logitdense|classifier|stem|conv_init|patch_embed|patch_embedding|patch_embeddings"
)
"""What heads and first layers are called: in Flax's examples, MaxText, T5X, and the Flax models of Hugging Face."""


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
      block_size: as for `MXFP8`.
      scale_rounding: as for `MXFP8`.
      min_size: as for `MXFP8`.

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
    otherwise. It loses more than 8 bits do: after 1,500 steps the GPT of `examples/gpt`, 64 wide, had 5 and 7 % more
    validation loss than in bfloat16, in two seeds, and with `MXFP8` .4 % in the mean of three.

    What computes logits, and the first layer of images, stays in the compute dtype, because its error is the largest:
    layers are known by names, their own and those of the modules around them, and nothing is known of the model itself
    or of functions. It holds under a rule of a `PolicyMap` as well: a rule that is to quantize the head says
    `nvfp4(keep=none)`. A weight that is stored in blocks already is multiplied so, whatever its layer is called.

    Args:
      activations: as for `MXFP8`.
      min_size: as for `MXFP8`.
      block_size: how many numbers share a scale. Hardware multiplies blocks of 16.
      square_weights: whether the blocks of weights are of 16 inputs by 16 outputs, so that the backward pass multiplies
        by the numbers that the forward pass multiplied by. Without activations they never are.
      hadamard: whether the gradient of a weight mixes 16 rows of both operands before they are rounded (a Hadamard
        transform with fixed signs), which spreads an outlier among them.
      stochastic_rounding: whether gradients are rounded up or down at random, right on average. That needs a key: in
        linen `rngs={"rounding": key}`, in nnx `jmp_policy.nnx.set_rounding(model, rngs)`, for functions
        `quant.dot_general(..., key=)`. What is not differentiated draws nothing, and needs no key.
      keep: the names of modules, separated by `|`, inside of which weights stay in the compute dtype; `"none"` for
        nothing. Names of modules are compared in lower case, with a number such as `_0` at their end and without.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Source: NVIDIA, Pretraining Large Language Models with NVFP4, 2025.

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.NVFP4()), str(jmp.quant.NVFP4(hadamard=True))
    ('nvfp4', 'nvfp4(hadamard=true)')
    >>> str(jmp.quant.NVFP4(keep="head|decoder"))
    'nvfp4(keep=decoder|head)'
    """

    activations: bool = True
    block_size: int = 16
    square_weights: bool = True
    hadamard: bool = False
    stochastic_rounding: bool = False
    keep: str = _KEPT_NAMES
    min_size: int = _MIN_SIZE

    def __post_init__(self) -> None:
        _check_common(self)
        for name in ("square_weights", "hadamard", "stochastic_rounding"):
            check_flag(self, name)
        _check_even(self)
        if self.hadamard and self.block_size & (self.block_size - 1):
            raise ValueError(
                f"The Hadamard transform of block_size numbers is of a power of two, got {self.block_size}. "
                "For example: NVFP4(block_size=16, hadamard=True)."
            )
        object.__setattr__(self, "keep", _normalize_names(self.keep))

    @property
    def bits(self) -> int:
        """The bits of a stored number."""
        return 4

    def __str__(self) -> str:
        options = ("activations", "square_weights", "hadamard", "stochastic_rounding", "keep", "min_size")
        return _spell(self, "nvfp4", 16, *options)


BlockFormat = MXFP8 | MXFP4 | NVFP4
"""Formats in which a block of numbers shares a scale."""


@dataclasses.dataclass(frozen=True)
class KeptNVFP4(NVFP4):
    """What `NVFP4` is for the modules that it keeps in the compute dtype.

    Attributes:
      name: by which it keeps them.
    """

    name: str = ""

    @property
    def plain(self) -> NVFP4:
        """The format of all other modules."""
        return NVFP4(**{field.name: getattr(self, field.name) for field in dataclasses.fields(NVFP4)})

    def __str__(self) -> str:
        return str(self.plain)


def find_kept_name(format: object, path: str) -> str | None:
    """The first name on the path of a module that a format keeps; `None` if it keeps none of them.

    >>> find_kept_name(NVFP4(), "encoder/Head_0/dense"), find_kept_name(NVFP4(keep="none"), "head")
    ('Head_0', None)
    """
    if not isinstance(format, NVFP4) or not keeps_names(format):
        return None
    names = _split_names(format.keep)
    return next((name for name in path.split("/") if not names.isdisjoint(_spell_both(name))), None)


def keeps_names(format: object) -> bool:
    """Whether what a format does to a module may depend on the names of modules."""
    return isinstance(format, NVFP4) and format.keep != _NO_NAMES


def keep_module(format: NVFP4, name: str) -> KeptNVFP4:
    """What a format is for a module that it keeps by this name."""
    return KeptNVFP4(**{field.name: getattr(format, field.name) for field in dataclasses.fields(NVFP4)}, name=name)


def draws_noise(format: object) -> bool:
    """Whether products in a format, where they are differentiated, need a key."""
    return isinstance(format, NVFP4) and format.activations and format.stochastic_rounding


@functools.lru_cache
def _split_names(keep: str) -> frozenset[str]:
    return frozenset(keep.split("|"))


def _spell_both(name: str) -> tuple[str, str]:
    lower = name.lower()
    return lower, re.sub(r"_\d+$", "", lower)


def _normalize_names(keep: object) -> str:
    """Names in lower case and in order, so that formats which keep the same are equal.

    Raises:
      TypeError: it is no string.
      ValueError: a name has a letter that no string of a policy could hold.
    """
    example = "For example: NVFP4(keep='head|logits'), or 'none' for nothing."
    if not isinstance(keep, str):
        raise TypeError(f"keep is a string of names, got {quote(keep)}. {example}")
    names = {name.strip().lower() for name in keep.split("|")} - {"", _NO_NAMES}
    for name in sorted(names):
        if re.fullmatch(r"[\w.-]+", name) is None:
            raise ValueError(f"{quote(name)} of keep is not the name of a module. {example}")
    return _KEPT_NAMES if names == _split_names(_KEPT_NAMES) else "|".join(sorted(names)) or _NO_NAMES


def _check_common(format: BlockFormat) -> None:
    check_flag(format, "activations")
    check_count(format, "block_size", 2, such_as=32)  # `lax.scaled_dot` takes no fewer
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
