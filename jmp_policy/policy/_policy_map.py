"""Policies by module path and module type."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jax

from .._base import describe, list_paths_to, parse_dtype, quote
from ..loss_scale import DynamicLossScale, LossScale, NoOpLossScale
from ._grammar import parse_policy
from ._map_keys import (
    Key,
    check_rule_key,
    covers_path,
    explain_unused_key,
    find_first_pattern,
    read_key,
    spell_key,
    write_key,
)
from ._policy import Policy, read_default

_EXPLAINED = 5  # unused rules whose reason is told

Spec = Any
K = TypeVar("K", bound=Key)  # a mapping is invariant in its keys


@dataclasses.dataclass(frozen=True)
class MapRule:
    """A key of a map and the policy of the modules that it covers."""

    key: Key
    policy: Policy

    def covers(self, path: str, types: Mapping[str, type | None]) -> bool | None:
        """Returns True if the key matches this module itself, False if only one around it, and None otherwise."""
        if isinstance(self.key, str):
            return covers_path(self.key, path)
        around = ((outer, types.get(outer)) for outer in reversed(list_paths_to(path)))
        return next((outer == path for outer, kind in around if kind is not None and issubclass(kind, self.key)), None)


@dataclasses.dataclass(frozen=True)
class Match:
    """Policy of one module."""

    policy: Policy  # the policy of the module
    rule: MapRule | None  # the rule that gave it, or `None` for the default
    # True if the rule matches the module itself and not a module around it. A boundary casts its inputs and outputs.
    boundary: bool


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class PolicyMap:
    """Ordered rules that assign policies to the modules of a model.

    A path is the module names joined by `/`; the root has the path `""`. A key covers the modules it matches and
    everything inside them: a string matches by `re.fullmatch` on the path, a type by `isinstance`. The first rule that
    covers a module wins; modules without a rule get the default. Maps are immutable, hashable pytrees without leaves.

    Args:
      rules: a mapping, or pairs, of a key and a policy spec that `get_policy` reads, except maps.
      default: the policy of all other modules; `None` means the default policy at the time the map is applied.

    Raises:
      ValueError: a key is not a valid pattern, or a value not a valid policy.
      TypeError: a key is neither a string nor a type.

    >>> import jmp_policy as jmp
    >>> rules = jmp.PolicyMap({"head": "float32", r"block_\\d+": "mixed_bfloat16"}, default="bfloat16")
    >>> rules["head"].name, rules["block_0/mlp/up"].name, rules["embed"].name
    ('float32', 'mixed_bfloat16', 'bfloat16')
    """

    rules: tuple[MapRule, ...]
    default: Policy | None

    def __init__(self, rules: Mapping[K, Spec] | Iterable[tuple[K, Spec]], default: Spec = None):
        pairs: Iterable[Any] = rules.items() if isinstance(rules, Mapping) else _check_pairs(rules)
        parsed = tuple(_parse_rule(pair, i) for i, pair in enumerate(pairs))
        given = None if default is None else _parse_rule_policy(default, "as default of a PolicyMap")
        vars(self).update(rules=parsed, default=given)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # each dispatch of a jitted function asks for it
        return hash((self.rules, self.default))

    def __getitem__(self, path: str) -> Policy:
        """Returns the policy of the module at `path`, using string keys only."""
        return self.resolve(path)

    def __contains__(self, path: object) -> NoReturn:
        raise TypeError(f"{quote(path)} is in every PolicyMap: all paths have a policy. Ask map.rules for its keys.")

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "A PolicyMap covers every path, so it is not iterable. For its keys: [rule.key for rule in map.rules]."
        )

    def resolve(self, path: str, module_type: type | Mapping[str, type] | None = None) -> Policy:
        """Returns the policy of a module.

        Args:
          path: module names joined by `/`.
          module_type: the module's type; or the types of it and of the modules around it, by path, because a type key
            also covers everything inside.

        >>> import jmp_policy as jmp
        >>> jmp.PolicyMap({dict: "bfloat16"}, "float32").resolve("a/b", {"a": dict, "a/b": list}).name
        'bfloat16'
        """
        return self.match(path, module_type).policy

    def match(self, path: str, module_type: type | Mapping[str, type] | None = None) -> Match:
        """Like `resolve`, but also returns the rule that gave the policy."""
        # `isinstance` is fast for `dict` and slow for `Mapping`, and each module asks.
        types = module_type if isinstance(module_type, dict | Mapping) else {path: module_type}
        first = self._find_pattern(path)
        for position in (*(i for i in self._types if i < first), *[first] * (first < len(self.rules))):
            rule = self.rules[position]
            boundary = rule.covers(path, types)
            if boundary is not None:
                return Match(rule.policy, rule, boundary)
        return Match(self._default_policy(path, types), None, boundary=path == "")

    @functools.cached_property
    def _types(self) -> list[int]:
        """The positions of rules whose keys are types."""
        return [i for i, rule in enumerate(self.rules) if isinstance(rule.key, type)]

    @functools.cached_property
    def _find_pattern(self) -> Callable[[str], int]:
        """The function that finds the position of the first rule whose pattern covers a path."""
        return find_first_pattern([rule.key for rule in self.rules])

    def loss_scale(self) -> LossScale:
        """Returns a dynamic loss scale if any policy of the map computes in float16, else a no-op."""
        scales = [policy.loss_scale() for policy in list_policies(self.with_default(default_policy()))]
        return next((s for s in scales if isinstance(s, DynamicLossScale)), NoOpLossScale())

    def unused(self, modules: Iterable[str] | Mapping[str, type]) -> tuple[Key, ...]:
        """Returns the keys that no module gets its policy from: they match nothing, or an earlier rule hides them.

        Args:
          modules: paths of a model's modules, or a mapping from paths to types.

        >>> import jmp_policy as jmp
        >>> jmp.PolicyMap({"a": "bfloat16", "a/b": "float32", "haed": "float32"}).unused(["", "a", "a/b", "head"])
        ('a/b', 'haed')
        """
        types = modules if isinstance(modules, Mapping) else dict.fromkeys(modules)
        deciding = {id(self.match(path, types).rule) for path in types}
        return tuple(rule.key for rule in self.rules if id(rule) not in deciding)

    def explain_unused(self, modules: Iterable[str] | Mapping[str, type]) -> list[str]:
        """Returns a sentence for each of the first five unused keys, with the reason, and one that names the others.

        >>> import jmp_policy as jmp
        >>> jmp.PolicyMap({"haed": "float32"}).explain_unused(["", "head"])
        ["policy rule 'haed' matches no module; the closest path is 'head'"]
        """
        types = modules if isinstance(modules, Mapping) else dict.fromkeys(modules)
        unused = self.unused(types)
        explained = []
        for rule in self.rules:
            if rule.key in unused[:_EXPLAINED]:
                # The earlier rule that covers the same modules, if there are any, hides it.
                covered = next((path for path in types if rule.covers(path, types)), None)
                hiding = None if covered is None else self.match(covered, types).rule
                explained.append(explain_unused_key(rule.key, hiding and hiding.key, types))
        rest = [spell_key(key) for key in unused[_EXPLAINED:]]
        if rest:
            more = f" and {len(rest) - _EXPLAINED} more" if len(rest) > _EXPLAINED else ""
            explained.append(f"other policy rules that decide nothing: {', '.join(rest[:_EXPLAINED])}{more}")
        return explained

    def get_config(self) -> dict[str, Any]:
        """Returns the map as lists, dictionaries and strings, for JSON; a type becomes its module and name."""
        return {
            "rules": [[write_key(rule.key), rule.policy.get_config()] for rule in self.rules],
            "default": None if self.default is None else self.default.get_config(),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "PolicyMap":
        """Returns the map of a `get_config()`.

        No code runs: the types of a config are found in Flax and in Python modules that are imported already.

        Raises:
          ValueError: the config has another form, or a type in it cannot be found.
        """
        if not isinstance(config, Mapping) or config.keys() != {"rules", "default"}:
            got = quote(sorted(config, key=str) if isinstance(config, Mapping) else config)
            raise ValueError(f"A map's config has the keys 'rules' and 'default', got {got}. {_show_config()}")
        if not isinstance(config["rules"], list | tuple):
            wrong = f"The rules {quote(config['rules'])} of a PolicyMap's config are not a list"
            raise ValueError(f"{wrong}. {_show_config()}")
        for rule in config["rules"]:
            if not isinstance(rule, list | tuple) or len(rule) != 2:
                raise ValueError(f"The rule {quote(rule)} of a PolicyMap's config is not a pair. {_show_config()}")
        rules = [(read_key(key, _show_config()), Policy.from_config(policy)) for key, policy in config["rules"]]
        return cls(rules, None if config["default"] is None else Policy.from_config(config["default"]))

    def with_default(self, default: "Policy | PolicyMap") -> "PolicyMap":
        """Returns this map with a missing default filled in."""
        if self.default is not None:
            return self
        if isinstance(default, PolicyMap):
            return PolicyMap([*_rule_pairs(self.rules), *_rule_pairs(default.rules)], default.default)
        return PolicyMap(_rule_pairs(self.rules), default)

    def _default_policy(self, path: str, types: Mapping[str, Any]) -> Policy:
        default = self.default or default_policy()
        return default.resolve(path, types) if isinstance(default, PolicyMap) else default

    def __repr__(self) -> str:
        rules = ", ".join(f"{spell_key(rule.key)}: {str(rule.policy)!r}" for rule in self.rules)
        return f"PolicyMap({{{rules}}}, default={None if self.default is None else str(self.default)!r})"

    def __reduce__(self) -> tuple:  # without the hash, which is of this process
        return PolicyMap, (_rule_pairs(self.rules), self.default)


def default_policy() -> Policy | PolicyMap:
    """Returns the policy that `None` means: float32 unless `set_default_policy` or `use_policy` set another.

    `with_policy` and `autocast` read it when they are applied. Other code is not affected.

    >>> import jmp_policy as jmp
    >>> jmp.default_policy().name
    'float32'
    """
    return read_default()


def match_policy(given: Policy | PolicyMap, path: str, module_type: type | Mapping[str, type] | None = None) -> Match:
    """Finds the policy of the module at `path` under a policy or map. Arguments as for `PolicyMap.resolve`."""
    if isinstance(given, PolicyMap):
        return given.match(path, module_type)
    return Match(given, None, boundary=False)


def list_policies(given: Policy | PolicyMap) -> list[Policy]:
    """Lists a policy itself, or the policies of a map."""
    if isinstance(given, Policy):
        return [given]
    policies = [rule.policy for rule in given.rules]
    return policies if given.default is None else [*policies, given.default]


def spell_rules(given: Policy | PolicyMap) -> list[tuple[str, str]]:
    """Lists pairs of a key as in code and its policy; of the default, or of a policy itself, without a key."""
    if isinstance(given, Policy):
        return [("", str(given))]
    pairs = [(spell_key(rule.key), str(rule.policy)) for rule in given.rules]
    return [*pairs, ("", str(given.default))]


def _rule_pairs(rules: Iterable[MapRule]) -> list[tuple[Key, Policy]]:
    return [(rule.key, rule.policy) for rule in rules]


def _check_pairs(rules: Any) -> Iterable[Any]:
    if isinstance(rules, str | PolicyMap) or not isinstance(rules, Iterable):
        raise TypeError(
            f"The rules of a PolicyMap are a mapping or pairs, got {describe(rules)}. "
            "For example: PolicyMap({'head': 'float32'}, default='mixed_bfloat16')."
        )
    return rules


def _parse_rule(pair: tuple[Key, Spec], position: int) -> MapRule:
    where = f"rule {position} of a PolicyMap"
    try:
        key, spec = pair
    except (TypeError, ValueError):
        raise TypeError(f"{quote(pair)}, {where}, is not a pair. For example: ('head', 'float32').") from None
    check_rule_key(key, where)
    return MapRule(key, _parse_rule_policy(spec, f"for key {spell_key(key)}, {where}"))


def _parse_rule_policy(spec: Spec, where: str) -> Policy:
    spec = spec.__jmp_policy__() if hasattr(spec, "__jmp_policy__") else spec
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, PolicyMap) or spec is None:
        raise ValueError(f"{quote(spec)} {where} is not the policy of one module. For example: 'mixed_bfloat16'.")
    is_nested = isinstance(spec, Mapping) and spec and "param_dtype" not in spec
    if is_nested:
        inner = next(iter(spec))
        raise ValueError(
            f"{quote(spec)} {where} is not the policy of one module: rules do not nest, and paths have slashes. "
            f"For example: {{'head/{inner if isinstance(inner, str) else 'dense'}': 'mixed_bfloat16'}}."
        )
    try:
        dtype: Any = spec
        return parse_policy(spec) if isinstance(spec, str) else Policy(*[parse_dtype(dtype)] * 3)
    except ValueError as error:
        raise ValueError(f"{error} It stands {where}.") from None


def _show_config() -> str:
    return f"For example: {PolicyMap({'head': 'float32'}).get_config()}."


def make_map(scopes: Sequence[str], kept: Collection[str], policy: Policy, kept_policy: Policy) -> PolicyMap:
    """Makes the map that gives `kept` scopes `kept_policy` and the others `policy`; only the root casts its outputs."""
    kept_policy = kept_policy.replace(output_dtype=None)
    return assign_policies({scope: kept_policy if scope in kept else policy for scope in scopes}, policy)


def assign_policies(wanted: Mapping[str, Policy], default: Policy) -> PolicyMap:
    """Makes the map that gives each scope its policy; only the root, by default with `default`, casts its outputs."""
    inner = {path: policy.replace(output_dtype=None) for path, policy in {"": default, **wanted}.items()}
    outer = {path: next(path for path in reversed(list_paths_to(path)[:-1]) if path in inner) for path in inner if path}
    changed = sorted((path for path in outer if inner[path] != inner[outer[path]]), key=lambda path: -path.count("/"))
    return PolicyMap([(re.escape(path), inner[path]) for path in changed], wanted.get("", default))
