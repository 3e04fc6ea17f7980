"""Keras's quantized dtype policies."""

import dataclasses
from typing import Any

from ..._base import quote, shorten
from ...policy import FROM, DelayedScaling, Float8, Int8, Quantization, parse_quantization
from ._dtype_policy import DTypePolicy

FLOAT8 = "float8"
INT4 = "int4"
_PER_CHANNEL = ("none", "-1")
KERAS_FLOAT8 = Float8(DelayedScaling(delay=2))  # in Keras, a step applies the scale that the previous step stored

MODES = ("int8", "int4", "int4/<block size>", FLOAT8, "gptq/<bits>/<block size>", "awq/4/<block size>")


class QuantizedDTypePolicy(DTypePolicy):
    """A dtype policy that also quantizes the weights of layers, under Keras's name and with Keras's attributes.

    Immutable and hashable. `jmp_policy.get_policy`, `with_policy` and `quant.quantize` accept it.

    Args:
      mode: `"int8"`, `"int4"` (in blocks of 128), `"float8"` (as in `QuantizedFloat8DTypePolicy`), or another string
        that names a quantization.
      source_name: the name of the dtype policy to quantize, as of `DTypePolicy`; `None` for the global policy's.

    Raises:
      TypeError: `source_name` is not a string.
      ValueError: `mode` is not a quantization mode; `source_name` names no policy, or a quantized one; or the
        mode is int8 and the compute dtype float16, which Keras refuses (`jmp_policy.get_policy` does not).

    >>> import jmp_policy as jmp
    >>> from jmp_policy.compat import keras
    >>> policy = keras.QuantizedDTypePolicy("int8", "mixed_bfloat16")
    >>> policy, policy.quantization_mode, policy.compute_dtype, policy.variable_dtype
    (<QuantizedDTypePolicy "int8_from_mixed_bfloat16">, 'int8', 'bfloat16', 'float32')
    >>> jmp.get_policy(policy) is jmp.get_policy("int8_from_mixed_bfloat16")
    True
    """

    def __init__(self, mode: str, source_name: str | None = None):
        super().__init__(source_name)
        self._source_name, self._mode = self._name, mode
        self._policy = self._policy.replace(quantization=_parse_mode(mode, self.compute_dtype))
        self._name = f"{mode}{FROM}{self._source_name}"

    @property
    def quantization_mode(self) -> str:
        """The mode."""
        return self._mode

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this policy, for JSON."""
        return {"mode": self._mode, "source_name": self._source_name}


def _parse_mode(mode: object, compute_dtype: str | None) -> Quantization:
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
    """Returns Keras's message for a bad mode."""
    return f"Invalid quantization mode. Expected one of {modes}. Received: mode={shorten(str(mode))}"


