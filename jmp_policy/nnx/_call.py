"""A call of a policied module's method."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from .._boundary import cast_arguments, cast_result, matmul_precision
from .._carry import keep_carry_dtypes
from ._bridge import linen_attributes
from ._cache import cache_arguments
from ._carry import carry_given
from ._infer import inferred, inferred_inside
from ._module_spec import ModuleSpec
from ._shadow import call_on_shadow

Adopt = Callable[[nnx.Module, ModuleSpec], None]
"""Gives the policy to the modules that were assigned to a policied one since it got its own."""


def call_method(
    module: nnx.Module, spec: ModuleSpec, method: Any, args: tuple, kwargs: dict[str, Any], adopt: Adopt
) -> Any:
    """Calls a method of the class without a policy as the spec of the module says.

    Args:
      module: the policied module.
      spec: its spec.
      method: the method as it stands in the class, a function or another descriptor.
      args: positional arguments, without the module.
      kwargs: keyword arguments.
      adopt: called with the module first.
    """
    adopt(module, spec)
    carry = carry_given(spec.base, method, args, kwargs)
    casts = spec.boundary and not spec.bridges  # the linen module inside does, and knows the names of its arguments
    if casts:
        policy, args, kwargs = cast_arguments(spec.policy, method.__get__(module), spec.keep, args, kwargs)
    else:
        policy = inferred(spec.policy, args, kwargs)
    takes_inferred = spec.open_dtype and spec.policy.compute_dtype is None
    attributes = {"dtype": policy.compute_dtype} if takes_inferred else {}
    if spec.bridges and policy is not spec.policy and not spec.boundary:
        attributes |= linen_attributes(vars(module), spec, policy.compute_dtype)
    kwargs = cache_arguments(module, method, (vars(module) | attributes).get("dtype"), args, kwargs)

    def call(shadow: Any) -> Any:
        return method.__get__(shadow, spec.runs)(*args, **kwargs)

    params_dtype = policy.compute_dtype if spec.casts_params else None
    with inferred_inside(spec.policy, policy), matmul_precision(policy):
        out = call_on_shadow(module, spec.runs, attributes, params_dtype, call)
    if casts and policy.output_dtype is not None:
        return cast_result(policy, out)
    return keep_carry_dtypes(carry, out)
