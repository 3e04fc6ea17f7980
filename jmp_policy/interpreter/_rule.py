"""What a rule has to say about a program."""

import abc
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ._body import Body
from ._kind import Atom, Kind, Value

Context = Any
"""What a rule knows of the place of an equation; hashable."""

_REWRITTEN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Rule(abc.ABC):
    """What becomes of each equation. Rules are hashable, and equal ones share the bodies they have rewritten.

    Attributes:
      rewritten: what was rewritten, by program and by all that decides, with the rules by which it was. A rule that
        refers to what is not to live as long as the programs needs one of its own.
    """

    rewritten: MutableMapping[Any, dict[Any, Any]] = _REWRITTEN

    @abc.abstractmethod
    def contexts(self, outer: Context, program: Jaxpr) -> Sequence[Context]:
        """What is known of the place of each equation of a body that was entered with the context `outer`."""

    @abc.abstractmethod
    def equation(self, eqn: JaxprEqn, values: list[Value], body: Body, context: Context) -> list[Value]:
        """Writes what becomes of an equation without a body of its own, and returns its results."""

    def together(
        self, program: Jaxpr, start: int, read: Callable[[Atom], Value], body: Body, contexts: Sequence[Context]
    ) -> tuple[int, list[Value]] | None:
        """Writes several equations as one, if they are something that the rule knows.

        Args:
          program: the program that is rewritten.
          start: the number of the first of the equations.
          read: what stands for a variable or literal of the program, before the first of the equations.
          body: where the one equation goes.
          contexts: those of all equations of the program.

        Returns:
          How many equations they were, and the results of the last: nothing else of theirs may be used later.
        """
        del program, start, read, body, contexts

    def entering(self, eqn: JaxprEqn, values: list[Value], body: Body, context: Context) -> list[Value]:
        """What the bodies of an equation are given: the values that it reads, cast before they enter, it may be."""
        del eqn, body, context
        return values

    @abc.abstractmethod
    def argument(self, dtype: np.dtype | None) -> Kind:
        """The kind of an argument or constant that is as it was traced."""

    @abc.abstractmethod
    def literal(self, literal: Literal) -> Kind:
        """The kind of a literal."""

    @abc.abstractmethod
    def join(self, kinds: Sequence[Kind]) -> Kind:
        """The kind of a value that is now one and now another: of branches, or around a loop."""

    @abc.abstractmethod
    def accumulated(self, kind: Kind) -> Kind:
        """The kind of the carry of a loop that is only added to, where it starts with `kind`."""

    @abc.abstractmethod
    def opens(self, eqn: JaxprEqn, context: Context) -> bool:
        """Whether a function with custom derivatives is rewritten inside, its derivative too."""

    @abc.abstractmethod
    def opens_inside(self, eqn: JaxprEqn, context: Context) -> bool:
        """Whether a function with custom derivatives is rewritten inside, where its derivative stays."""
