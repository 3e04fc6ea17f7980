"""The dtypes in which a policy moves numbers between devices."""

import jax
import numpy as np
from jax import lax

from .._base import is_floating_dtype
from ..policy import Policy, PolicyMap, PolicySpec, get_policy, is_wider, meet_policy


def read_reduce_dtype(policy: PolicySpec) -> np.dtype | None:
    """The dtype that sums over devices are taken in; `None` for that of the numbers themselves.

    Raises:
      ValueError: a map whose policies have several.
    """
    return _read_one(policy, "reduce_dtype", "reduce")


def read_compute_dtype(policy: PolicySpec) -> np.dtype | None:
    """The dtype that parameters are gathered in; `None` for that of the parameters themselves.

    Raises:
      ValueError: a map whose policies have several.
    """
    return _read_one(policy, "compute_dtype", "compute")


def list_compute_dtypes(policy: PolicySpec) -> set[np.dtype]:
    """The dtypes that modules of a model compute in under a policy or a map."""
    return {one.compute_dtype for one in list_policies(policy) if one.compute_dtype is not None}


def widen_products(spec: PolicySpec) -> None:
    """Has the products that make gradients hand them over in the reduce dtype, where that is wider than theirs."""
    for policy in list_policies(spec):
        compute_dtype, reduce_dtype = policy.compute_dtype, policy.reduce_dtype
        if compute_dtype is None or reduce_dtype is None or is_wider(reduce_dtype, compute_dtype):
            meet_policy(policy)


def cast_leaf(leaf: jax.Array, dtype: np.dtype | None) -> jax.Array:
    """An array in a dtype, if both are real floating ones."""
    if dtype is None or leaf.dtype == dtype or not is_floating_dtype(leaf.dtype):
        return leaf
    return lax.convert_element_type(leaf, dtype)


def _read_one(spec: PolicySpec, field: str, key: str) -> np.dtype | None:
    found = {getattr(policy, field) for policy in list_policies(spec)}
    if len(found) > 1:
        names = " and ".join(sorted("none" if dtype is None else dtype.name for dtype in found))
        raise ValueError(
            f"The policies of this map have several dtypes for {key}: {names}. Numbers are exchanged between devices "
            "for a whole tree, not for a module: hand over one policy, for example: "
            "'params=float32,compute=bfloat16,reduce=float32'."
        )
    return next(iter(found))


def list_policies(spec: PolicySpec) -> list[Policy]:
    """The policies of a map, or the one that a spec is."""
    policy = get_policy(spec)
    if not isinstance(policy, PolicyMap):
        return [policy]
    default = [] if policy.default is None else [policy.default]
    return [*(rule.policy for rule in policy.rules), *default]
