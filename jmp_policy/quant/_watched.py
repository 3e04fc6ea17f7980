"""A model that is called under the eyes of someone: what its adapter tells of each call of a module in it."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Called:
    """A module whose method is called.

    Attributes:
      path: the module names joined by `/`; the root's is the empty string.
      type: its class, without a policy.
      quantization: what becomes of its weight, in the words of `explain`.
    """

    path: str
    type: type
    quantization: str


Watch = Callable[[Called, Callable[..., Any], tuple, dict[str, Any]], Any]
"""What runs in the place of each method: given the module, the method and its arguments."""
