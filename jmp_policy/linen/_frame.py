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


@dataclasses.dataclass(frozen=True)
class Frame:
    """The inside of an attached module during one outermost call: which policy holds at which path.

    Frames of the same attachment are equal, so that what JAX traced under one is found again under the next. What a
    call has met so far is no part of that.

    Attributes:
      owner: the policied class of the attached module.
      path: where it stands in its model.
      policy: the policy it was given.
      inferred: what stands for a compute dtype that a policy leaves open.
      covering: the keys of the policy map, types, that cover the module whose method is running.
      modules: the types of the modules that were called so far, by path relative to the attached one.
    """

    owner: type[nn.Module]
    path: tuple[str, ...]
    policy: Policy | PolicyMap
    inferred: np.dtype | None
    covering: frozenset[type] = frozenset()
    modules: dict[str, type[nn.Module]] = dataclasses.field(default_factory=dict, compare=False)

    def belongs_to(self, module: nn.Module) -> bool:
        """Whether `module` is the attached module itself."""
        return self.owner is type(module) and self.path == module.path

    def is_part_of(self, call: "Frame") -> bool:
        """Whether this is the frame of an outermost call, or of a module called inside it."""
        return self.modules is call.modules

    def match(self, module: nn.Module) -> Match:
        """The policy of a module inside; its boundary is the frame's own if it is the attached module."""
        path = "/".join(module.path[len(self.path) :])
        self.modules.setdefault(path, type(module))
        if isinstance(self.policy, Policy):
            found = Match(self.policy, None, boundary=False)
        else:
            found = self.policy.match(path, self.modules | {path: type(module)})
        policy = found.policy
        if policy.compute_dtype is None:
            policy = policy.replace(compute_dtype=self.inferred)
        return Match(policy, found.rule, found.boundary and path != "")

    def inside(self, module: nn.Module) -> "Frame":
        """The frame that holds while a method of `module` runs.

        It differs from this one where a key of the map is the module's type: the modules inside compute by that key
        then, and the program of a jitted one (`nn.jit`) must not be taken for that of its like elsewhere.
        """
        if isinstance(self.policy, Policy):
            return self
        keys = {rule.key for rule in self.policy.rules if isinstance(rule.key, type) and isinstance(module, rule.key)}
        return self if keys <= self.covering else dataclasses.replace(self, covering=self.covering | keys)

    def warnings(self, module: nn.Module) -> list[str]:
        """What to say, when the call of the attached module is over, of rules that decided for no module."""
        if isinstance(self.policy, Policy):
            return []
        known = _met(self, jax.tree.structure(module.variables.get("params")))
        known.update(self.modules)
        return self.policy.explain_unused(known)


@functools.cache
def _met(frame: Frame, params: Any) -> dict[str, type[nn.Module]]:
    """All modules met under equal frames, in models of one structure: those inside a jitted one are met only once."""
    return {}
