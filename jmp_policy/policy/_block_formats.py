"""Float8 and block-scaled formats, their recipes, and the base class that checks their fields. Data only."""

import dataclasses
import typing
from typing import Any, ClassVar, Literal, cast

from .._base import did_you_mean, quote

MULTIPLE = 16  # hardware multiplies 8-bit floats only if all matmul sizes are multiples of this
ODD_ROWS = f"the number of its rows is not a multiple of {MULTIPLE}"


class CheckedFormat:
    """Base class of quantized formats. Checks each field by its type, and spells those that differ from the default."""

    kind: ClassVar[str]  # the name in policy strings
    slash: ClassVar[str] = ""  # the field that a number after a slash sets
    least: ClassVar[dict[str, int]] = {}  # the least values of the fields that cannot be 0
    also: ClassVar[dict[str, int]] = {}  # lower values of fields with a meaning of their own

    def __post_init__(self) -> None:
        for field in dataclasses.fields(cast(Any, self)):
            name, value = field.name, getattr(self, field.name)
            example = f"For example: {type(self).__name__}({name}={field.default or 1})."
            if field.type is bool and not isinstance(value, bool):
                raise TypeError(f"{name} is True or False, got {quote(value)}. For example: {type(self).__name__}().")
            if typing.get_origin(field.type) is Literal:
                check_word(self, name, typing.get_args(field.type))
            if field.type is not int:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {quote(value)}. {example}")
            if value < (least := self.least.get(name, 0)) and value != self.also.get(name):
                raise ValueError(f"{name} must be at least {least}, got {value}. {example}")

    def __str__(self) -> str:
        fields = dataclasses.fields(cast(Any, self))
        given = {f.name: v for f in fields if (v := getattr(self, f.name)) != f.default}
        # A size that may be one of `also` is always spelled.
        slash = f"/{getattr(self, self.slash)}" if self.slash in given or self.slash in self.also else ""
        given.pop(self.slash, None)
        options = ",".join(f"{name}={str(value).lower()}" for name, value in given.items())
        return f"{self.kind}{slash}" + (f"({options})" if options else "")


def check_word(format: object, name: str, known: tuple[str, ...]) -> None:
    """Raises unless a field is one of the known words."""
    value = getattr(format, name)
    if not isinstance(value, str) or value not in known:
        example = f"For example: {type(format).__name__}({name}={known[-1]!r})."
        raise ValueError(f"Unknown {name} {quote(value)}. {did_you_mean(value, known)} {example}")


@dataclasses.dataclass(frozen=True)
class CurrentScaling:
    """Recipe that computes scales from the current values. No state is kept.

    Args:
      granularity: `"tensor"` for one scale per operand, or `"row"` for one scale per row of the left operand and per
        column of the right operand, that is per slice along the axes that are not summed over.

    Raises:
      ValueError: the granularity is neither.

    Source: NVIDIA Transformer Engine's `Float8CurrentScaling`; torchao's `float8` training (tensorwise and rowwise).

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.CurrentScaling()), str(jmp.quant.CurrentScaling("row"))
    ('current', 'current/row')
    """

    granularity: str = "tensor"

    def __post_init__(self) -> None:
        check_word(self, "granularity", ("tensor", "row"))

    def __str__(self) -> str:
        return "current" if self.granularity == "tensor" else f"current/{self.granularity}"


@dataclasses.dataclass(frozen=True)
class DelayedScaling:
    """Recipe that computes scales from the largest magnitudes (amax) of earlier steps, kept as model state.

    Each operand is read only once, because it is not measured before it is scaled. Values too large for the scale of
    their step saturate.

    The state is trained beside the parameters, under `jax.jit`: its gradient is its next value. In linen it is the
    collection `_overwrite_with_gradient` that `model.init` returns beside `"params"`. Pass both to `value_and_grad`,
    `tx.init` and `optim.step`, or to `linen.TrainState` as `params`; the `update` of plain optax would treat the state
    as parameters. With `nn.scan` and `nn.vmap`, list `_overwrite_with_gradient` in `variable_axes`. In nnx it is
    `nnx.Float8State`, which `jmp_policy.nnx.value_and_grad` and `jmp_policy.nnx.Optimizer` update.

    Args:
      amax: `"max"` for the largest amax of the history, or `"most_recent"` for the last.
      delay: number of steps until a measured amax takes effect. 1: the scale is computed from the history when it is
        used, as in Flax. 2: the scale that the previous step stored is used, as in Keras.

    Raises:
      ValueError: an argument is none of these.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3; NVIDIA Transformer Engine's
    `DelayedScaling`.

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.DelayedScaling()), str(jmp.quant.DelayedScaling("most_recent", delay=2))
    ('delayed', 'delayed/most_recent/2')
    """

    amax: str = "max"
    delay: int = 1

    def __post_init__(self) -> None:
        check_word(self, "amax", ("max", "most_recent"))
        if type(self.delay) is not int or self.delay not in (1, 2):
            raise ValueError(f"delay is 1 or 2, got {self.delay!r}. For example: DelayedScaling(delay=2).")

    def __str__(self) -> str:
        amax = "" if self.amax == "max" else f"/{self.amax}"
        return f"delayed{amax}" if self.delay == 1 else f"delayed{amax}/{self.delay}"


