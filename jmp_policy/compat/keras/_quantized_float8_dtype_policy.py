"""Where pickles of older versions look for this class."""

from ._quantized_dtype_policy import QuantizedFloat8DTypePolicy as QuantizedFloat8DTypePolicy
