"""The scope of each equation and its place: function, module, forward or backward pass."""

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from .._base import did_you_mean, list_paths_to
from .._jaxpr import AUTOCAST, RECORD, ModulePaths, Modules, is_backward, make_module_finder, walk
from ..modules import FULL_PRECISION
from ..policy import Key, Policy, PolicyMap, PolicySpec, Quantization, get_policy, needs_rng
from ..quant import attention_format_of, needs_state
from ._dataflow import LOGARITHMS, NONE, STEEP_OPERATIONS, find_reaching, find_saved_results
from ._tables import ATTENTION, FUNCTIONS

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
COMPUTE_DTYPES = frozenset((FLOAT64, FLOAT32, np.dtype(np.float16), np.dtype(jnp.bfloat16)))
"""The dtypes that autocast casts from and to: float64 under a policy with float64 alone. Others stay as traced."""

_SUMS = {None, FLOAT32}

TREATMENTS = ("full", "wide", "narrow", "infer", "low")

ScopeRow = tuple[Key, Policy | str]
"""The key of a rule, and its policy or treatment."""


class ScopeSettings(NamedTuple):
    """The settings for the operations of a scope. None means as in the rest of the function."""

    compute_dtype: np.dtype | None = None  # the dtype of low operations
    full_dtype: np.dtype | None = None  # the dtype of full operations
    treatment: str | None = None  # one of `TREATMENTS`, for all operations together
    output_dtype: np.dtype | None = None  # the dtype of outputs where they are used outside
    accumulate_dtype: np.dtype | None = None  # the output dtype of matmuls
    precision: tuple[str, str | None] | None = None  # the matmul precision, and the default one that it replaces
    path: str = ""  # the outermost path that the rule covers
    quantization: Quantization | None = None  # the format of weights; None leaves them unquantized

    def set_precision(self, eqn: JaxprEqn) -> JaxprEqn:
        """Sets the matmul precision of an equation, unless its author wrote one."""
        if self.precision is None or "precision" not in eqn.params:
            return eqn
        new, instead_of = map(_trace_precision, self.precision)
        return eqn.replace(params={**eqn.params, "precision": new}) if eqn.params["precision"] == instead_of else eqn


@dataclasses.dataclass(unsafe_hash=True)
class Scopes:
    """All rules by scope, the user's rows before a map's, and the modules of the jaxpr. Equal objects share jaxprs."""

    policy: Policy | PolicyMap
    rows: tuple[ScopeRow, ...]
    backward_rows: tuple[ScopeRow, ...]
    modules: Modules

    def __post_init__(self) -> None:
        self._types, root = dict(self.modules.types), root_policy(self.policy)
        rules = self.policy.rules if isinstance(self.policy, PolicyMap) else ()
        make_rules = functools.partial(_ScopeRules, root=root, types=self._types)
        self._everywhere = make_rules([*self.rows, *((rule.key, rule.policy) for rule in rules)])
        self._backward = make_rules(self.backward_rows)
        has_float64 = any(scope.full_dtype in {FLOAT64} for _, scope in (*self._everywhere.rows, *self._backward.rows))
        # Beside rules in float64, the default "float32" means all operations, as the rule "float32" does.
        is_narrow = has_float64 and root.full_dtype == root.compute_dtype == FLOAT32
        self._default = ScopeSettings(treatment="full", quantization=root.quantization) if is_narrow else None
        self.paths = ModulePaths(self.modules)
        self._found: dict[tuple[str, bool], ScopeSettings | None] = {}

    @property
    def accumulates(self) -> bool:
        """True if matmuls of a scope may return another dtype than the compute dtype."""
        scopes = [scope for _, scope in (*self._everywhere.rows, *self._backward.rows)]
        return any(choose_sums_dtype(scope.accumulate_dtype, scope.compute_dtype) is not None for scope in scopes)

    @property
    def attends(self) -> bool:
        """True if the policy of a scope quantizes attention."""
        return any(attention_format_of(scope.quantization) is not None for _, scope in self._everywhere.rows)

    def find(self, path: str, backward: bool) -> ScopeSettings | None:
        """Finds the scope of a path, in the backward pass or not."""
        key = path, backward
        if key not in self._found:
            scope = self._backward.find(path) if backward else None
            self._found[key] = scope or self._everywhere.find(path) or self._default
        return self._found[key]

    def explain_unused(self, program: Jaxpr) -> list[str]:
        """Returns a message for each rule that applies to no equation of a jaxpr."""
        stacks = {step.scope for step in walk(program)}
        paths = {self.paths.read_stack(stack) for stack in stacks}
        backward = {self.paths.read_stack(stack) for stack in stacks if is_backward(stack)}
        types: Any = {path: self._types.get(path) for path in sorted(paths)} | self._types
        found = self._everywhere.map.explain_unused(types)
        if self._backward.rows and not backward:
            return [*found, "the backward rules decide nothing: the function has no backward pass inside. " + _HINT]
        types = {path: self._types.get(path) for path in sorted(backward)}
        return found + self._backward.map.explain_unused(types)


