"""A model that is called under the eyes of someone: what its adapter tells of each call of a module in it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from .._policy import Policy


@dataclasses.dataclass(frozen=True)
class Called:
    """A module whose method is called.

    Attributes:
      path: the module names joined by `/`; the root's is the empty string.
      type: its class, without a policy.
      policy: the policy that holds for it, if any.
    """

    path: str
    type: type
    policy: Policy | None


Watch = Callable[[Called, Callable[..., Any], tuple, dict[str, Any]], Any]
"""What runs in the place of each method: given the module, the method and its arguments."""
