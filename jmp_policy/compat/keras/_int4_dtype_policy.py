"""Where pickles of older versions look for this class."""

from ._quantized_dtype_policy import Int4DTypePolicy as Int4DTypePolicy
