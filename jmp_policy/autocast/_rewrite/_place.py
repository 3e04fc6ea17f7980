"""Where an equation stands: what decides about it beside its values."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from ..._jaxpr import AUTOCAST, RECORD, is_backward, walk
from ...modules import FULL_PRECISION
from ._dataflow import NONE, find_logarithmic_results, find_saved_results, find_steep_results
from ._scopes import Scope, Scopes
from ._tables import FUNCTIONS


class Function(NamedTuple):
    """A function of the tables, and how what is inside of it is treated."""

    name: str
    treatment: str


class EquationPlace(NamedTuple):
    """Where an equation stands.

    Attributes:
      backward: whether it belongs to a backward pass.
      function: the function of the tables that it belongs to.
      path: the path of the module or named scope that it belongs to. It is left empty where no rule depends on it,
        because a program that is used at two paths is rewritten for both.
      scope: what the rules say for that path.
      steep: which of its results reach an operation that is steep where others saturate.
      logarithmic: which of these reach a logarithm, through sums or without.
      saved: which of its results a backward pass alone reads; only of a loop, under an accumulate dtype.
    """

    backward: bool = False
    function: Function | None = None
    path: str = ""
    scope: Scope | None = None
    steep: frozenset[int] = NONE
    logarithmic: frozenset[int] = NONE
    saved: frozenset[int] = NONE

    @property
    def treatment(self) -> str | None:
        """How the operations that stand here are treated together: a user's rule is above the tables."""
        if self.function not in _DECIDED and self.scope is not None and self.scope.treatment is not None:
            return self.scope.treatment
        return None if self.function is None else self.function.treatment

    def is_inside(self, scope: Scope) -> bool:
        """Whether a scope is this place's own, or around it."""
        return f"{self.path}/".startswith(f"{scope.path}/") or not scope.path


_REGION = Function(FULL_PRECISION, "full")
_NESTED = Function(AUTOCAST, "traced")
_DECIDED = (_REGION, _NESTED)
"""What an author decided for a region, and what another `autocast` or a recorder did inside of the function: no rule is
above it."""


class PlaceFinder:
    """Finds the place of each equation.

    Args:
      functions: the functions that are treated as one operation.
      scopes: the rules by scope, if there are any.
      finds_saved: whether to find what loops keep for a backward pass.
    """

    def __init__(self, functions: "Functions", scopes: Scopes | None, finds_saved: bool = False):
        self._functions = functions
        self._scopes = scopes
        self._finds_saved = finds_saved

    def find(self, outer: EquationPlace, program: Jaxpr) -> list[EquationPlace]:
        """The places of the equations in a body that stands at `outer`."""
        steep = find_steep_results(program, outer.steep)
        logarithmic = find_logarithmic_results(program, outer.logarithmic)
        found = [
            self._find(outer, eqn, *results) for eqn, *results in zip(program.eqns, steep, logarithmic, strict=True)
        ]
        if not self._finds_saved:
            return found
        saved = find_saved_results(program, outer.saved)
        return [place._replace(saved=results) for place, results in zip(found, saved, strict=True)]

    def _find(
        self, outer: EquationPlace, eqn: JaxprEqn, steep: frozenset[int], logarithmic: frozenset[int]
    ) -> EquationPlace:
        steep |= logarithmic
        stack = str(eqn.source_info.name_stack)
        backward = outer.backward or is_backward(stack)
        # The outermost function of the tables decides, and what an author wrote around it is above that.
        function = outer.function
        if AUTOCAST in stack or RECORD in stack:
            function = _NESTED
        elif FULL_PRECISION in stack:
            function = _REGION
        elif function is None:
            function = self._functions.find(eqn)
        if self._scopes is not None:
            path = self._scopes.paths.find(outer.path, eqn)
            return EquationPlace(backward, function, path, self._scopes.find(path, backward), steep, logarithmic)
        here = EquationPlace(backward, function, steep=steep, logarithmic=logarithmic)
        return outer if here == outer else here


class Functions:
    """Functions by name, found in tracebacks.

    A dotted name is the path of a public function or method, and means that very function, or of a module, and means
    each of its public functions that has no name here. A name without dots means any function of that name. What is not
    loaded is passed over until it is.
    """

    def __init__(self, treatments: Mapping[str, str]):
        found = [Function(*item) for item in treatments.items()]
        self._by_name = {function.name: function for function in found if "." not in function.name}
        self._dotted = [function for function in found if "." in function.name]
        self._by_code: dict[int, Function] = {}
        self._codes: list[CodeType] = []
        self._loaded = 0

    def find(self, eqn: JaxprEqn) -> Function | None:
        """The outermost function of the table that `eqn` was traced in."""
        traceback = eqn.source_info.traceback
        found = None
        self._look_up()
        for code in () if traceback is None else traceback.raw_frames()[0]:
            function = self._by_name.get(code.co_name) or self._by_code.get(id(code))
            if function is not None:
                found = function
        return found

    def _look_up(self) -> None:
        """Finds the code of each function: again, if there are modules that were not loaded the last time.

        By identity: the hash of a code object costs more than the search. The codes are kept, and so their identity.
        """
        if len(sys.modules) == self._loaded:
            return
        self._loaded = len(sys.modules)
        targets = [(function, _find_target(function.name)) for function in self._dotted]
        for function, target in sorted(targets, key=lambda row: not inspect.ismodule(row[1])):  # functions go over it
            for code in _list_public_codes(target) if inspect.ismodule(target) else _list_codes(target):
                self._by_code[id(code)] = function
                self._codes.append(code)


def find_functions(rows: Iterable[tuple[str, str]]) -> Functions:
    """The functions of the tables, and of a user's rows: a user may define one again, so those are looked up anew."""
    own = dict(rows)
    return Functions(FUNCTIONS | own) if own else _OF_TABLES


_OF_TABLES = Functions(FUNCTIONS)


def explain_unused_functions(rows: Iterable[tuple[str, str]], program: Jaxpr) -> list[str]:
    """A sentence for each of a user's functions of which a program has no operation."""
    rows = list(rows)
    if not rows:
        return []
    functions = find_functions(rows)
    eqns = {id(eqn): eqn for step in walk(program) for eqn in (step.eqn, *(eqn for eqn, _ in step.around))}
    met = {function.name for function in map(functions.find, eqns.values()) if function is not None}
    return [
        f"function rule {name!r} decides nothing: no operation is of a function of that name, or another rule covers it"
        for name, _ in rows
        if name not in met
    ]


def _find_target(name: str) -> Any:
    """The object of a dotted name; `None` if its package is not loaded, or does not have it."""
    parts = name.split(".")
    module = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules), None)
    if module is None:
        return None
    target: Any = sys.modules[module]
    for part in parts[len(module.split(".")) :]:
        target = getattr(target, part, None)
    return target


def _list_public_codes(module: ModuleType) -> Iterator[CodeType]:
    """The codes of its public functions, and of the functions that those make and return."""
    for name in dir(module):
        if not name.startswith("_"):
            for code in _list_codes(getattr(module, name)):
                yield code
                yield from (inner for inner in code.co_consts if isinstance(inner, CodeType))


def _list_codes(target: object) -> list[CodeType]:
    code = getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None
    return [] if code is None else [code]
