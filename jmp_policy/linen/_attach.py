"""`with_policy`, `policy_of` and `explain` for linen modules."""

import copy
from collections.abc import Collection
from typing import Any

from .._policy import Policy
from .._policy_map import PolicyMap
from ._classes import policied_class, unpolicied_class
from ._explain import explain as explain
from ._interceptor import POLICY


def attach(target: Any, policy: Policy | PolicyMap, keep: Collection[str]) -> Any:
    """A linen class or instance with a policy, instead of the one it may have had.

    Args:
      target: a linen module class, or a module, bound or not.
      policy: the policy to give it.
      keep: names of arguments of its public methods that enter uncast.
    """
    keep = frozenset(keep)
    if isinstance(target, type):
        return policied_class(unpolicied_class(target), policy, keep)
    module = copy.copy(target)
    object.__setattr__(module, "__class__", policied_class(unpolicied_class(type(target)), policy, keep))
    return module


def policy_of(target: Any) -> Policy | PolicyMap | None:
    """The policy of a linen class or instance."""
    return getattr(target, POLICY, None)
