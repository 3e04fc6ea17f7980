"""The reduce dtype of a policy, on its way from the boundary that has it to the function that takes gradients.

Only tracing tells which policies a loss function meets, and by then it is too late to take its gradients otherwise. So
the first boundary with a reduce dtype ends the trace, and the gradients are taken once more in that dtype.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from .._base import REDUCING
from ._policy import Policy

T = TypeVar("T")

_UNKNOWN, _GIVEN = "", "given"
"""Values of the context: before a policy with a reduce dtype was met, and where the caller gave one. Otherwise it is
the name of the dtype that was met, or `None` where nobody takes gradients but JAX."""


class _Met(BaseException):
    """Ends a trace. Not an `Exception`, so that no handler of a user's errors catches it."""

    def __init__(self, dtype: np.dtype):
        super().__init__(dtype)
        self.dtype = dtype


def meet_policy(policy: Policy) -> None:
    """Hands the reduce dtype of a policy that takes effect to the function that takes gradients, if there is one."""
    if policy.reduce_dtype is not None:
        _hand_over(policy.reduce_dtype)


def search_reduce_dtype(take_gradients: Callable[[np.dtype | None], T]) -> T:
    """Takes gradients, and once more where a policy has a reduce dtype: in the widest one that is met.

    Args:
      take_gradients: traces the loss function; its argument is the reduce dtype, or `None` while none is known.
    """
    dtype: np.dtype | None = None
    while True:
        try:
            with REDUCING(_UNKNOWN if dtype is None else dtype.name):
                made = take_gradients(dtype)
            break
        except _Met as met:
            dtype = met.dtype
    if dtype is not None:  # these may be gradients inside of a function whose own gradients are taken
        _hand_over(dtype)
    return made


def is_searching() -> bool:
    """True if the gradients of what runs here are taken by this package, and not by JAX alone."""
    return REDUCING.value is not None


def hold_given() -> AbstractContextManager:
    """The context in which gradients are taken in a reduce dtype that the caller gave."""
    return REDUCING(_GIVEN) if REDUCING.value is None else nullcontext()  # gradients around these may be searching


def _hand_over(dtype: np.dtype) -> None:
    known = REDUCING.value
    if known not in (None, _GIVEN) and (known == _UNKNOWN or is_wider(dtype, np.dtype(known))):
        raise _Met(dtype)


def is_wider(dtype: np.dtype, other: np.dtype) -> bool:
    """True if a dtype has more bits than another, or as many and a longer mantissa."""
    return _measure(dtype) > _measure(other)


def _measure(dtype: np.dtype) -> tuple[int, int]:
    info = jnp.finfo(dtype)
    return info.bits, info.nmant
