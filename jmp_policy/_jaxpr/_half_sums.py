"""Sums and products of many numbers in half precision, whose errors grow with the count."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ._program import Atom, float_dtype
from ._walk import Step, walk

HALF = frozenset((np.dtype(np.float16), np.dtype(jnp.bfloat16)))

REMEDY = (
    "sum in float32: cast first, as jnp.sum does, or wrap the call, "
    "as in jmp.force_full_precision(nn.avg_pool)(x, (2, 2))"
)
"""What mends it. Flax pools in a function, which reads neither the dtype of a layer nor a policy."""


class HalfSum(NamedTuple):
    """A sum or product in half precision.

    Attributes:
      name: the name of the primitive.
      numbers: how many become one.
      dtype: the dtype of the numbers and of the result.
    """

    name: str
    numbers: int
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.name} of {self.numbers} numbers in {self.dtype}"


def find_half_sum(step: Step) -> HalfSum | None:
    """Finds the sum or product of several numbers that a step takes in half precision, if it takes one.

    Maxima lose nothing. The gradient of max pooling adds only where windows overlap.
    """
    count = _COUNTS.get(step.name)
    dtype = next((dtype for dtype in map(float_dtype, step.results) if dtype in HALF), None)
    if count is None or dtype is None or not _is_rounding(step):
        return None
    numbers = count(step)
    return HalfSum(step.name, numbers, dtype) if numbers > 1 else None


def _is_rounding(step: Step) -> bool:
    """Whether a reduction rounds; one with a function of its own may only choose among its numbers."""
    if step.name not in ("reduce", "reduce_window"):
        return True
    inside = walk(step.eqn.params["jaxpr"])
    return any(float_dtype(var) in HALF for one in inside if one.name not in _CHOOSING for var in one.results)


_CHOOSING = ("max", "min", "clamp", "select_n", "abs", "neg", "link", "constant")


def _count_reduced(step: Step) -> int:
    return _size(step.operands[0]) // max(_size(step.results[0]), 1)


def _count_scattered(step: Step) -> int:
    return _size(step.operands[-1])


def _count_along_axis(step: Step) -> int:
    return step.operands[0].aval.shape[step.eqn.params["axis"]]


def _count_in_window(step: Step) -> int:
    """The numbers in a window, without those that dilation puts between them."""
    params, shape = step.eqn.params, step.operands[0].aval.shape
    names = ("window_dimensions", "base_dilation", "window_dilation")
    axes = zip(shape, *(params[name] for name in names), strict=True)
    return math.prod(min(size, _divide_up(window * math.gcd(gap, stride), gap)) for size, window, gap, stride in axes)


def _count_windows(step: Step) -> int:
    """In how many windows a number is."""
    params = step.eqn.params
    pairs = zip(params["window_dimensions"], params["window_strides"], strict=True)
    return math.prod(_divide_up(window, stride) for window, stride in pairs)


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _size(atom: Atom) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


_COUNTS = {
    "reduce_sum": _count_reduced,
    "reduce_prod": _count_reduced,
    "reduce": _count_reduced,
    "reduce_window_sum": _count_in_window,
    "reduce_window": _count_in_window,
    "select_and_scatter_add": _count_windows,
    "scatter-add": _count_scattered,
    "scatter_add": _count_scattered,
    "scatter_mul": _count_scattered,
    "cumsum": _count_along_axis,
    "cumprod": _count_along_axis,
    "cumlogsumexp": _count_along_axis,
}
"""By primitive: counts the numbers that become one."""

HALF_SUMS = frozenset(_COUNTS)
"""The primitives that may take such a sum."""
