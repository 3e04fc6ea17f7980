"""Where an equation stands: what decides about it beside its values."""

from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from .._full_precision import FULL_PRECISION
from ..interpreter._module_paths import AUTOCAST
from ._functions import Function, Functions
from ._scope import Scope
from ._scopes import Scopes
from ._steep import NONE, logarithmic_results, steep_results


class Place(NamedTuple):
    """Where an equation stands.

    Attributes:
      backward: whether it belongs to a backward pass.
      function: the function of the tables that it belongs to.
      path: of the module or named scope that it belongs to; only where a rule may depend on it, because a program that
        is used at two paths is rewritten for both.
      scope: what the rules say for that path.
      steep: which of its results reach an operation that is steep where others saturate.
      logarithmic: which of these reach a logarithm, through sums or without.
    """

    backward: bool = False
    function: Function | None = None
    path: str = ""
    scope: Scope | None = None
    steep: frozenset[int] = NONE
    logarithmic: frozenset[int] = NONE

    @property
    def treatment(self) -> str | None:
        """How the operations that stand here are treated together: a user's rule is above the tables."""
        if self.function not in _DECIDED and self.scope is not None and self.scope.treatment is not None:
            return self.scope.treatment
        return None if self.function is None else self.function.treatment

    def is_inside(self, scope: Scope) -> bool:
        """Whether a scope is this place's own, or around it."""
        return f"{self.path}/".startswith(f"{scope.path}/") or not scope.path


class Places:
    """Finds the place of each equation.

    Args:
      functions: those that are treated as one operation.
      scopes: the rules by scope, if there are any.
    """

    def __init__(self, functions: Functions, scopes: Scopes | None):
        self._functions = functions
        self._scopes = scopes

    def of(self, outer: Place, program: Jaxpr) -> list[Place]:
        """The places of the equations in a body that stands at `outer`."""
        steep = steep_results(program, outer.steep)
        logarithmic = logarithmic_results(program, outer.logarithmic)
        return [self._of(outer, eqn, *results) for eqn, *results in zip(program.eqns, steep, logarithmic, strict=True)]

    def _of(self, outer: Place, eqn: JaxprEqn, steep: frozenset[int], logarithmic: frozenset[int]) -> Place:
        steep |= logarithmic
        stack = str(eqn.source_info.name_stack)
        backward = outer.backward or "transpose(" in stack
        function = outer.function
        if AUTOCAST in stack:
            function = _NESTED
        elif FULL_PRECISION in stack:
            function = _REGION
        elif function is None:
            function = self._functions.find(eqn)
        if self._scopes is not None:
            path = self._scopes.paths.find(outer.path, eqn)
            return Place(backward, function, path, self._scopes.at(path, backward), steep, logarithmic)
        here = Place(backward, function, steep=steep, logarithmic=logarithmic)
        return outer if here == outer else here


_REGION = Function(FULL_PRECISION, "full")
_NESTED = Function(AUTOCAST, "traced")
_DECIDED = (_REGION, _NESTED)
"""What an author decided for a region, and what another `autocast` did inside of the function: no rule is above it."""
