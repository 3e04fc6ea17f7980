"""Keras's dtype policy for training in float8."""

import dataclasses
from typing import Any

from ..._messages import quote
from ._quantized_dtype_policy import FLOAT8, KERAS_FLOAT8, QuantizedDTypePolicy, explain_mode


class QuantizedFloat8DTypePolicy(QuantizedDTypePolicy):
    """A dtype policy that computes the products of layers in float8, under Keras's name and with Keras's attributes.

    It stands for `quant.Float8(DelayedScaling(delay=2), amax_history_length)`: as in Keras, a step applies the scale
    that the step before stored. `jmp_policy.get_policy("float8_from_mixed_bfloat16")` acts a step sooner. Unlike
    in Keras, layers that gain nothing stay in the compute dtype, such as layers with fewer than 16384 weights.

    Args:
      mode: `"float8"`.
      source_name: the name of the dtype policy to quantize, as of `DTypePolicy`; `None` for the global policy's.
      amax_history_length: over how many steps a scale looks back.

    Raises:
      TypeError: `source_name` is not a string, or `amax_history_length` is not an int (or is a bool).
      ValueError: `mode` is another one; `source_name` names no policy, or a quantized one; or
        `amax_history_length` is not positive.

    Source: `keras.dtype_policies.QuantizedFloat8DTypePolicy` of Keras 3.

    >>> policy = QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16", amax_history_length=16)
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
        self._amax_history_length = _check_length(amax_history_length)
        format = dataclasses.replace(KERAS_FLOAT8, amax_history_length=amax_history_length)
        self._policy = self._policy.replace(quantization=format)

    @property
    def amax_history_length(self) -> int:
        """Over how many steps a scale looks back."""
        return self._amax_history_length

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this policy again, for JSON."""
        return super().get_config() | {"amax_history_length": self.amax_history_length}


def _check_length(amax_history_length: object) -> int:
    received = f"Received: amax_history_length={quote(amax_history_length)}. For example: 1024."
    if isinstance(amax_history_length, bool) or not isinstance(amax_history_length, int):
        raise TypeError(f"`amax_history_length` must be an integer. {received}")
    if amax_history_length < 1:
        raise ValueError(f"`amax_history_length` must be positive. {received}")
    return amax_history_length
