"""What an adapter knows of one module before anything is traced."""

import dataclasses
from typing import Any

import numpy as np

from .._policy import Policy
from .._policy_map import Match

OWN = "its own policy"
INHERITED = "inherited"
DEFAULT = "default"
AUTHOR = "author's dtype"


@dataclasses.dataclass(frozen=True)
class ModuleInfo:
    """What holds at one module.

    Attributes:
      type: the class of the module, without a policy.
      policy: the policy that holds for it, if any.
      rule: where that came from; the empty string without a policy.
      compute_dtype: the dtype that it is meant to compute in: the author's, if one is written, else the policy's.
      is_named: whether a rule, a policy of its own or its author says what holds just here.
      quantization: what becomes of its weight under a quantized policy, as in `Row`.
    """

    type: type
    policy: Policy | None = None
    rule: str = ""
    compute_dtype: np.dtype | None = None
    is_named: bool = False
    quantization: str = ""

    @property
    def is_layer(self) -> bool:
        """Whether it is one of Flax's own, which see to their dtypes themselves."""
        return self.type.__module__.startswith("flax.")


def module_info(kind: type, match: Match, *, attached: bool, by_map: bool, written: Any = None) -> ModuleInfo:
    """What holds at a module with a policy.

    Args:
      kind: its class.
      match: the policy, and the rule it came from.
      attached: whether the policy or map was given to this very module.
      by_map: whether it is a map that was given.
      written: the dtype that its author wrote, if any.
    """
    if written is not None:
        return ModuleInfo(kind, match.policy, AUTHOR, np.dtype(written), is_named=True)
    if by_map:
        key = None if match.rule is None else match.rule.key
        rule = DEFAULT if key is None else key if isinstance(key, str) else key.__qualname__
        named = attached or (match.rule is not None and match.boundary)
    else:
        rule, named = OWN if attached else INHERITED, attached
    return ModuleInfo(kind, match.policy, rule, match.policy.compute_dtype, is_named=named)
