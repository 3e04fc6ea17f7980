"""Keras's dtype policy with a quantization mode."""

from typing import Any

from ..._formats import DelayedScaling, Float8, Int8, Quantization, parse_quantization
from ..._messages import quote, shorten
from ..._policy import FROM
from ._dtype_policy import DTypePolicy

FLOAT8 = "float8"
KERAS_FLOAT8 = Float8(DelayedScaling(delay=2))
"""What the bare name is in Keras, where a step applies the scale that the step before stored."""

MODES = ("int8", "int4", "int4/<block size>", FLOAT8)


class QuantizedDTypePolicy(DTypePolicy):
    """A dtype policy that also quantizes the weights of layers, under Keras's name and with Keras's attributes.

    Immutable and hashable, unlike Keras's. `jmp_policy.get_policy`, `with_policy` and `quant.quantize` take it as is.

    Args:
      mode: `"int8"`, `"int4"`, `"float8"`, or another string that names a quantization. A bare `"float8"` is Keras's,
        as `QuantizedFloat8DTypePolicy` has it; a bare `"int4"` is ours, in blocks of 128; `"int4/64"` has a class of
        its own in Keras, `Int4DTypePolicy`.
      source_name: the name of the dtype policy to quantize, as of `DTypePolicy`; `None` for the global policy's.

    Raises:
      TypeError: `source_name` is not a string.
      ValueError: `mode` is not a quantization mode; `source_name` names no policy, or a quantized one; or the
        mode is int8 and the compute dtype float16, which Keras refuses (`jmp_policy.get_policy` does not).

    Source: `keras.dtype_policies.QuantizedDTypePolicy` of Keras 3.

    >>> policy = QuantizedDTypePolicy("int8", "mixed_bfloat16")
    >>> policy, policy.quantization_mode, policy.compute_dtype, policy.variable_dtype
    (<QuantizedDTypePolicy "int8_from_mixed_bfloat16">, 'int8', 'bfloat16', 'float32')
    >>> jmp.get_policy(policy) is jmp.get_policy("int8_from_mixed_bfloat16")
    True
    """

    def __init__(self, mode: str, source_name: str | None = None):
        super().__init__(source_name)
        self._source_name, self._mode = self._name, mode
        self._policy = self._policy.replace(quantization=_format(mode, self.compute_dtype))
        self._name = f"{mode}{FROM}{self._source_name}"

    @property
    def quantization_mode(self) -> str:
        """The mode that the policy was given."""
        return self._mode

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this policy again, for JSON."""
        return {"mode": self._mode, "source_name": self._source_name}


def _format(mode: object, compute_dtype: str | None) -> Quantization:
    if isinstance(mode, str) and mode.strip().lower() == FLOAT8:
        return KERAS_FLOAT8
    try:
        format = parse_quantization(mode) if isinstance(mode, str) else None
    except ValueError as error:
        raise ValueError(f"{explain_mode(mode)} {error}") from None
    if format is None:
        raise ValueError(explain_mode(mode))
    if isinstance(format, Int8) and compute_dtype == "float16":
        raise ValueError(
            f"Quantization mode={quote(mode)} doesn't work well with compute_dtype='float16' in Keras. For example: "
            f"QuantizedDTypePolicy({quote(mode)}, 'mixed_bfloat16')."
        )
    return format


def explain_mode(mode: object, modes: tuple[str, ...] = MODES) -> str:
    """What Keras says of a bad mode."""
    return f"Invalid quantization mode. Expected one of {modes}. Received: mode={shorten(str(mode))}"