_HINT = "To reach the backward pass of a gradient taken outside, write autocast(grad(f)) instead of grad(autocast(f))."


class _ScopeRules:
    """Rules by scope. The first rule whose key covers a path applies, as in a `PolicyMap`."""

    def __init__(self, rows: Iterable[ScopeRow], root: Policy, types: Mapping[str, type]):
        self.rows = [(key, _make_scope(rule, root)) for key, rule in rows]
        self.map = PolicyMap([(key, "float32") for key, _ in self.rows], "float32")  # for its keys only
        self._types, self._find_module = types, make_module_finder(types)

    def find(self, path: str) -> ScopeSettings | None:
        # A key may have the path of a module, or that with the `jax.named_scope`s around it.
        types, find_module = self._types, self._find_module
        covers = lambda rule, outer: rule.covers(outer, types) or rule.covers(find_module(outer), types)
        places = [path, *filter(None, [find_module(path)])]
        found = {self.map.match(place, types).rule for place in places} - {None}
        if not found:
            return None
        rule = min(found, key=self.map.rules.index)
        begins = next(outer for outer in list_paths_to(path) if covers(rule, outer) is not None)
        return self.rows[self.map.rules.index(rule)][1]._replace(path=begins)


def _make_scope(rule: Policy | str, root: Policy) -> ScopeSettings:
    """Makes the scope of a rule. With a policy that computes in its full dtype, all operations run in it."""
    if isinstance(rule, str):
        return ScopeSettings(treatment=rule, quantization=root.quantization)
    precision = None if rule.precision is None else (rule.precision, root.precision)
    low, full = rule.compute_dtype, rule.full_dtype
    if low is not None and low == full and rule.quantization is None:
        low = None if full == root.full_dtype else full
        return ScopeSettings(low, full, "full", rule.output_dtype, precision=precision)
    sums = rule.accumulate_dtype or low  # the compute dtype turns it off
    return ScopeSettings(low, full, None, rule.output_dtype, sums, precision, "", rule.quantization)


def is_mixed(*policies: Policy) -> bool:
    """True if a policy computes in a narrower dtype than its full dtype, or than that of another one."""
    full = max((policy.full_dtype for policy in policies), key=lambda dtype: dtype.itemsize)
    low = {policy.compute_dtype for policy in policies} & COMPUTE_DTYPES
    return any(dtype.itemsize < full.itemsize for dtype in low if dtype is not None)


def choose_sums_dtype(accumulate_dtype: np.dtype | None, compute_dtype: np.dtype | None) -> np.dtype | None:
    """Returns the output dtype of matmuls, or None if it is the compute dtype."""
    if accumulate_dtype is None or compute_dtype is None:  # np.dtype(float) == None is True
        return accumulate_dtype
    return None if accumulate_dtype == compute_dtype else accumulate_dtype


def root_policy(policy: Policy | PolicyMap) -> Policy:
    """Returns the policy, or the default policy of a map."""
    return policy[""] if isinstance(policy, PolicyMap) else policy


def parse_scope_rule(spec: PolicySpec, where: str) -> Policy | str:
    """Reads the value of a rule by scope: one of `TREATMENTS`, or a policy. `where` is part of errors."""
    if isinstance(spec, str) and spec in TREATMENTS:
        return spec
    try:
        policy = get_policy(spec)
    except ValueError as error:
        words = ", ".join(map(repr, TREATMENTS))
        raise ValueError(f"{error} It is the value {where}, which may also be {words}.") from None
    if not isinstance(policy, Policy):
        raise ValueError(f"{policy!r} {where} is not a policy of one scope. For example: 'float32'.")
    check_policy(policy, where)
    return policy


