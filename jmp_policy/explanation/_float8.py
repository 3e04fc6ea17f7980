"""What the operations of a traced model say of its float8 layers."""

from collections.abc import Collection

from .._float8_format import ODD_ROWS, Float8
from ._module import ModuleInfo


def what_was_multiplied(module: ModuleInfo, computed: Collection[str], made: Collection[str]) -> str:
    """What became of the weight of a module, as `Row.quantization` says it.

    Whether a layer whose weight is fit for 8 bits multiplied in them is to be seen in its operations only: it depends
    on its inputs, and on the code of an author's subclass.

    Args:
      module: what holds at it.
      computed: the dtypes that its operations read, conversions excepted.
      made: the dtypes that they made, conversions among them.
    """
    format = None if module.policy is None else module.policy.quantization
    is_open = isinstance(format, Float8) and module.quantization == str(format) and made
    if not is_open or _has_float8(computed):
        return module.quantization
    if _has_float8(made):
        return f"{format}, computed with as numbers: it is a convolution"
    return f"left: {ODD_ROWS}" if module.is_layer else f"left: {ODD_ROWS}, or its code is no layer of Flax's"


def _has_float8(dtypes: Collection[str]) -> bool:
    return any(dtype.startswith("float8") for dtype in dtypes)
