"""The interface of a rewriting rule."""

import abc
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ._program import AbstractValue, Atom, JaxprBuilder, Value, float_dtype

Context = Any
"""A rule's description of the place of an equation; hashable."""


_REWRITTEN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Rule(abc.ABC):
    """Decides how each equation is rewritten. Rules are hashable, and equal rules share rewritten jaxprs."""

    # The rewritten jaxprs by original jaxpr. A rule that refers to objects that must be freed before the jaxprs needs
    # a mapping of its own.
    rewritten: MutableMapping[Any, dict[Any, Any]] = _REWRITTEN

    fusing: frozenset[str] = frozenset()  # the primitives at which `fuse` may begin

    @abc.abstractmethod
    def contexts(self, outer: Context, program: Jaxpr) -> Sequence[Context]:
        """Returns the context of each equation of a jaxpr that is run by an equation with the context `outer`."""

    @abc.abstractmethod
    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        """Writes an equation that has no sub-jaxpr, and returns its outputs."""

    def fuse(
        self, program: Jaxpr, start: int, read: Callable[[Atom], Value], body: JaxprBuilder, contexts: Sequence[Context]
    ) -> tuple[int, list[Value]] | None:
        """Writes the equations from number `start` on as one equation, if the rule has one for them.

        `read` returns the new value of an atom of `program`. Returns the number of equations and the outputs of the
        last one. No later equation may use another output of them.
        """
        return None

    def cast_operands(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        """Returns the operands of an equation with sub-jaxprs, or casts of them."""
        return values

    def argument(self, dtype: np.dtype | None) -> AbstractValue:
        """Returns the kind of an argument or constant in the dtype that it was traced in."""
        return AbstractValue(dtype)

    def of_derivative(self, kind: AbstractValue, dtype: np.dtype | None) -> AbstractValue:
        """Returns the kind of an argument of a custom derivative, traced in `dtype`; in the function it is `kind`."""
        return self.argument(dtype)

    def literal(self, literal: Literal) -> AbstractValue:
        """Returns the kind of a literal."""
        return AbstractValue(float_dtype(literal))

    @abc.abstractmethod
    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        """Returns the kind of a value that may have any of some kinds: of several branches, or around a loop."""

    def carried(self, kind: AbstractValue, dtype: np.dtype | None) -> AbstractValue:
        """Returns the kind in which a loop that was traced with a `dtype` carries an initial value of a kind."""
        return kind

    def stacked(self, eqn: JaxprEqn, kinds: Sequence[AbstractValue], context: Context) -> Sequence[AbstractValue]:
        """Returns the kinds in which a scan stacks its outputs, given those that its sub-jaxpr computes."""
        return kinds

    def rewrites_custom_rule(self, eqn: JaxprEqn, context: Context) -> bool:
        """True if a custom-derivative function and its derivative are both rewritten."""
        return False

    def rewrites_primal_only(self, eqn: JaxprEqn, context: Context) -> bool:
        """True if a custom-derivative function is rewritten, but not its derivative."""
        return False
