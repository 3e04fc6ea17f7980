"""The scope and the place of each equation, which decide about it beside its inputs."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from ..._base import did_you_mean, list_paths_to
from ..._jaxpr import AUTOCAST, RECORD, ModulePaths, Modules, is_backward, walk
from ...modules import FULL_PRECISION
from ...policy import Float8, Key, Policy, PolicyMap, PolicySpec, get_policy
from ._dataflow import NONE, find_logarithmic_results, find_saved_results, find_steep_results
from ._tables import FUNCTIONS

COMPUTE_DTYPES = frozenset(map(np.dtype, ("float32", "float16", jnp.bfloat16)))
"""What autocast casts from and to; values of other dtypes stay as they were traced."""

_SUMS = {None, np.dtype(np.float32)}

TREATMENTS = ("full", "narrow", "infer", "low")
"""How the operations of a function or scope may be treated together."""

ScopeRow = tuple[Key, Policy | str]
"""The key of a rule, and the policy or treatment that it gives to what the key covers."""


class Scope(NamedTuple):
    """What holds for the operations of a scope.

    Attributes:
      compute_dtype: the dtype of its low operations; `None` as in the rest of the function.
      treatment: how its operations are treated together; `None` for each by itself.
      output_dtype: what its results are cast to where they are used outside; `None` leaves them.
      accumulate_dtype: what its products hand over their sums in; `None` as in the rest.
      precision: the matmul precision of its products, and what it stands instead of; `None` as in the rest.
      path: where it begins, for an operation in it.
    """

    compute_dtype: np.dtype | None = None
    treatment: str | None = None
    output_dtype: np.dtype | None = None
    accumulate_dtype: np.dtype | None = None
    precision: tuple[str, str | None] | None = None
    path: str = ""

    def set_precision(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation with the precision of the scope, unless its author wrote one."""
        if self.precision is None or "precision" not in eqn.params:
            return eqn
        new, instead_of = map(_trace_precision, self.precision)
        return eqn.replace(params={**eqn.params, "precision": new}) if eqn.params["precision"] == instead_of else eqn


class Scopes:
    """All rules by scope, and the modules of the program they are for; equal ones share rewritten programs.

    Args:
      policy: what the function was given.
      rows: the user's rules by scope; a map's rules come after them.
      backward_rows: the user's rules for backward passes.
      modules: the modules of the program.

    Attributes:
      paths: the paths of equations.
    """

    def __init__(
        self,
        policy: Policy | PolicyMap,
        rows: tuple[ScopeRow, ...],
        backward_rows: tuple[ScopeRow, ...],
        modules: Modules,
    ):
        self._key = policy, rows, backward_rows, modules
        self._types = dict(modules.types)
        root = root_policy(policy)
        self._everywhere = _ScopeRules([*rows, *_list_rows(policy)], root)
        self._backward = _ScopeRules(backward_rows, root)
        self.paths = ModulePaths(modules)
        self._found: dict[tuple[str, bool], Scope | None] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scopes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def accumulates(self) -> bool:
        """Whether products of a scope may hand over their sums in another dtype than they compute in."""
        scopes = [scope for _, scope in (*self._everywhere.rows, *self._backward.rows)]
        return any(find_sums_dtype(scope.accumulate_dtype, scope.compute_dtype) is not None for scope in scopes)

    def find(self, path: str, backward: bool) -> Scope | None:
        """What holds at a path, in the backward pass or not; `None` for what holds everywhere."""
        key = path, backward
        if key not in self._found:
            scope = self._backward.find(path, self._types) if backward else None
            self._found[key] = scope or self._everywhere.find(path, self._types)
        return self._found[key]

    def explain_unused(self, program: Jaxpr) -> list[str]:
        """A sentence for each rule that decides for no equation of a program."""
        stacks = {step.scope for step in walk(program)}
        paths = {self.paths.read_stack(stack) for stack in stacks}
        backward = {self.paths.read_stack(stack) for stack in stacks if is_backward(stack)}
        found = self._everywhere.explain_unused({path: self._types.get(path) for path in sorted(paths)} | self._types)
        if self._backward.rows and not backward:
            return [*found, "the backward rules decide nothing: the function has no backward pass inside. " + _HINT]
        return found + self._backward.explain_unused({path: self._types.get(path) for path in sorted(backward)})


_HINT = "To reach the backward pass of a gradient taken outside, write autocast(grad(f)) instead of grad(autocast(f))."


