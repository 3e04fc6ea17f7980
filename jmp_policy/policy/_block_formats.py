"""Block-scaled formats MXFP8, MXFP4 and NVFP4. Data only."""

import dataclasses
from typing import ClassVar, Literal

from ._float8_format import CheckedFormat


class _Blocks(CheckedFormat):
    """Base class of formats in which a block of elements shares a scale."""

    bits: ClassVar[int]
    """Bits per stored element."""

    slash = "block_size"
    least = {"block_size": 2}  # noqa: RUF012  # `lax.scaled_dot` takes no fewer
    block_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits == 4 and self.block_size % 2:  # two elements share a byte
            raise ValueError(
                f"block_size of a 4-bit format must be even, got {self.block_size}. "
                f"For example: {type(self).__name__}(block_size=16)."
            )


@dataclasses.dataclass(frozen=True)
class MXFP8(_Blocks):
    """8-bit elements in blocks of 32, each with a power-of-two scale: for training and storage.

    Each operand of each matmul of a layer, forward and backward, is rounded in blocks along the axis that the matmul
    sums over. No state is kept between steps. In training, weights stay in the parameter dtype; `quant.quantize` stores
    them as e4m3.

    A weight is quantized if the block size divides the number of its inputs; otherwise it stays in the compute dtype,
    and `jmp_policy.explain` says so. Output and batch sizes may be any number: backward matmuls pad them with zeros.
    Embedding tables are not quantized. Convolutions round the weight and run in the compute dtype.

    Args:
      activations: if True, inputs and gradients are rounded too and matmuls multiply 8-bit elements. If False, only
        weights are rounded and matmuls run in the compute dtype.
      block_size: number of elements that share a scale. Hardware multiplies blocks of 32; other sizes are computed in
        a wider dtype on every platform.
      gradients: `"e4m3"`, or `"e5m2"` for more range and one bit less precision.
      scale_rounding: `"up"`, so that no element of a block exceeds the largest value of the format; or `"floor"`, the
        rule of the OCP specification, which clips the largest element of some blocks by up to an eighth.
      min_size: weights with fewer elements stay in the compute dtype, since the casts around a small matmul take longer
        than the matmul.
      attention: as for `Int8`.

    Raises:
      TypeError, ValueError: an argument has the wrong type or an unknown value.

    Source: OCP Microscaling Formats (MX) Specification 1.0, 2023; Mishra et al., Recipes for Pre-training LLMs with
    MXFP8, 2025 (e4m3 for all operands, scales rounded up).

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.MXFP8()), str(jmp.quant.MXFP8(block_size=64, gradients="e5m2"))
    ('mxfp8', 'mxfp8/64(gradients=e5m2)')
    """

    kind = "mxfp8"
    bits = 8

    activations: bool = True
    block_size: int = 32
    gradients: Literal["e4m3", "e5m2"] = "e4m3"
    scale_rounding: Literal["floor", "up"] = "up"
    min_size: int = 4096
    attention: bool = False


@dataclasses.dataclass(frozen=True)
class MXFP4(_Blocks):
    """4-bit floating-point weights in blocks of 32, each with a power-of-two scale: for storage.

    Like `MXFP8`, except that matmuls run in the compute dtype by default: 4 bits save memory, not time.

    Args:
      activations: if True, inputs and gradients are rounded to 4 bits as well.
      block_size: see `MXFP8`.
      scale_rounding: see `MXFP8`.
      min_size: see `MXFP8`.

    Raises:
      TypeError, ValueError: an argument has the wrong type or an unknown value.

    Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.MXFP4()), str(jmp.quant.MXFP4(block_size=16))
    ('mxfp4', 'mxfp4/16')
    """

    kind = "mxfp4"
    bits = 4

    activations: bool = False
    block_size: int = 32
    scale_rounding: Literal["floor", "up"] = "up"
    min_size: int = 4096


@dataclasses.dataclass(frozen=True)
class NVFP4(_Blocks):
    """4-bit floating-point elements in blocks of 16: for training and storage.

    Each block has an e4m3 scale, and the whole tensor a float32 scale that keeps the block scales in range. Otherwise
    like `MXFP8`. It raises the training loss more than 8-bit formats do: see the benchmarks.

    The layer that computes logits, and the first layer of a vision model, have the largest errors. Keep them in the
    compute dtype by rules of a `PolicyMap`, as in the example.

    Args:
      activations: see `MXFP8`.
      block_size: number of elements that share a scale. Hardware multiplies blocks of 16.
      square_weights: if True, blocks of weights span 16 inputs by 16 outputs, so that the forward and the backward pass
        multiply by the same rounded weight. Ignored if `activations` is False.
      hadamard: if True, the weight-gradient matmul mixes 16 rows of both operands before they are rounded (a Hadamard
        transform with fixed signs), which spreads outliers.
      stochastic_rounding: if True, gradients are rounded up or down at random, without bias. This needs a PRNG key: in
        linen `rngs={"rounding": key}`, in nnx `jmp_policy.nnx.set_rounding_rngs(model, rngs)`, for functions
        `quant.dot_general(..., key=)`. A forward pass alone needs no key.
      min_size: see `MXFP8`.

    Raises:
      TypeError, ValueError: an argument has the wrong type or an unknown value.

    Source: NVIDIA, Pretraining Large Language Models with NVFP4, 2025.

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.NVFP4()), str(jmp.quant.NVFP4(hadamard=True))
    ('nvfp4', 'nvfp4(hadamard=true)')
    >>> rules = jmp.PolicyMap({"(.*/)?(head|stem)": "mixed_bfloat16"}, default="nvfp4_from_mixed_bfloat16")
    >>> rules["decoder/head"].quantization is None, str(rules["decoder/mlp"].quantization)
    (True, 'nvfp4')
    """

    kind = "nvfp4"
    bits = 4

    activations: bool = True
    block_size: int = 16
    square_weights: bool = True
    hadamard: bool = False
    stochastic_rounding: bool = False
    min_size: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hadamard and self.block_size & (self.block_size - 1):
            raise ValueError(
                f"The Hadamard transform needs a block_size that is a power of two, got {self.block_size}. "
                "For example: NVFP4(block_size=16, hadamard=True)."
            )


BlockFormat = MXFP8 | MXFP4 | NVFP4
"""Formats in which a block of elements shares a scale."""


def needs_rng(format: object) -> bool:
    """True if differentiated matmuls in this format need a PRNG key."""
    return isinstance(format, NVFP4) and format.activations and format.stochastic_rounding