def check_policy(policy: Policy | PolicyMap, where: str = "", *, has_weights: bool = False) -> None:
    """Raises a `ValueError` if autocast cannot compute under a policy, or under one of a map."""
    for rule in policy.rules if isinstance(policy, PolicyMap) else ():
        check_policy(rule.policy, f"for the key {rule.key!r} of a PolicyMap", has_weights=has_weights)
    policy = root_policy(policy)
    dtype, format, name = policy.compute_dtype, policy.quantization, policy.name
    the_policy = f"the policy {name!r}{where and ' ' + where}"
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        names = sorted(str(known) for known in COMPUTE_DTYPES)
        raise ValueError(
            f"autocast cannot compute in {str(dtype)!r}, the compute dtype of {the_policy}. "
            f"{did_you_mean(dtype, names)} For example: 'mixed_bfloat16'."
        )
    if choose_sums_dtype(policy.accumulate_dtype, dtype) not in _SUMS:
        raise ValueError(
            f"autocast cannot accumulate in {str(policy.accumulate_dtype)!r}, the accumulate dtype of {the_policy}. "
            f"For example: {policy.replace(accumulate_dtype='float32').name!r}."
        )
    if needs_state(format) or needs_rng(format):
        needed, other = "a state", "'float8(recipe=current)_from_mixed_bfloat16'"
        if needs_rng(format):
            needed, other = "a PRNG key", "'nvfp4_from_mixed_bfloat16'"
        raise ValueError(
            f"autocast cannot quantize as {the_policy} says: each layer needs {needed}, and autocast knows no layers. "
            f"Use with_policy(model, {name!r}) for a Flax module, or a policy such as {other}."
        )
    if format is not None and not has_weights:
        raise ValueError(
            f"autocast does not quantize weights, as {the_policy} says, unless you tell it which arguments they are. "
            f"For example: autocast(loss_fn, {name!r}, weights=0)."
        )
    if policy.cache is not None:
        raise ValueError(
            f"autocast knows no layers, and cannot store their cache as {the_policy} says. "
            f"Use with_policy(model, {name!r}) for a Flax module, or {policy.replace(cache=None).name!r}."
        )


def _trace_precision(name: str | None) -> Any:
    """Returns the `precision` parameter of a matmul under a default precision."""
    with jax.default_matmul_precision(name) if name is not None else contextlib.nullcontext():
        return jax.make_jaxpr(lax.dot)(np.ones(1), np.ones(1)).eqns[0].params["precision"]


class Function(NamedTuple):
    name: str
    treatment: str


class EquationPlace(NamedTuple):
    backward: bool = False  # True in a backward pass
    function: Function | None = None  # the function of the tables that contains the equation
    # The path of its module or named scope. It is empty unless a rule depends on it, so that a jaxpr that is used at
    # two paths is rewritten once.
    path: str = ""
    scope: ScopeSettings | None = None  # the settings for that path
    steep: frozenset[int] = NONE  # its outputs that reach an operation that is steep where others saturate
    logarithmic: frozenset[int] = NONE  # its outputs that reach a logarithm, even through sums
    saved: frozenset[int] = NONE  # its outputs that only a backward pass reads, for loops under an accumulate dtype
    attends: bool = False  # True in a function of `ATTENTION`, if a policy quantizes attention

    @property
    def treatment(self) -> str | None:
        """The treatment of the function or scope; a user's rule wins over the tables."""
        if self.function not in _DECIDED and self.scope is not None and self.scope.treatment is not None:
            return self.scope.treatment
        return None if self.function is None else self.function.treatment

    def is_inside(self, scope: ScopeSettings) -> bool:
        """True if this place is in a scope."""
        return f"{self.path}/".startswith(f"{scope.path}/") or not scope.path


REGION = Function(FULL_PRECISION, "full")
AS_TRACED = Function(AUTOCAST, "traced")
_DECIDED = (REGION, AS_TRACED)
"""Regions of `force_full_precision`, and equations of another `autocast` or a recorder: they win over all rules."""


class PlaceFinder:
    """Finds the place of each equation. With `finds_saved`, also the residuals of loops, with `attends` attention."""

    def __init__(self, functions: "Functions", scopes: Scopes | None, finds_saved: bool = False, attends: bool = False):
        self._functions, self._scopes, self._finds_saved = functions, scopes, finds_saved
        self._attention = _ATTENTION if attends else None

    def find(self, outer: EquationPlace, program: Jaxpr) -> list[EquationPlace]:
        """Returns the places of the equations of a jaxpr that runs at `outer`."""
        steep, _ = find_reaching(program, outer.steep, STEEP_OPERATIONS)
        logarithmic, _ = find_reaching(program, outer.logarithmic, LOGARITHMS)
        found, stack, inside = [], None, outer
        for eqn, *results in zip(program.eqns, steep, logarithmic, strict=True):
            if eqn.source_info.name_stack is not stack:
                stack = eqn.source_info.name_stack
                text, function = str(stack), outer.function
                if AUTOCAST in text or RECORD in text:  # these scopes decide before all rules
                    function = AS_TRACED
                elif FULL_PRECISION in text:
                    function = REGION
                here = outer._replace(backward=outer.backward or is_backward(text), function=function)
                inside = outer if here == outer else here
            found.append(self._find(inside, eqn, *results))
        if not self._finds_saved:
            return found
        saved = find_saved_results(program, outer.saved)
        return [place._replace(saved=results) for place, results in zip(found, saved, strict=True)]

    def _find(
        self, outer: EquationPlace, eqn: JaxprEqn, steep: frozenset[int], logarithmic: frozenset[int]
    ) -> EquationPlace:
        steep |= logarithmic
        # The outermost function of the tables wins, unless the author wrote `force_full_precision` around it.
        function = outer.function or self._functions.find(eqn)
        attends = outer.attends or (self._attention is not None and self._attention.find(eqn) is not None)
        path, scope = "", None
        if self._scopes is not None:
            path = self._scopes.paths.find(outer.path, eqn)
            scope = self._scopes.find(path, outer.backward)
        here = (outer.backward, function, path, scope, steep, logarithmic, NONE, attends)
        return outer if here == outer else EquationPlace(*here)


