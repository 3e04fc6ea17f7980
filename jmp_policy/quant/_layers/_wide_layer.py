"""What takes the place of a Flax layer's own functions where products hand over their sums in the accumulate dtype."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base import cast_floating, is_floating_dtype
from ...policy import Policy
from .._operations import OPERATIONS
from .._products import Call, is_block_product, is_integer_product, why_weight_wide, wide_product
from .._weights import QuantizedArray, Unquantized, fake_quantize
from ._layer import Float8Multiply, Multiply, Promote


@dataclasses.dataclass(frozen=True)
class PromoteWide:
    """The `promote_dtype` of a layer: leaves a floating weight as it is stored, and the bias in the accumulate dtype.

    Attributes:
      promote: what it would be otherwise.
      as_tuple: whether that takes one tuple, as in nnx, or each array by itself, as in linen.
      dtype: the accumulate dtype.
      adds_wide: whether the layer returns what the sum with its bias is, which the policy then rounds. The bias is as
        otherwise where an author's code takes what the layer returns.
    """

    promote: Callable[..., Any]
    as_tuple: bool
    dtype: np.dtype
    adds_wide: bool = True

    def __call__(self, *arrays: Any, dtype: Any = None, **options: Any) -> tuple[Any, ...]:
        given = arrays[0] if self.as_tuple else arrays
        if len(given) != 3:  # another method of the layer promotes what is no product's
            return tuple(self.promote(*arrays, dtype=dtype, **options))
        inputs, weight, bias = given
        is_plain = is_floating_dtype(weight.dtype) and not isinstance(weight, QuantizedArray)
        is_kept = is_plain and not isinstance(self.promote, Promote)
        # The dtype of the weight has a say, where the layer's own is open; its numbers stay as they are stored.
        asked = (inputs, jnp.zeros((), weight.dtype), None if self.adds_wide else bias) if is_kept else given
        promoted = self.promote(*((asked,) if self.as_tuple else asked), dtype=dtype, **options)
        if not is_narrower(promoted[0], self.dtype):
            return tuple(self.promote(*arrays, dtype=dtype, **options)) if is_kept else tuple(promoted)
        weight = jnp.asarray(weight) if is_kept else promoted[1]
        return promoted[0], weight, cast_floating(bias, self.dtype) if self.adds_wide else promoted[2]


@dataclasses.dataclass(frozen=True)
class MultiplyWide:
    """The `dot_general`, `conv_general_dilated` or `einsum_op` of a layer, with sums in the accumulate dtype.

    Attributes:
      own: what it would be otherwise: an operation of JAX's, or what a quantized policy puts there.
      operation: its name in `OPERATIONS`.
      dtype: the accumulate dtype.
      adds_wide: as of `PromoteWide`; without it the result is rounded here.
    """

    own: Callable[..., Any]
    operation: str
    dtype: np.dtype
    adds_wide: bool = True

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        call: Call = OPERATIONS[self.operation].describe(*operands, **options)
        if not is_narrower(call.lhs, self.dtype):
            return self.own(*operands, **options)
        if self._is_quantized(call):
            out = self.own(*operands, **options | {"preferred_element_type": self.dtype})
        else:
            out = wide_product(call.operation, call.lhs, _read_numbers(call.rhs), self.dtype, call.lhs.dtype)
        return out if self.adds_wide else out.astype(call.lhs.dtype)

    def _is_quantized(self, call: Call) -> bool:
        """Whether what would be there otherwise computes this product in narrow numbers."""
        if isinstance(call.rhs, QuantizedArray | Unquantized):
            is_block = is_block_product(call.operation, call.lhs, call.rhs)
            return is_block or is_integer_product(call.operation, call.rhs)
        if not isinstance(self.own, Float8Multiply):
            return False
        return why_weight_wide(call.operation, call.lhs.shape, call.rhs.shape, self.own.format) is None


def is_own(function: object) -> bool:
    """Whether a function in the place of a layer's own is a policy's."""
    return isinstance(function, Promote | Multiply | Float8Multiply | PromoteWide | MultiplyWide)


def read_narrow(function: Any) -> Any:
    """What the function of a layer would be without an accumulate dtype."""
    if isinstance(function, PromoteWide):
        return function.promote
    return function.own if isinstance(function, MultiplyWide) else function


def find_accumulate_dtype(policy: Policy) -> np.dtype | None:
    """The accumulate dtype of a policy, as JAX has it: float32 for float64, unless that is enabled.

    >>> find_accumulate_dtype(Policy("float32", "bfloat16", "bfloat16", accumulate_dtype="float64"))
    dtype('float32')
    """
    dtype = policy.accumulate_dtype
    return None if dtype is None else np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _read_numbers(weight: Any) -> jax.Array:
    """A weight as floating numbers, as it is stored for its size alone; nothing differentiates one that is."""
    if isinstance(weight, QuantizedArray):
        return lax.stop_gradient(weight.dequantize())
    return fake_quantize(weight) if isinstance(weight, Unquantized) else weight


def widen_functions(
    promote: Callable[..., Any],
    multiply: Callable[..., Any],
    operation: str,
    dtype: np.dtype | None,
    *,
    as_tuple: bool,
    adds_wide: bool = True,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What takes the place of both functions of a layer; they themselves, where they are wide already or none is asked.

    Args:
      promote: its `promote_dtype`.
      multiply: its `dot_general`, `conv_general_dilated` or `einsum_op`.
      operation: the name of that in `OPERATIONS`.
      dtype: the accumulate dtype, if there is one.
      as_tuple: as of `PromoteWide`.
      adds_wide: as of `PromoteWide`.
    """
    if dtype is None:
        return promote, multiply
    if not isinstance(promote, PromoteWide):  # a clone has the fields of a layer whose method runs
        promote = PromoteWide(promote, as_tuple, dtype, adds_wide)
    if not isinstance(multiply, MultiplyWide):
        multiply = MultiplyWide(multiply, operation, dtype, adds_wide)
    return promote, multiply


def is_narrower(x: jax.Array, dtype: np.dtype) -> bool:
    """Whether products of an operand have sums that another dtype holds more of.

    >>> is_narrower(jnp.ones(1, jnp.bfloat16), np.dtype("float32")), is_narrower(jnp.ones(1), np.dtype("float32"))
    (True, False)
    """
    return is_floating_dtype(x.dtype) and x.dtype.itemsize < dtype.itemsize
