"""Where a linen module stands in the model that was given a policy."""

import dataclasses
from collections import ChainMap
from typing import Any

import numpy as np

from .._policy_map import Match, PolicyMap

PLACE = "_jmp_place"
"""The attribute of a policied class that holds the place of its modules."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a module that was given a policy: its model's root, or somewhere inside a model of nnx.

    Attributes:
      lineage: the types of the nnx modules around it, by path; the last is the one that wraps it.
      boundary: whether it casts what enters and leaves.
      inferred: what stands for a compute dtype that the policy leaves open; `None` to take it from the inputs.
    """

    lineage: tuple[tuple[str, type], ...] = ()
    boundary: bool = True
    inferred: np.dtype | None = None

    def path(self, names: tuple[str, ...]) -> str:
        """The path, in the whole model, of a module inside the one that stands here."""
        around = self.lineage[-1][0] if self.lineage else ""
        return "/".join((around, *names) if around else names)

    def match(self, rules: PolicyMap, names: tuple[str, ...], types: dict[str, Any]) -> Match:
        """What a map says of a module inside the one that stands here.

        Args:
          rules: the map that the whole model was given.
          names: the names of the modules around it, and its own, without those of nnx.
          types: its type and those of the linen modules around it, by path.
        """
        if not self.lineage:
            return rules.match(self.path(names), types)
        found = rules.match(self.path(names), ChainMap(types, dict(self.lineage)))
        # The wrapper has the path of the module in it, but a type of its own, which a rule may name as well.
        around = rules.match(self.path(()), dict(self.lineage))
        return found if _rank(rules, found) <= _rank(rules, around) else dataclasses.replace(around, boundary=False)


ROOT = Place()
"""The place of a module that was itself given the policy."""


def _rank(rules: PolicyMap, match: Match) -> int:
    return len(rules.rules) if match.rule is None else rules.rules.index(match.rule)
