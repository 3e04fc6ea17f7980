"""What holds for the operations of a scope."""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from .._dtypes import did_you_mean
from .._float8_format import Float8
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
      precision: the matmul precision of its products, and what it stands instead of; `None` for that of the function.
      path: where it begins, for an operation in it.
    """

    compute_dtype: np.dtype | None = None
    treatment: str | None = None
    output_dtype: np.dtype | None = None
    precision: tuple[str, str | None] | None = None
    path: str = ""

    def with_precision(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation with the precision of the scope, unless its author wrote one."""
        if self.precision is None or "precision" not in eqn.params:
            return eqn
        new, instead_of = map(_traced_precision, self.precision)
        return eqn.replace(params={**eqn.params, "precision": new}) if eqn.params["precision"] == instead_of else eqn


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
    check_for_autocast(policy, where)
    return policy


def scope_of(rule: Policy | str, root: Policy) -> Scope:
    """What a rule means for a scope of a function; where a policy computes in float32, everything inside does."""
    if isinstance(rule, str):
        return Scope(treatment=rule)
    precision = None if rule.precision is None else (rule.precision, root.precision)
    if rule.compute_dtype == np.float32:
        return Scope(None, "full", rule.output_dtype, precision)
    return Scope(rule.compute_dtype, None, rule.output_dtype, precision)


def check_for_autocast(policy: Policy, where: str = "") -> None:
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
    if policy.quantization is not None:
        refused = "multiplies nothing in 8 bits" if isinstance(policy.quantization, Float8) else "quantizes no weights"
        raise ValueError(
            f"autocast {refused}, as the policy {policy.name!r}{where and ' ' + where} says. Give that one to a Flax "
            f"module, with_policy(model, {policy.name!r}), or write "
            f"{policy.replace(quantization=None).name!r}."
        )


@functools.cache
def _traced_precision(name: str | None) -> Any:
    """What the parameter of a product is where the policy has a precision of this name."""
    with jax.default_matmul_precision(name) if name is not None else contextlib.nullcontext():
        return jax.make_jaxpr(lax.dot)(np.ones(1), np.ones(1)).eqns[0].params["precision"]
