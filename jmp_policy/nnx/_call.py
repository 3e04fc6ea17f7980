"""A call of a policied module's method."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from .._call_casts import cast_arguments, cast_result, matmul_precision
from .._carry import keep_carry_dtypes
from ._bridge import linen_attributes
from ._cache import cache_arguments
from ._carry import carry_given
from ._infer import inferred, inferred_inside
from ._roles import Role
from ._shadow import call_on_shadow

Adopt = Callable[[nnx.Module, Role], None]
"""Gives the policy to the modules that were assigned to a policied one since it got its own."""


def call_method(module: nnx.Module, role: Role, method: Any, args: tuple, kwargs: dict[str, Any], adopt: Adopt) -> Any:
    """Calls a method of the class without a policy as the role of the module says.

    Args:
      module: the policied module.
      role: its role.
      method: the method as it stands in the class, a function or another descriptor.
      args: positional arguments, without the module.
      kwargs: keyword arguments.
      adopt: called with the module first.
    """
    adopt(module, role)
    carry = carry_given(role.base, method, args, kwargs)
    casts = role.boundary and not role.bridges  # the linen module inside does, and knows the names of its arguments
    if casts:
        policy, args, kwargs = cast_arguments(role.policy, method.__get__(module), role.keep, args, kwargs)
    else:
        policy = inferred(role.policy, args, kwargs)
    takes_inferred = role.open_dtype and role.policy.compute_dtype is None
    attributes = {"dtype": policy.compute_dtype} if takes_inferred else {}
    if role.bridges and policy is not role.policy and not role.boundary:
        attributes |= linen_attributes(vars(module), role, policy.compute_dtype)
    kwargs = cache_arguments(module, method, (vars(module) | attributes).get("dtype"), args, kwargs)

    def call(shadow: Any) -> Any:
        return method.__get__(shadow, role.runs)(*args, **kwargs)

    params_dtype = policy.compute_dtype if role.casts_params else None
    with inferred_inside(role.policy, policy), matmul_precision(policy):
        out = call_on_shadow(module, role.runs, attributes, params_dtype, call)
    if casts and policy.output_dtype is not None:
        return cast_result(policy, out)
    return keep_carry_dtypes(carry, out)
