"""What holds inside an attached module while one of its methods runs."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from .._policy import Policy
from .._policy_map import Match, PolicyMap

# The frame in charge. Part of the key of every jit cache: the program of a jitted submodule (`nn.jit`) depends on it.
CURRENT = jax.make_user_context(None)


@dataclasses.dataclass(eq=False)
class Frame:
    """The inside of an attached module: which policy holds at which path.

    There is one frame for a class, a place and a dtype, because every distinct value of `CURRENT` makes JAX trace
    anew.

    Attributes:
      owner: the policied class of the attached module.
      path: where it stands in its model.
      policy: the policy it was given.
      inferred: what stands for a compute dtype that a policy leaves open.
      modules: the types of the modules that were called in it so far, by path relative to it.
    """

    owner: type[nn.Module]
    path: tuple[str, ...]
    policy: Policy | PolicyMap
    inferred: np.dtype | None
    modules: dict[str, type[nn.Module]] = dataclasses.field(default_factory=dict)
    _matches: dict[tuple[str, type], Match] = dataclasses.field(default_factory=dict)

    def belongs_to(self, module: nn.Module) -> bool:
        """Whether `module` is the attached module itself."""
        return self.owner is type(module) and self.path == module.path

    def match(self, module: nn.Module) -> Match:
        """The policy of a module inside; its boundary is the frame's own if it is the attached module."""
        key = ("/".join(module.path[len(self.path) :]), type(module))
        if key not in self._matches:
            self._matches[key] = self._find(*key)
        return self._matches[key]

    def warnings(self) -> list[str]:
        """What to say of rules that decided for no module."""
        return self.policy.explain_unused(self.modules) if isinstance(self.policy, PolicyMap) else []

    def _find(self, path: str, kind: type[nn.Module]) -> Match:
        types = self.modules | {path: kind}
        self.modules.setdefault(path, kind)
        if isinstance(self.policy, Policy):
            found = Match(self.policy, None, boundary=False)
        else:
            found = self.policy.match(path, types)
        policy = found.policy
        if policy.compute_dtype is None:
            policy = policy.replace(compute_dtype=self.inferred)
        return Match(policy, found.rule, found.boundary and path != "")


@functools.cache
def frame_of(owner: Any, path: tuple[str, ...], policy: Policy | PolicyMap, inferred: np.dtype | None) -> Frame:
    """The one frame of these values."""
    return Frame(owner, path, policy, inferred)
