"""`with_policy`, `policy_of` and `explain` for linen modules."""

import copy
import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np
from flax import linen as nn

from .._messages import forget_warnings
from .._policy import Policy
from .._policy_map import PolicyMap
from ._active_policy import find_class_policy
from ._classes import make_policied_class, unpolicied_class
from ._explain import explain as explain
from ._fields import AUTOCAST_EXAMPLE as AUTOCAST_EXAMPLE
from ._named import named as named
from ._place import ROOT, ModulePlace
from ._watch import bound as bound, call_watched as call_watched, weights_of as weights_of

AUDIT_EXAMPLE = "audit(model.apply)(variables, x)"


def attach(target: Any, policy: Policy | PolicyMap, keep: Collection[str]) -> Any:
    """A linen class or instance with a policy, instead of the one it may have had.

    Args:
      target: a linen module class, or a module, bound or not.
      policy: the policy to give it.
      keep: names of arguments of its public methods that enter uncast.
    """
    base = unpolicied_class(target if isinstance(target, type) else type(target))
    cls = make_policied_class(base, policy, frozenset(keep), ROOT)
    forget_warnings(cls)
    forget_warnings(policy)
    return cls if isinstance(target, type) else _with_class(target, cls)


def attach_inside(
    module: nn.Module,
    policy: Policy | PolicyMap,
    keep: Collection[str],
    lineage: tuple[tuple[str, type], ...],
    boundary: bool,
    inferred: np.dtype | None,
) -> Any:
    """A linen module inside a model of nnx with the policy of that model.

    Args:
      module: the module, as `nnx.bridge.ToNNX` wraps it.
      policy: what the model was given; a map's rules name paths in the whole model.
      keep: names of arguments of its public methods that enter uncast.
      lineage: the types of the nnx modules around it, by path, its wrapper last.
      boundary: whether it casts what enters and leaves.
      inferred: what stands for a compute dtype that the policy leaves open, if not that of its own inputs.
    """
    place = ModulePlace(lineage, boundary, inferred)
    return _with_class(module, make_policied_class(unpolicied_class(type(module)), policy, frozenset(keep), place))


def policy_of(target: Any) -> Policy | PolicyMap | None:
    """The policy of a linen class or instance."""
    given = find_class_policy(target)
    return None if given is None else given.policy


def _with_class(target: nn.Module, kind: type[nn.Module]) -> Any:
    module = copy.copy(target)
    object.__setattr__(module, "__class__", kind)
    if target.scope is not None:
        # The copy makes its parameters under the names that the original may have taken, as at a second call of that.
        object.__setattr__(module, "scope", target.scope.rewound())
        object.__setattr__(module, "_state", dataclasses.replace(target._state, children={**target._state.children}))
    return module
