"""What is raised where code reads a quantized weight as if it were an array."""

from typing import Any


class Misread(Exception):
    """A quantized weight was read by code that knows nothing of it.

    Attributes:
      weight: that which was read.
    """

    def __init__(self, weight: Any, amiss: str):
        super().__init__(f"{amiss} {_remedy(weight, 'the weight', 'path/of/its/module')}")
        self.weight = weight
        self._amiss = amiss

    def name_weight(self, module: str, name: str) -> None:
        """Says in the message which weight it was.

        Args:
          module: the path of the module that it belongs to.
          name: its own.
        """
        path = f"{module}/{name}" if module else name
        self.args = (f"{self._amiss} {_remedy(self.weight, repr(path), module)}",)


class MisreadType(Misread, TypeError):
    """A `Misread` by an operation."""


class MisreadAttribute(Misread, AttributeError):
    """A `Misread` by the name of an attribute."""


def _remedy(weight: Any, named: str, module: str) -> str:
    return (
        f"Or leave {named} out by a rule of the map that it is quantized by. "
        f"For example: PolicyMap({{{module!r}: 'mixed_bfloat16'}}, '{weight.format}_from_mixed_bfloat16')."
    )