Recipe = CurrentScaling | DelayedScaling

_DELAYED = [DelayedScaling(amax, delay) for amax in ("max", "most_recent") for delay in (1, 2)]
_RECIPES: dict[str, Recipe] = {str(x): x for x in (*_DELAYED, CurrentScaling(), CurrentScaling("row"))}


def parse_recipe(spec: object) -> Recipe:
    """Reads a recipe from an instance or a string.

    >>> parse_recipe("current / ROW"), parse_recipe("delayed/2")
    (CurrentScaling(granularity='row'), DelayedScaling(amax='max', delay=2))
    """
    if isinstance(spec, Recipe):
        return spec
    text = "/".join(word.strip() for word in spec.lower().split("/")) if isinstance(spec, str) else ""
    recipe = _RECIPES.get(text.replace("delayed/max", "delayed").replace("current/tensor", "current"))
    if recipe is None:
        raise ValueError(f"Unknown recipe {quote(spec)}. {did_you_mean(spec, _RECIPES)} For example: 'current/row'.")
    return recipe


@dataclasses.dataclass(frozen=True)
class Float8(CheckedFormat):
    """Training in float8: e4m3 matmuls in the forward pass, e5m2 times e4m3 in the backward pass.

    Weights stay in the parameter dtype: the operands of each matmul are scaled, saturated and rounded when it runs.
    Matmuls whose sizes are not multiples of 16, or that are too small to gain, stay in the compute dtype;
    `jmp_policy.explain` lists them. Only reverse-mode derivatives of first order are supported.

    Args:
      recipe: source of the scales: a `DelayedScaling`, a `CurrentScaling`, or the string of one.
      amax_history_length: number of steps in the history of a delayed scale.
      margin: scales leave a factor of `2**margin` of headroom below the largest value of the format.
      weight_grad: if True, the weight gradient is computed in float8 too; otherwise in the compute dtype.
      min_size: weights with fewer elements stay in the compute dtype. For small layers the casts cost more time than
        the 8-bit matmul saves. The break-even size depends on the device.
      attention: as for `Int8`; only with `CurrentScaling`.

    Raises:
      TypeError, ValueError: an argument has the wrong type or an unknown value, or `attention` has delayed scaling.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3; NVIDIA Transformer Engine's
    `DelayedScaling` (a history of 1024, max or most recent, a margin); Keras's `QuantizedFloat8DTypePolicy`.

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.Float8(amax_history_length=16)), str(jmp.quant.Float8("current/row", margin=1))
    ('float8/16', 'float8(recipe=current/row,margin=1)')
    """

    kind = "float8"
    slash = "amax_history_length"
    least = {"amax_history_length": 1}  # noqa: RUF012

    recipe: Recipe | str = DelayedScaling()
    amax_history_length: int = 1024
    margin: int = 0
    weight_grad: bool = True
    min_size: int = 2**14
    attention: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", parse_recipe(self.recipe))
        super().__post_init__()
        if self.attention and isinstance(self.recipe, DelayedScaling):
            raise ValueError(
                f"attention keeps no state, which the recipe {str(self.recipe)!r} needs. "
                "For example: Float8(recipe='current', attention=True)."
            )


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

    Sizes may be any number: matmuls pad them with zeros to whole blocks, and `quant.quantize` stores the padding of a
    weight's inputs, as `jmp_policy.explain` says. Embedding tables are not quantized. Convolutions round the
    weight and run in the compute dtype.

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
