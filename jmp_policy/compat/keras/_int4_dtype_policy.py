"""Keras's dtype policy for weights in 4 bits, with the size of their blocks."""

from typing import Any

from ..._messages import quote
from ._quantized_dtype_policy import QuantizedDTypePolicy

INT4 = "int4"
_PER_CHANNEL = ("none", "-1")


class Int4DTypePolicy(QuantizedDTypePolicy):
    """A dtype policy that stores the weights of layers in 4 bits, under Keras's name and with Keras's attributes.

    Blocks are as in `quant.Int4`: each has a scale and a zero point, also where there is one per output channel,
    which is symmetric in Keras. Its docstring says which layers and tables are left in more bits, unlike in Keras.

    Args:
      mode: `"int4/64"`, with how many weights share a scale, or `"int4/-1"` for one block per output channel;
        `"int4/None"`, as older files of Keras have it, is the same.
      source_name: the name of the dtype policy to quantize, as of `DTypePolicy`; `None` for the global policy's.

    Raises:
      TypeError: `source_name` is not a string.
      ValueError: `mode` is none of these, or `source_name` the name of no policy or of a quantized one.

    Source: `keras.dtype_policies.Int4DTypePolicy` of Keras 3.

    >>> policy = Int4DTypePolicy("int4/-1", "mixed_bfloat16")
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
        """How many weights share a scale; -1 for all of an output channel."""
        return self._block_size

    @property
    def mode(self) -> str:
        """`"int4"`, without the size of the blocks."""
        return INT4

    @property
    def quantization_mode(self) -> str:
        """As `mode`."""
        return INT4


def read_block_size(mode: Any) -> int | None:
    """The block size in the mode of an `Int4DTypePolicy`; `None` for any other mode.

    >>> [read_block_size(mode) for mode in ("int4/64", "int4/None", "int4", "int4/64(min_size=0)", "int4/0")]
    [64, -1, None, None, None]
    """
    kind, _, size = mode.partition("/") if isinstance(mode, str) else ("", "", "")
    size = size.strip().lower()
    if kind.strip().lower() != INT4:
        return None
    if size in _PER_CHANNEL:
        return -1
    return int(size) if size.isascii() and size.isdigit() and int(size) > 0 else None
