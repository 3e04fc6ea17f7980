"""A compute dtype that only a call's inputs can tell: it holds for the modules inside while the call lasts."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from .._call_casts import resolve_policy
from .._policy import Policy

# The policy of the innermost call that inferred a dtype, and the dtype. A context of JAX's, because a call may not
# write on modules that other threads call at the same time: each thread has its own, and it is in the key of every jit
# cache, so that a jitted function inside the call is traced for each dtype.
_INFERRED = jax.make_user_context(None)


def inferred(policy: Policy, args: tuple, kwargs: dict[str, Any]) -> Policy:
    """A policy with the compute dtype that a call around inferred for it, or else with that of this call's inputs."""
    if policy.compute_dtype is not None:
        return policy
    around = _INFERRED.value
    if around is not None and around[0] == policy:
        return policy.replace(compute_dtype=around[1])
    return resolve_policy(policy, (args, kwargs))


def inferred_inside(policy: Policy, resolved_policy: Policy) -> AbstractContextManager:
    """A context in which the modules inside compute in the dtype that a policy without one was resolved to."""
    if policy.compute_dtype is not None:
        return nullcontext()
    return _INFERRED((policy, resolved_policy.compute_dtype))
