"""Which rule holds where, by the name stacks of the equations."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from .._policy import Policy
from .._policy_map import Key, PolicyMap
from ..interpreter import walk
from ._modules import ELSEWHERE, Modules
from ._rules import AutocastRules
from ._scope import Scope, check_compute_dtype, scope_of_policy


class ScopeRules:
    """Rules that say what holds in which scope: the first whose key covers a path, by the law of `PolicyMap`."""

    def __init__(self, rows: Iterable[tuple[Key, Scope | None]]):
        self.rows = tuple(rows)
        self._map = PolicyMap([(key, "float32") for key, _ in self.rows], "float32")  # the policies stand for nothing

    def at(self, path: str, types: Mapping[str, type]) -> tuple[bool, Scope | None]:
        """Whether a rule covers the path, and what it says."""
        rule = self._map.match(path, types).rule
        if rule is None:
            return False, None
        scope = self.rows[self._map.rules.index(rule)][1]
        begins = next(outer for outer in _from_the_root(path) if rule.matches(outer, types.get(outer)))
        return True, None if scope is None else scope._replace(path=begins)

    def unused(self, types: Mapping[str, type | None]) -> list[str]:
        """A sentence for each rule that decides for none of these paths."""
        return self._map.explain_unused(types)  # type: ignore[arg-type]


class Scopes:
    """All rules by scope, and the modules of the program they are for; equal ones share rewritten programs.

    Args:
      policy: what the function was given.
      rules: its rules.
      modules: those of the program.
    """

    def __init__(self, policy: Policy | PolicyMap, rules: AutocastRules, modules: Modules):
        self._key = policy, rules.scopes, rules.backward, modules
        self._modules = modules
        self._types = dict(modules.types)
        self._everywhere = ScopeRules([*rules.scopes, *_policy_rows(policy)])
        self._backward = ScopeRules(rules.backward)
        self._paths: dict[tuple[str, str], str] = {}
        self._found: dict[tuple[str, bool], Scope | None] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scopes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def path(self, outer: str, eqn: JaxprEqn) -> str:
        """The path of an equation in a body whose own path is `outer`."""
        names = _names(str(eqn.source_info.name_stack))
        if eqn.primitive.name in _REMAT and names[: len(names) // 2] == names[len(names) // 2 :]:
            names = names[: len(names) // 2]  # its backward pass carries the name stack of the forward pass as well
        return self._joined(outer, names)

    def at(self, path: str, backward: bool) -> Scope | None:
        """What holds at a path, in the backward pass or not; `None` for what holds everywhere."""
        key = path, backward
        if key not in self._found:
            covered, scope = self._backward.at(path, self._types) if backward else (False, None)
            self._found[key] = scope if covered else self._everywhere.at(path, self._types)[1]
        return self._found[key]

    def unused(self, program: Jaxpr) -> list[str]:
        """A sentence for each rule that decides for no equation of a program."""
        stacks = {step.scope for step in walk(program)}
        paths = {self._joined("", _names(stack)) for stack in stacks}
        backward = {self._joined("", _names(stack)) for stack in stacks if "transpose(" in stack}
        found = self._everywhere.unused({path: self._types.get(path) for path in sorted(paths)} | self._types)
        if self._backward.rows and not backward:
            return [*found, "the backward rules decide nothing: the function has no backward pass inside. " + _HINT]
        return found + self._backward.unused({path: self._types.get(path) for path in sorted(backward)})

    def _joined(self, outer: str, names: list[str]) -> str:
        key = outer, "/".join(names)
        if key not in self._paths:
            self._paths[key] = "/".join(self._inside(outer.split("/") if outer else [], names))
        return self._paths[key]

    def _inside(self, path: list[str], names: list[str]) -> list[str]:
        for name in names:
            if name in self._modules.roots:
                continue
            if name.startswith(ELSEWHERE):
                path = [name.removeprefix(ELSEWHERE)]
            elif name not in self._modules.methods:
                path = [*path, name]
            elif not self._is_own_method(path, name.partition(".")[0]):
                path = [*path, name.partition(".")[0]]
        return path

    def _is_own_method(self, path: list[str], module: str) -> bool:
        """Whether a method that is called in the module at `path` is its own, not that of one inside with its name."""
        return path[-1:] == [module] and "/".join([*path, module]) not in self._types


_REMAT = ("checkpoint", "remat2")
_HINT = "To reach that of a gradient taken outside, write autocast(grad(f)) instead of grad(autocast(f))."
_NO_SCOPES = frozenset(("", "rematted_computation", "checkpoint", "force_full_precision"))


def has_scopes(policy: Policy | PolicyMap, rules: AutocastRules) -> bool:
    """Whether a rule depends on where an equation stands."""
    return bool(isinstance(policy, PolicyMap) or rules.scopes or rules.backward)


def root_policy(policy: Policy | PolicyMap) -> Policy:
    """The policy of what no scope covers.

    Raises:
      ValueError: autocast cannot compute in its compute dtype.
    """
    root = policy[""] if isinstance(policy, PolicyMap) else policy
    check_compute_dtype(root)
    return root


def _policy_rows(policy: Policy | PolicyMap) -> list[tuple[Key, Scope | None]]:
    if isinstance(policy, Policy):
        return []
    root = policy[""]
    return [
        (rule.key, None if rule.policy == root else scope_of_policy(rule.policy, f"for {rule.key!r}"))
        for rule in policy.rules
    ]


def _from_the_root(path: str) -> list[str]:
    """The paths around `path`, outermost first, and itself."""
    names = path.split("/") if path else []
    return ["/".join(names[:i]) for i in range(len(names) + 1)]


def _names(stack: str) -> list[str]:
    """The scopes in a name stack, without what transformations put around them: `transpose(jvp(a))/b` is `a/b`."""
    return [name for name in re.sub(r"\w+\(|\)", "", stack).split("/") if name not in _NO_SCOPES]