class QuantizedFloat8DTypePolicy(QuantizedDTypePolicy):
    """A dtype policy that computes the matmuls of layers in float8, under Keras's name and with Keras's attributes.

    It stands for `quant.Float8(DelayedScaling(delay=2), amax_history_length)`: as in Keras, a step applies the scale
    that the previous step stored. Unlike in Keras, layers with fewer than 16384 weights stay in the compute dtype.

    Args:
      mode: `"float8"`.
      source_name: the name of the dtype policy to quantize, as of `DTypePolicy`; `None` for the global policy's.
      amax_history_length: the number of steps that a scale looks back.

    Raises:
      TypeError: `source_name` is not a string, or `amax_history_length` is not an int (or is a bool).
      ValueError: `mode` is another one; `source_name` names no policy, or a quantized one; or
        `amax_history_length` is not positive.

    >>> import jmp_policy as jmp
    >>> from jmp_policy.compat import keras
    >>> policy = keras.QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16", amax_history_length=16)
    >>> policy, policy.amax_history_length
    (<QuantizedFloat8DTypePolicy "float8_from_mixed_bfloat16">, 16)
    >>> jmp.get_policy(policy).name
    'float8/16(recipe=delayed/2)_from_mixed_bfloat16'
    """

    default_amax_history_length = 1024

    def __init__(
        self, mode: str, source_name: str | None = None, amax_history_length: int = default_amax_history_length
    ):
        if mode != FLOAT8:
            raise ValueError(explain_mode(mode, (FLOAT8,)))
        super().__init__(mode, source_name)
        self._amax_history_length = amax_history_length
        format = dataclasses.replace(KERAS_FLOAT8, amax_history_length=amax_history_length)
        self._policy = self._policy.replace(quantization=format)

    @property
    def amax_history_length(self) -> int:
        """Number of steps in the history."""
        return self._amax_history_length

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this policy, for JSON."""
        return super().get_config() | {"amax_history_length": self.amax_history_length}


class Int4DTypePolicy(QuantizedDTypePolicy):
    """A dtype policy that stores the weights of layers in 4 bits, under Keras's name and with Keras's attributes.

    Blocks are as in `quant.Int4`, whose docstring says which layers and tables keep more bits, unlike in Keras.

    Args:
      mode: `"int4/64"`, with the number of weights that share a scale, or `"int4/-1"` for one block per output channel
        (`"int4/None"` in older files of Keras).
      source_name: the name of the dtype policy to quantize, as of `DTypePolicy`; `None` for the global policy's.

    Raises:
      TypeError: `source_name` is not a string.
      ValueError: `mode` is none of these, or `source_name` the name of no policy or of a quantized one.

    >>> import jmp_policy as jmp
    >>> from jmp_policy.compat import keras
    >>> policy = keras.Int4DTypePolicy("int4/-1", "mixed_bfloat16")
    >>> policy, policy.quantization_mode, policy.block_size
    (<Int4DTypePolicy "int4/-1_from_mixed_bfloat16">, 'int4', -1)
    >>> jmp.get_policy(policy) is jmp.get_policy("int4/-1_from_mixed_bfloat16")
    True
    """

    def __init__(self, mode: str, source_name: str | None = None):
        size = read_block_size(mode)
        if size is None:
            raise ValueError(f"Invalid mode for Int4DTypePolicy: {quote(mode)}. For example: 'int4/128', or 'int4/-1'.")
        super().__init__(f"{INT4}/{size}", source_name)
        self._block_size = size

    @property
    def block_size(self) -> int:
        """Number of weights that share a scale; -1 for all of an output channel."""
        return self._block_size

    @property
    def mode(self) -> str:
        """`"int4"`, without the block size."""
        return INT4

    @property
    def quantization_mode(self) -> str:
        """Same as `mode`."""
        return INT4


class _CalibratedDTypePolicy(QuantizedDTypePolicy):
    """A dtype policy that stores weights as a calibrating method of Keras does."""

    _method: str
    _bits: tuple[int, ...]

    def __init__(self, mode: str, source_name: str | None = None):
        method, *numbers = mode.strip().lower().split("/") if isinstance(mode, str) else [""]
        try:
            bits, size = map(int, numbers)
        except ValueError:
            bits, size = 0, 0
        if method.strip() != self._method or bits not in self._bits or size < -1 or size == 0:
            raise ValueError(
                f"Invalid mode for {type(self).__name__}: {quote(mode)}. Bits are among {self._bits}. For example: "
                f"'{self._method}/4/128', or '{self._method}/4/-1'."
            )
        super().__init__(f"{self._method}/{bits}/{size}", source_name)
        self._weight_bits, self._group_size = bits, size

    @property
    def weight_bits(self) -> int:
        """Bits of a weight."""
        return self._weight_bits

    @property
    def group_size(self) -> int:
        """Number of weights that share a scale; -1 for all of an output channel."""
        return self._group_size

    @property
    def mode(self) -> str:
        """The method, without its numbers."""
        return self._method

    @property
    def quantization_mode(self) -> str:
        """Same as `mode`."""
        return self._method


class GPTQDTypePolicy(_CalibratedDTypePolicy):
    """A dtype policy for weights that `contrib.gptq` makes, under Keras's name and with Keras's attributes.

    It stores what `Int4DTypePolicy` stores; with 8 bits, what `"int8(activations=false)"` stores.

    Args:
      mode: `"gptq/4/128"`, with how many weights share a scale, or `"gptq/4/-1"` or `"gptq/8/-1"` for one scale per
        output channel.
      source_name: the name of the dtype policy to quantize, as of `DTypePolicy`; `None` for the global policy's.

    Raises:
      TypeError: `source_name` is not a string.
      ValueError: `mode` is none of these, or `source_name` the name of no policy or of a quantized one.

    Source: `keras.dtype_policies.GPTQDTypePolicy` of Keras 3.

    >>> import jmp_policy as jmp
    >>> from jmp_policy.compat import keras
    >>> policy = keras.GPTQDTypePolicy("gptq/4/128", "mixed_bfloat16")
    >>> policy, policy.quantization_mode, policy.weight_bits, policy.group_size
    (<GPTQDTypePolicy "gptq/4/128_from_mixed_bfloat16">, 'gptq', 4, 128)
    >>> jmp.get_policy(policy) is jmp.get_policy("int4/128_from_mixed_bfloat16")
    True
    """

    _method = "gptq"
    _bits = (4, 8)


class AWQDTypePolicy(_CalibratedDTypePolicy):
    """A dtype policy for weights that `contrib.awq` makes, under Keras's name and with Keras's attributes.

    Arguments, attributes and errors are as for `GPTQDTypePolicy`, with 4 bits alone.

    Source: `keras.dtype_policies.AWQDTypePolicy` of Keras 3.

    >>> import jmp_policy as jmp
    >>> from jmp_policy.compat import keras
    >>> jmp.get_policy(keras.AWQDTypePolicy("awq/4/64", "mixed_bfloat16")).name
    'int4/64_from_mixed_bfloat16'
    """

    _method = "awq"
    _bits = (4,)


def read_block_size(mode: object) -> int | None:
    """Returns the block size in the mode of an `Int4DTypePolicy`, or None for another mode."""
    kind, _, size = mode.partition("/") if isinstance(mode, str) else ("", "", "")
    size = size.strip().lower()
    if kind.strip().lower() != INT4:
        return None
    if size in _PER_CHANNEL:
        return -1
    return int(size) if size.isascii() and size.isdigit() and int(size) > 0 else None
