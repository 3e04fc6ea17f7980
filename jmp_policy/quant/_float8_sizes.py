"""Which products gain from 8-bit floating point."""

import math
from typing import Any

from .._float8_format import MULTIPLE, ODD_ROWS, Float8
from ._bilinear import Bilinear, Convolution


def why_wide(operation: Bilinear, left: tuple[int, ...], right: tuple[int, ...], format: Float8) -> str | None:
    """Why a product of operands of these shapes stays in the compute dtype; `None` if it does not."""
    rows = math.prod(length for label, length in zip(operation.left, left, strict=True) if label not in operation.right)
    is_odd = rows % MULTIPLE and not isinstance(operation.compute, Convolution)
    return why_weight_wide(operation, left, right, format) or (ODD_ROWS if is_odd else None)


def why_weight_wide(operation: Bilinear, left: tuple[int, ...], right: tuple[int, ...], format: Float8) -> str | None:
    """As `why_wide`, whatever the number of rows of the left operand."""
    if isinstance(operation.compute, Convolution):
        return _why_convolution_wide(dict(operation.compute.options), right, format)
    lengths, others = dict(zip(operation.left, left, strict=True)), dict(zip(operation.right, right, strict=True))
    shared = lengths.keys() & others.keys()
    alone = (lengths.keys() ^ others.keys()) - set(operation.out)
    if alone or any(lengths[label] != others[label] for label in shared):
        return "its equation sums one operand alone, or repeats one"
    summed = math.prod(lengths[label] for label in shared - set(operation.out))
    columns = math.prod(length for label, length in others.items() if label not in shared)
    return why_left_wide(summed * columns, format, summed, columns)


def why_left_wide(size: int, format: Float8, *lengths: int) -> str | None:
    """Why products with a weight stay in the compute dtype, by its size and the lengths that matter to hardware.

    >>> why_left_wide(16384, Float8(), 128, 128), why_left_wide(25600, Float8(), 256, 100)
    (None, 'the length 100 is no multiple of 16')
    """
    if size < format.min_size or size == 0:
        return f"{size} elements are fewer than min_size={format.min_size}"
    odd = next((length for length in lengths if length % MULTIPLE), None)
    return None if odd is None else f"the length {odd} is no multiple of {MULTIPLE}"


def _why_convolution_wide(options: dict[str, Any], right: tuple[int, ...], format: Float8) -> str | None:
    if options.get("feature_group_count", 1) != 1 or options.get("batch_group_count", 1) != 1:
        return "its convolution is one of groups"
    outputs, inputs, *_ = (right[axis] for axis in options["dimension_numbers"].rhs_spec)
    return why_left_wide(math.prod(right), format, inputs, outputs)
