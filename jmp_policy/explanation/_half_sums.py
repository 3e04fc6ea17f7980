"""What adds or multiplies many numbers to one in half precision."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..interpreter import Step, float_dtype, walk

HALF = frozenset((np.dtype(np.float16), np.dtype(jnp.bfloat16)))

REMEDY = (
    "sum in float32: cast first, as jnp.sum does, or wrap the call, "
    "as in jmp.force_full_precision(nn.avg_pool)(x, (2, 2))"
)
"""What mends it. Pooling is a function of Flax's, which reads no dtype of a layer and no policy."""


class HalfSum(NamedTuple):
    """A sum or product in half precision.

    Attributes:
      name: that of the primitive.
      numbers: how many become one.
      dtype: theirs, and that of the result.
    """

    name: str
    numbers: int
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.name} of {self.numbers} numbers in {self.dtype}"


def half_sum(step: Step) -> HalfSum | None:
    """The sum or product that a step takes in half precision, if it takes one of more than one number.

    Maxima lose nothing. The gradient of max pooling adds only where windows overlap.
    """
    count = _COUNTS.get(step.name)
    dtype = next((dtype for dtype in map(float_dtype, step.results) if dtype in HALF), None)
    if count is None or dtype is None or not _rounds(step):
        return None
    numbers = count(step)
    return HalfSum(step.name, numbers, dtype) if numbers > 1 else None


def _rounds(step: Step) -> bool:
    """Whether the function that a reduction was given rounds, and does not only choose; others have none, and do."""
    if step.name not in ("reduce", "reduce_window"):
        return True
    inside = walk(step.eqn.params["jaxpr"])
    return any(float_dtype(var) in HALF for one in inside if one.name not in _CHOOSING for var in one.results)


_CHOOSING = ("max", "min", "clamp", "select_n", "abs", "neg", "link", "constant")


def _reduced(step: Step) -> int:
    return _size(step.operands[0]) // max(_size(step.results[0]), 1)


def _scattered(step: Step) -> int:
    return _size(step.operands[-1])


def _along_axis(step: Step) -> int:
    return step.operands[0].aval.shape[step.eqn.params["axis"]]


def _in_a_window(step: Step) -> int:
    """The numbers in a window, without those that dilation puts between them."""
    params, shape = step.eqn.params, step.operands[0].aval.shape
    names = ("window_dimensions", "base_dilation", "window_dilation")
    axes = zip(shape, *(params[name] for name in names), strict=True)
    return math.prod(min(size, _ceil(window * math.gcd(gap, stride), gap)) for size, window, gap, stride in axes)


def _over_windows(step: Step) -> int:
    """In how many windows a number is."""
    params = step.eqn.params
    pairs = zip(params["window_dimensions"], params["window_strides"], strict=True)
    return math.prod(_ceil(window, stride) for window, stride in pairs)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)


_COUNTS = {
    "reduce_sum": _reduced,
    "reduce_prod": _reduced,
    "reduce": _reduced,
    "reduce_window_sum": _in_a_window,
    "reduce_window": _in_a_window,
    "select_and_scatter_add": _over_windows,
    "scatter-add": _scattered,
    "scatter_add": _scattered,
    "scatter_mul": _scattered,
    "cumsum": _along_axis,
    "cumprod": _along_axis,
    "cumlogsumexp": _along_axis,
}
"""By primitive: how many numbers become one."""

HALF_SUMS = frozenset(_COUNTS)
"""The primitives that may take such a sum."""
