"""The first carry of a recurrent cell, and the one that a step is handed."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import linen as nn

from .._policy import Policy
from .._trees import cast_floating


def carry_given(module: nn.Module, method_name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The carry that a call hands to a recurrent cell; `None` if the call is no step of one."""
    if not isinstance(module, nn.RNNCellBase) or method_name != "__call__":
        return None
    return args[0] if args else kwargs.get("carry")


def first_carry_dtype(policy: Policy) -> np.dtype | None:
    """The dtype in which a cell makes its first carry: the param dtype, as by hand, unless it computes in a wider one.

    A carry narrower than what the cell computes would be rounded at each step.
    """
    if policy.param_dtype is None or policy.compute_dtype is None:
        return policy.param_dtype
    return max(policy.param_dtype, policy.compute_dtype, key=lambda dtype: dtype.itemsize)


def as_returned(initialize_carry: Callable[..., Any], policy_of_cell: Callable[[Any], Policy]) -> Callable[..., Any]:
    """The `initialize_carry` of a cell that has a policy itself, which returns its carry in output dtype.

    A first carry in param dtype would make a scan refuse the cell.

    Args:
      initialize_carry: the author's.
      policy_of_cell: tells the policy of a cell.
    """

    @functools.wraps(initialize_carry)
    def policied(self: nn.RNNCellBase, *args: Any, **kwargs: Any) -> Any:
        policy = policy_of_cell(self)
        dtype = policy.compute_dtype if policy.output_dtype is None else policy.output_dtype
        return cast_floating(initialize_carry(self, *args, **kwargs), dtype)

    return policied
