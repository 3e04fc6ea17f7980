"""What autocast knows of a value beside its dtype."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from ..interpreter import Kind
from ._constants import Numbers
from ._scope import Scope


class Colour(enum.IntEnum):
    """Why a value has its dtype; the greater wins where two meet.

    The idea is that of TensorFlow grappler's auto_mixed_precision: what must keep an operation in float32 is a value
    that a float32-only operation made, not one that is merely float32, such as a bias.
    """

    TRACED = 0  # it came so: an argument, a parameter, a constant
    LOW = 1  # a low operation made it, or one that followed
    FULL = 2  # a full operation made it, or one that followed


class Mark(NamedTuple):
    """What autocast knows of a value beside its dtype.

    Attributes:
      colour: its colour.
      narrow: whether it is a result of a `narrow` function, to be cast where the next operation uses it.
      backward: whether a backward pass made it: a gradient, once something else uses it.
      numbers: those that it consists of, if they are known.
      scope: that of the rule that it was made under, which says what it leaves as.
    """

    colour: Colour
    narrow: bool = False
    backward: bool = False
    numbers: Numbers = ()
    scope: Scope | None = None


def joined(kinds: Sequence[Kind]) -> Mark:
    """The mark of what is made of several values."""
    marks = [kind.mark for kind in kinds]
    colour = max((mark.colour for mark in marks), default=Colour.TRACED)
    return Mark(colour, any(mark.narrow for mark in marks), any(mark.backward for mark in marks))
