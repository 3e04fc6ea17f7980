"""Which rule holds where, by the name stacks of the equations."""

from collections.abc import Iterable, Mapping

from jax.extend.core import Jaxpr

from .._policy import Policy
from .._policy_map import Key, PolicyMap
from ..interpreter import walk
from ..interpreter._module_paths import ModulePaths, Modules
from ._rules import AutocastRules
from ._scope import Scope, check_for_autocast, scope_of


class ScopeRules:
    """Rules that say what holds in which scope: the first whose key covers a path, as in a `PolicyMap`.

    Args:
      rules: keys and what they stand for.
      root: the policy of what none covers.

    Attributes:
      rows: the keys, and what they mean.
    """

    def __init__(self, rules: Iterable[tuple[Key, Policy | str]], root: Policy):
        self.rows = [(key, scope_of(rule, root)) for key, rule in rules]
        self._map = PolicyMap([(key, "float32") for key, _ in self.rows], "float32")  # the policies stand for nothing

    def at(self, path: str, types: Mapping[str, type]) -> Scope | None:
        """What the first rule that covers the path says; `None` if there is none."""
        rule = self._map.match(path, types).rule
        if rule is None:
            return None
        begins = next(outer for outer in _from_the_root(path) if rule.matches(outer, types.get(outer)))
        return self.rows[self._map.rules.index(rule)][1]._replace(path=begins)

    def unused(self, types: Mapping[str, type | None]) -> list[str]:
        """A sentence for each rule that decides for none of these paths."""
        return self._map.explain_unused(types)  # type: ignore[arg-type]


class Scopes:
    """All rules by scope, and the modules of the program they are for; equal ones share rewritten programs.

    Args:
      policy: what the function was given.
      rules: its rules.
      modules: those of the program.

    Attributes:
      paths: the paths of equations.
    """

    def __init__(self, policy: Policy | PolicyMap, rules: AutocastRules, modules: Modules):
        self._key = policy, rules.scopes, rules.backward, modules
        self._types = dict(modules.types)
        root = root_policy(policy)
        self._everywhere = ScopeRules([*rules.scopes, *_policy_rules(policy)], root)
        self._backward = ScopeRules(rules.backward, root)
        self.paths = ModulePaths(modules)
        self._found: dict[tuple[str, bool], Scope | None] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scopes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def at(self, path: str, backward: bool) -> Scope | None:
        """What holds at a path, in the backward pass or not; `None` for what holds everywhere."""
        key = path, backward
        if key not in self._found:
            scope = self._backward.at(path, self._types) if backward else None
            self._found[key] = scope or self._everywhere.at(path, self._types)
        return self._found[key]

    def unused(self, program: Jaxpr) -> list[str]:
        """A sentence for each rule that decides for no equation of a program."""
        stacks = {step.scope for step in walk(program)}
        paths = {self.paths.read_stack(stack) for stack in stacks}
        backward = {self.paths.read_stack(stack) for stack in stacks if "transpose(" in stack}
        found = self._everywhere.unused({path: self._types.get(path) for path in sorted(paths)} | self._types)
        if self._backward.rows and not backward:
            return [*found, "the backward rules decide nothing: the function has no backward pass inside. " + _HINT]
        return found + self._backward.unused({path: self._types.get(path) for path in sorted(backward)})


_HINT = "To reach that of a gradient taken outside, write autocast(grad(f)) instead of grad(autocast(f))."


def has_scopes(policy: Policy | PolicyMap, rules: AutocastRules) -> bool:
    """Whether a rule depends on where an equation stands."""
    return bool(isinstance(policy, PolicyMap) or rules.scopes or rules.backward)


def root_policy(policy: Policy | PolicyMap) -> Policy:
    """The policy of what no scope covers."""
    return policy[""] if isinstance(policy, PolicyMap) else policy


def check_policy(policy: Policy | PolicyMap) -> None:
    """Checks that a policy is one for autocast, and a map's are.

    Raises:
      ValueError: autocast cannot compute in the compute dtype of one, or one is quantized.
    """
    check_for_autocast(root_policy(policy))
    for rule in policy.rules if isinstance(policy, PolicyMap) else ():
        check_for_autocast(rule.policy, f"for the key {rule.key!r} of a PolicyMap")


def _policy_rules(policy: Policy | PolicyMap) -> list[tuple[Key, Policy | str]]:
    return [(rule.key, rule.policy) for rule in policy.rules] if isinstance(policy, PolicyMap) else []


def _from_the_root(path: str) -> list[str]:
    """The paths around `path`, outermost first, and itself."""
    names = path.split("/") if path else []
    return ["/".join(names[:i]) for i in range(len(names) + 1)]
