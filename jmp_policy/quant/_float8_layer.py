"""What takes the place of the function that a Flax layer multiplies with, to do so in 8-bit floating point."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from .._float8_format import DelayedScaling, Float8
from ._amax_history import State
from ._float8_product import float8_product
from ._float8_sizes import why_left_wide, why_weight_wide
from ._layout import Layout, size_of
from ._operations import OPERATIONS

WHY_TABLES_WIDE = "the rows of a table are read, and its logits want all the bits"
"""Why embeddings compute in the compute dtype."""


@dataclasses.dataclass(frozen=True)
class Float8Multiply:
    """The `dot_general`, `conv_general_dilated` or `einsum_op` of a layer, in 8 bits where the weight is fit for it.

    Attributes:
      own: what the layer computes any other product with.
      operation: its name in `OPERATIONS`.
      format: of the policy.
      state: finds the state of the layer, with `DelayedScaling`.
    """

    own: Callable[..., Any]
    operation: str
    format: Float8
    state: Callable[[], State] = dataclasses.field(compare=False)  # like layers share what JAX compiles

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        operation, lhs, rhs = OPERATIONS[self.operation].describe(*operands, **options)
        if why_weight_wide(operation, lhs.shape, rhs.shape, self.format) is not None:
            return self.own(*operands, **options)
        return float8_product(operation, lhs, rhs, self.format, self.state() if has_state(self.format) else None)


def has_state(format: Any) -> bool:
    """Whether layers of a format keep state."""
    return isinstance(format, Float8) and isinstance(format.recipe, DelayedScaling)


def why_layer_wide(
    shape: tuple[int, ...], layout: Layout, format: Float8, *, is_convolution: bool = False, groups: int = 1
) -> str | None:
    """Why a layer computes in the compute dtype, whatever its inputs; `None` if it does not.

    Args:
      shape: of its weight.
      layout: of its weight.
      format: of the policy.
      is_convolution: whether it is one, whose window is no matter.
      groups: the number of groups of features, of a convolution.

    >>> why_layer_wide((3, 3, 3, 64), Layout((3, 3, 3), 1), Float8(min_size=0), is_convolution=True)
    'the length 3 is no multiple of 16'
    """
    if groups != 1:
        return "its convolution is one of groups"
    inputs = layout.contracted[-1] if is_convolution else layout.length
    return why_left_wide(size_of(shape, layout), format, inputs, math.prod(shape[len(shape) - layout.channels :]))
