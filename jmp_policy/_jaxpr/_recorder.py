"""What is recorded of a program while it runs: which values, what of each, and how records come together."""

import abc
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from .._base import PyTree
from ._module_paths import RECORD
from ._program import name_stack
from ._walk import Step


class Line(NamedTuple):
    """What one row of a record is of.

    Attributes:
      step: the equation, and what is around it.
      result: which of its results was measured.
      turns: the turns of the loops around it, outermost first, without the loops whose turns are one row together.
    """

    step: Step
    result: int
    turns: tuple[int, ...] = ()

    def move_out(self, eqn: JaxprEqn, body: Jaxpr, turn: int | None = None) -> "Line":
        """The same line, seen from the program in which an equation runs the body that it is in.

        Args:
          eqn: the equation.
          body: its body.
          turn: the turn of the loop, if each has rows of its own.
        """
        step = self.step
        scope = "/".join(filter(None, (name_stack(eqn), step.scope)))
        moved = step._replace(scope=scope, around=((eqn, body), *step.around))
        return Line(moved, self.result, self.turns if turn is None else (turn, *self.turns))


Order = Literal["forward", "backward", "devices"]
"""What a leading axis of a record is: the turns of a loop that runs from first to last or from last to first, or
devices, which run together."""


class Recorder(abc.ABC):
    """Says which values of a program are measured, and what of them.

    A record is a tree of arrays, whose first axis has a row for each value. Records form a monoid: `merge` is
    associative, and `empty` changes nothing. Recorders are hashable, and equal ones share the programs that they are
    in.

    >>> import jax.numpy as jnp
    >>> class Maxima(Recorder):  # the largest number of each result of a matmul
    ...     def enter(self, outer, eqn): return None
    ...     def choose(self, eqn, context): return [0] if eqn.primitive.name == "dot_general" else []
    ...     def splits(self, turns): return False
    ...     def measure(self, value): return jnp.max(value)
    ...     def gather(self, measured): return jnp.stack(measured)
    ...     def join(self, records): return jnp.concatenate(records)
    ...     def merge(self, one, other): return jnp.maximum(one, other)
    ...     def fold(self, record, order): return jnp.max(record, axis=0)
    ...     def empty(self, rows): return jnp.full(rows, -jnp.inf)
    >>> Maxima().join([Maxima().gather([Maxima().measure(jnp.ones(2))]), Maxima().empty(1)]).tolist()
    [1.0, -inf]
    """

    @abc.abstractmethod
    def enter(self, outer: Any, eqn: JaxprEqn) -> Hashable:
        """The context of an equation in a body whose equation has the context `outer`."""

    @abc.abstractmethod
    def choose(self, eqn: JaxprEqn, context: Any) -> Sequence[int]:
        """Which results of an equation are measured. Of one that runs programs that are entered, none ever is."""

    @abc.abstractmethod
    def splits(self, turns: int) -> bool:
        """Whether each turn of a loop of so many has rows of its own."""

    @abc.abstractmethod
    def measure(self, value: Any) -> PyTree:
        """What is measured of one value where it is made: a tree of arrays of the same shapes for all values."""

    @abc.abstractmethod
    def gather(self, measured: Sequence[PyTree]) -> PyTree:
        """The record of what was measured of several values, a row for each.

        This is done once for all values of a body, so that what it does is compiled once.
        """

    @abc.abstractmethod
    def join(self, records: Sequence[PyTree]) -> PyTree:
        """The rows of several records, one after the other."""

    @abc.abstractmethod
    def merge(self, one: PyTree, other: PyTree) -> PyTree:
        """What two records of the same values are together, row by row: that of some turns of a `while`, and of the
        next turn."""

    @abc.abstractmethod
    def fold(self, record: PyTree, order: Order) -> PyTree:
        """Merges over a leading axis: the turns of a loop, or devices."""

    @abc.abstractmethod
    def empty(self, rows: int) -> PyTree:
        """The record of values that were never made."""


def is_recorded(eqn: JaxprEqn) -> bool:
    """Whether an equation is part of what a recorder measures, and not of the user's program."""
    return RECORD in name_stack(eqn)
