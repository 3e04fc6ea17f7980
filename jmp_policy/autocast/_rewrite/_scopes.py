"""What holds for the operations of a scope, and which rule says so, by the paths of the equations."""

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from ..._base import did_you_mean, list_paths_to
from ..._jaxpr import ModulePaths, Modules, is_backward, walk
from ...policy import Float8, Key, Policy, PolicyMap, PolicySpec, get_policy

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