class _ScopeRules:
    """Rules that say what holds in which scope: the first whose key covers a path, as in a `PolicyMap`.

    Args:
      rows: keys and what they stand for.
      root: the policy of what none covers.

    Attributes:
      rows: the keys, and what they mean.
    """

    def __init__(self, rows: Iterable[ScopeRow], root: Policy):
        self.rows = [(key, _make_scope(rule, root)) for key, rule in rows]
        self._map = PolicyMap([(key, "float32") for key, _ in self.rows], "float32")  # the policies stand for nothing

    def find(self, path: str, types: Mapping[str, type]) -> Scope | None:
        """What the first rule that covers the path says; `None` if there is none."""
        rule = self._map.match(path, types).rule
        if rule is None:
            return None
        begins = next(outer for outer in list_paths_to(path) if rule.matches(outer, types.get(outer)))
        return self.rows[self._map.rules.index(rule)][1]._replace(path=begins)

    def explain_unused(self, types: Mapping[str, type | None]) -> list[str]:
        """A sentence for each rule that decides for none of these paths."""
        return self._map.explain_unused(types)  # type: ignore[arg-type]


def _make_scope(rule: Policy | str, root: Policy) -> Scope:
    """What a rule means for a scope of a function; where a policy computes in float32, everything inside does."""
    if isinstance(rule, str):
        return Scope(treatment=rule)
    precision = None if rule.precision is None else (rule.precision, root.precision)
    if rule.compute_dtype == np.float32:
        return Scope(None, "full", rule.output_dtype, precision=precision)
    accumulate_dtype = rule.accumulate_dtype or rule.compute_dtype  # without one, in the scope, as without any
    return Scope(rule.compute_dtype, None, rule.output_dtype, accumulate_dtype, precision)


def _list_rows(policy: Policy | PolicyMap) -> list[ScopeRow]:
    return [(rule.key, rule.policy) for rule in policy.rules] if isinstance(policy, PolicyMap) else []


def find_sums_dtype(accumulate_dtype: np.dtype | None, compute_dtype: np.dtype | None) -> np.dtype | None:
    """The dtype in which products hand over their sums; `None` where that is the compute dtype."""
    if accumulate_dtype is None or compute_dtype is None:  # not by ==: NumPy has float64 equal None
        return accumulate_dtype
    return None if accumulate_dtype == compute_dtype else accumulate_dtype


def root_policy(policy: Policy | PolicyMap) -> Policy:
    """The policy of what no scope covers."""
    return policy[""] if isinstance(policy, PolicyMap) else policy


def parse_scope_rule(spec: PolicySpec, where: str) -> Policy | str:
    """Reads what is to hold for a scope: one of `TREATMENTS`, or anything that `get_policy` reads but for a map.

    Raises:
      ValueError: it is neither, or autocast cannot compute in its compute dtype.
    """
    if isinstance(spec, str) and spec in TREATMENTS:
        return spec
    try:
        policy = get_policy(spec)
    except ValueError as error:
        raise ValueError(f"{error} It stands {where}, as may {', '.join(map(repr, TREATMENTS))}.") from None
    if not isinstance(policy, Policy):
        raise ValueError(f"{policy!r} {where} is no policy of one scope. For example: 'float32'.")
    _check_policy(policy, where)
    return policy


def check_policy(policy: Policy | PolicyMap) -> None:
    """Checks that autocast can compute under a policy, or under each policy of a map.

    Raises:
      ValueError: autocast cannot compute in the compute dtype of one, or one is quantized.
    """
    _check_policy(root_policy(policy))
    for rule in policy.rules if isinstance(policy, PolicyMap) else ():
        _check_policy(rule.policy, f"for the key {rule.key!r} of a PolicyMap")


def _check_policy(policy: Policy, where: str = "") -> None:
    dtype = policy.compute_dtype
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        names = sorted(str(known) for known in COMPUTE_DTYPES)
        raise ValueError(
            f"autocast cannot compute in {str(dtype)!r}, the compute dtype of the policy {policy.name!r}"
            f"{where and ' ' + where}. {did_you_mean(dtype, names)} For example: 'mixed_bfloat16'."
        )
    if find_sums_dtype(policy.accumulate_dtype, dtype) not in _SUMS:
        raise ValueError(
            f"autocast cannot accumulate in {str(policy.accumulate_dtype)!r}, the accumulate dtype of the policy "
            f"{policy.name!r}{where and ' ' + where}. For example: {policy.replace(accumulate_dtype='float32').name!r}."
        )
    if policy.quantization is not None:
        refused = "multiplies nothing in 8 bits" if isinstance(policy.quantization, Float8) else "quantizes no weights"
        raise ValueError(
            f"autocast {refused}, as the policy {policy.name!r}{where and ' ' + where} says. Give that one to a Flax "
            f"module, with_policy(model, {policy.name!r}), or write "
            f"{policy.replace(quantization=None).name!r}."
        )


@functools.cache
def _trace_precision(name: str | None) -> Any:
    """What the parameter of a product is where the policy has a precision of this name."""
    with jax.default_matmul_precision(name) if name is not None else contextlib.nullcontext():
        return jax.make_jaxpr(lax.dot)(np.ones(1), np.ones(1)).eqns[0].params["precision"]


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
