"""Linen modules inside nnx ones: what `nnx.bridge.ToNNX` wraps gets the policy from the linen adapter."""

from typing import Any

from flax import nnx

from .._boundary import policy_of, with_policy
from .._policy import Policy
from ._roles import Role


def is_bridge(base: type) -> bool:
    """Whether a module's Params are the variables of a linen module, which reads them itself."""
    return issubclass(base, nnx.bridge.ToNNX)


def has_open_linen_module(base: type, attributes: dict[str, Any], role: Role | None) -> bool:
    """Whether a module wraps a linen one without a policy of its own; one that came from outside does not count."""
    if not is_bridge(base):
        return False
    return policy_of(attributes["to_nnx__module"]) is None or (role is not None and role.bridges)


def linen_attributes(attributes: dict[str, Any], policy: Policy, boundary: bool) -> dict[str, Any]:
    """The attribute that holds the linen module, with a policy; its results are cast only where the policy says so."""
    inner = policy if boundary else policy.with_output_dtype(None)
    return {"to_nnx__module": with_policy(attributes["to_nnx__module"], inner)}
