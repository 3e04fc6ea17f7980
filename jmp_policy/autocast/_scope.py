"""What holds for the operations of a scope."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._dtypes import did_you_mean
from .._get_policy import PolicySpec, get_policy
from .._policy import Policy

COMPUTE_DTYPES = frozenset(map(np.dtype, ("float32", "float16", jnp.bfloat16)))
"""What autocast casts from and to; values of other dtypes stay as they were traced."""

TREATMENTS = ("full", "narrow", "infer", "low")
"""How the operations of a function or scope may be treated together."""


class Scope(NamedTuple):
    """What holds for the operations of a scope.

    Attributes:
      compute_dtype: the dtype of its low operations; `None` for that of the function.
      treatment: how its operations are treated together; `None` for each by itself.
      output_dtype: what its results are cast to where they are used outside; `None` leaves them.
      path: where it begins, for an operation in it.
    """

    compute_dtype: np.dtype | None = None
    treatment: str | None = None
    output_dtype: np.dtype | None = None
    path: str = ""


def canonical(spec: PolicySpec, where: str) -> Policy | str:
    """Reads what is to hold for a scope: one of `TREATMENTS`, or anything that `get_policy` reads but for a map.

    Raises:
      ValueError: it is neither, or autocast cannot compute in its compute dtype.
    """
    if isinstance(spec, str) and spec in TREATMENTS:
        return spec
    try:
        policy = get_policy(spec)
    except ValueError as error:
        raise ValueError(f"{error} It stands {where}, as may {', '.join(map(repr, TREATMENTS))}.") from None
    if not isinstance(policy, Policy):
        raise ValueError(f"{policy!r} {where} is no policy of one scope. For example: 'float32'.")
    check_compute_dtype(policy, where)
    return policy


def scope_of(rule: Policy | str) -> Scope:
    """What a rule means for a scope; where a policy computes in float32, everything inside does."""
    if isinstance(rule, str):
        return Scope(treatment=rule)
    if rule.compute_dtype == np.float32:
        return Scope(treatment="full", output_dtype=rule.output_dtype)
    return Scope(rule.compute_dtype, None, rule.output_dtype)


def check_compute_dtype(policy: Policy, where: str = "") -> None:
    """Checks that a policy is one for autocast.

    Raises:
      ValueError: it is not.
    """
    dtype: Any = policy.compute_dtype
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        names = sorted(str(known) for known in COMPUTE_DTYPES)
        raise ValueError(
            f"autocast cannot compute in {str(dtype)!r}, the compute dtype of the policy {policy.name!r}"
            f"{where and ' ' + where}. {did_you_mean(dtype, names)} For example: 'mixed_bfloat16'."
        )