class Functions:
    """Finds functions by name in tracebacks.

    A dotted name stands for a public function or method, or for all public functions of a module without a row. A name
    without dots stands for any function of that name. Names of packages that are not loaded are looked up later.
    """

    def __init__(self, treatments: Mapping[str, str]):
        found = [Function(*item) for item in treatments.items()]
        self._by_name = {function.name: function for function in found if "." not in function.name}
        self._dotted = [function for function in found if "." in function.name]
        self._by_code: dict[int, Function] = {}
        self._codes: list[CodeType] = []
        self._ids, self._loaded = self._by_code.keys(), 0

    def find(self, eqn: JaxprEqn) -> Function | None:
        """Returns the outermost function of the table in which `eqn` was traced."""
        if len(sys.modules) != self._loaded:
            self._look_up()
        traceback = eqn.source_info.traceback
        codes = () if traceback is None else traceback.raw_frames()[0]
        is_apart = self._ids.isdisjoint(map(id, codes))  # quicker than a loop over tens of frames
        if is_apart and not (self._by_name and any(code.co_name in self._by_name for code in codes)):
            return None
        found = None
        for code in codes:
            function = self._by_name.get(code.co_name) or self._by_code.get(id(code))
            if function is not None:
                found = function
        return found

    def _look_up(self) -> None:
        """Finds the code objects of the functions by id, as hashing is slower, again if modules were loaded since."""
        self._loaded = len(sys.modules)
        targets = [(function, find_target(function.name)) for function in self._dotted]
        targets.sort(key=lambda row: not inspect.ismodule(row[1]))  # functions win over modules
        for function, target in targets:
            for code in _list_public_codes(target) if inspect.ismodule(target) else _list_codes(target):
                self._by_code[id(code)] = function
                self._codes.append(code)


def find_functions(rows: Iterable[tuple[str, str]]) -> Functions:
    """Returns the functions of the tables and of a user, which are looked up anew since a user may redefine them."""
    own = dict(rows)
    return Functions(FUNCTIONS | own) if own else _OF_TABLES


_OF_TABLES = Functions(FUNCTIONS)
_ATTENTION = Functions(dict.fromkeys(ATTENTION, "attention"))


def explain_unused_functions(rows: Sequence[tuple[str, str]], program: Jaxpr) -> list[str]:
    """Returns a message for each row of a user that applies to no operation of a jaxpr."""
    if not rows:
        return []
    functions = find_functions(rows)
    eqns = {id(eqn): eqn for step in walk(program) for eqn in (step.eqn, *(eqn for eqn, _ in step.around))}
    met = {function.name for function in map(functions.find, eqns.values()) if function is not None}
    return [
        f"function rule {name!r} decides nothing: no operation is in a function of that name, or another rule covers it"
        for name, _ in rows
        if name not in met
    ]


def find_target(name: str) -> Any:
    """Returns the object of a dotted name, or None if its package is not loaded or does not have it."""
    parts = name.split(".")
    module = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules), None)
    if module is None:
        return None
    target: Any = sys.modules[module]
    for part in parts[len(module.split(".")) :]:
        target = getattr(target, part, None)
    return target


def _list_public_codes(module: ModuleType) -> Iterator[CodeType]:
    """Yields the code objects of public functions, and of functions defined inside them."""
    for name in dir(module):
        if not name.startswith("_"):
            for code in _list_codes(getattr(module, name)):
                yield code
                yield from (inner for inner in code.co_consts if isinstance(inner, CodeType))


def _list_codes(target: object) -> list[CodeType]:
    code = getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None
    return [] if code is None else [code]
