"""Policies by module path and module type, and why a rule decides nothing."""

import dataclasses
import difflib
import functools
import importlib
import re
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import jax

from .._base import describe, list_paths_to, parse_dtype, quote
from ..loss_scale import DynamicLossScale, LossScale, NoOpLossScale
from ._block_formats import KeptNVFP4, find_kept_name, keep_module, keeps_names
from ._grammar import parse_policy
from ._policy import Policy, read_default

_SHOWN = 5
"""How many paths a sentence lists."""


def explain_unused_key(key: str | type, hiding: str | type | None, types: Mapping[str, Any]) -> str:
    """A sentence on a rule that decides nothing.

    Args:
      key: the key of the rule.
      hiding: the key of the earlier rule that covers what this one names; `None` if it names nothing.
      types: the types of the model's modules, by path.

    >>> explain_unused_key("haed", None, {"": None, "head": None})
    "policy rule 'haed' matches no module; the closest path is 'head'"
    """
    if hiding is not None:
        return f"policy rule {spell_key(key)} decides nothing: the earlier rule {spell_key(hiding)} hides it"
    if isinstance(key, type):
        near = _find_nearest_type(key, types)
    else:
        near = _name_type(key, types) or _find_nearest_path(key, types)
    return f"policy rule {spell_key(key)} matches no module{near and '; ' + near}"


def spell_key(key: str | type) -> str:
    """A key as messages have it."""
    return repr(key) if isinstance(key, str) else key.__qualname__


def _find_nearest_path(key: str, paths: Iterable[str]) -> str:
    """Names the path that a pattern comes nearest to, as a whole or in its last words."""
    paths = [path for path in paths if path]
    near = difflib.get_close_matches(key, paths, 1, cutoff=0.4)
    if near:
        return f"the closest path is {near[0]!r}"
    depth = key.count("/") + 1
    ends = {"/".join(path.split("/")[-depth:]): path for path in reversed(paths)}  # of paths that end alike the first
    near = difflib.get_close_matches(key, ends, 1, cutoff=0.4)
    if near:
        return f"the closest path is {ends[near[0]]!r}, which r'(.*/)?{near[0]}' matches"
    shown = [*map(repr, paths[:_SHOWN]), *["..."] * (len(paths) > _SHOWN)]
    return f"the model has the paths {', '.join(shown)}" if paths else ""


def _name_type(key: str, types: Mapping[str, Any]) -> str:
    """Proposes the type of modules as the key where a pattern is its name."""
    kind = next((kind for kind in types.values() if isinstance(kind, type) and kind.__name__ == key), None)
    if kind is None:
        return ""
    prefix = {"flax.linen": "nn.", "flax.nnx": "nnx."}
    where = next((short for package, short in prefix.items() if kind.__module__.startswith(package)), "")
    return f"{key} is a type of modules here, whose key is the type itself: {where}{key}, without quotes"


def _find_nearest_type(key: type, types: Mapping[str, Any]) -> str:
    """Names the type of a module that comes nearest to another type: one of nnx has the name of linen's."""
    found = {kind.__qualname__: kind for kind in types.values() if isinstance(kind, type)}
    near = difflib.get_close_matches(key.__qualname__, found, 1, cutoff=0.4)
    return f"the closest type is {found[near[0]].__module__}.{near[0]}" if near else ""


Key = str | type
Spec = Any
K = TypeVar("K", bound=Key)  # the keys of a map may be of fewer types


@dataclasses.dataclass(frozen=True)
class MapRule:
    """One key of a map and the policy of the modules that it covers."""

    key: Key
    policy: Policy

    def matches(self, path: str, module_type: type | None) -> bool:
        """Whether the key names this module itself."""
        if isinstance(self.key, str):
            return re.fullmatch(self.key, path) is not None
        return module_type is not None and issubclass(module_type, self.key)


@dataclasses.dataclass(frozen=True)
class Match:
    """What a map says of one module.

    Attributes:
      policy: the policy that holds there.
      rule: the rule it came from, or `None` where the default holds.
      boundary: whether the rule names the module itself, not one around it; inputs and outputs are cast there.
    """

    policy: Policy
    rule: MapRule | None
    boundary: bool


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class PolicyMap:
    """Ordered rules that give the modules of a model their policies.

    A path is the module names joined by `/`; the root's is `""`. A key covers the modules it matches and everything
    inside them: a string matches by `re.fullmatch` on the path, a type by `isinstance`. Rules are tried in order, the
    first that covers a module wins, and where none does the default holds. Maps are immutable, hashable pytrees
    without leaves, and equal maps are one object.

    Args:
      rules: a mapping, or pairs, of a key and a policy in any spelling that `get_policy` reads, maps excepted.
      default: the policy of everything else; `None` stands for the default policy, as of when the map is applied.

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
    _ranks: dict[tuple[str, weakref.ref[type]], int]

    def __new__(cls, rules: Mapping[K, Spec] | Iterable[tuple[K, Spec]], default: Spec = None) -> "PolicyMap":
        """The one map of these rules."""
        pairs: Iterable[Any] = rules.items() if isinstance(rules, Mapping) else _check_pairs(rules)
        fields = (
            tuple(_parse_rule(pair, i) for i, pair in enumerate(pairs)),
            None if default is None else _parse_rule_policy(default, "as default of a PolicyMap"),
        )
        new = object.__new__(cls)
        vars(new).update(rules=fields[0], default=fields[1], _ranks={})
        with _LOCK:
            return _INTERNED.setdefault(_make_interning_key(*fields), new)

    def __getitem__(self, path: str) -> Policy:
        """The policy of the module at `path`, by the string keys alone."""
        return self.resolve(path)

    def __contains__(self, path: object) -> NoReturn:
        raise TypeError(f"{quote(path)} is in every PolicyMap: all paths have a policy. Ask map.rules for its keys.")

    def __iter__(self) -> NoReturn:
        raise TypeError("A PolicyMap has no end of paths. For its keys: [rule.key for rule in map.rules].")

    def resolve(self, path: str, module_type: type | Mapping[str, type] | None = None) -> Policy:
        """The policy of a module.

        Args:
          path: module names joined by `/`.
          module_type: the module's type; or the types of it and of the modules around it, by path, because a key
            that is a type also covers what is inside.

        >>> import jmp_policy as jmp
        >>> jmp.PolicyMap({dict: "bfloat16"}, "float32").resolve("a/b", {"a": dict, "a/b": list}).name
        'bfloat16'
        """
        return self.match(path, module_type).policy

    def match(self, path: str, module_type: type | Mapping[str, type] | None = None) -> Match:
        """As `resolve`, with the rule that gave the policy."""
        # `dict` is a quick answer; `Mapping` alone is a slow one, and each module of a model asks.
        types = module_type if isinstance(module_type, dict | Mapping) else {path: module_type}
        own = _find_rank(self, path, types.get(path))
        rank = min([own, *(_find_rank(self, outer, types.get(outer)) for outer in list_paths_to(path)[:-1])])
        if rank == len(self.rules):
            return Match(_keep_by_name(self._default_policy(path, types), path), None, boundary=path == "")
        rule = self.rules[rank]
        return Match(_keep_by_name(rule.policy, path), rule, boundary=own == rank)

    def loss_scale(self) -> LossScale:
        """Dynamic if any policy of the map computes in float16, else a no-op.

        >>> import jmp_policy as jmp
        >>> type(jmp.PolicyMap({"head": "float32"}, "mixed_float16").loss_scale()).__name__
        'DynamicLossScale'
        """
        default = self.default or read_default()
        scales = [spec.loss_scale() for spec in (default, *(rule.policy for rule in self.rules))]
        return next((s for s in scales if isinstance(s, DynamicLossScale)), NoOpLossScale())

    def unused(self, modules: Iterable[str] | Mapping[str, type]) -> tuple[Key, ...]:
        """The keys that decide for no module: they match nothing, or an earlier rule always hides them.

        Args:
          modules: the paths of a model's modules, or their types by path.

        >>> import jmp_policy as jmp
        >>> jmp.PolicyMap({"a": "bfloat16", "a/b": "float32", "haed": "float32"}).unused(["", "a", "a/b", "head"])
        ('a/b', 'haed')
        """
        types = modules if isinstance(modules, Mapping) else dict.fromkeys(modules)
        deciding = {id(self.match(path, types).rule) for path in types}
        return tuple(rule.key for rule in self.rules if id(rule) not in deciding)

    def explain_unused(self, modules: Iterable[str] | Mapping[str, type]) -> list[str]:
        """A sentence for each key of `unused`: why it decides nothing, and what it may have meant.

        >>> import jmp_policy as jmp
        >>> jmp.PolicyMap({"haed": "float32"}).explain_unused(["", "head"])
        ["policy rule 'haed' matches no module; the closest path is 'head'"]
        """
        types = modules if isinstance(modules, Mapping) else dict.fromkeys(modules)
        keys = self.unused(types)
        unused = [rule for rule in self.rules if rule.key in keys]
        return [explain_unused_key(rule.key, self._find_hiding_key(rule, types), types) for rule in unused]

    def get_config(self) -> dict[str, Any]:
        """The map as plain lists, dictionaries and strings, for JSON; a type is written as its module and name.

        >>> import jmp_policy as jmp
        >>> jmp.PolicyMap({"head": "float32"}).get_config()["rules"][0][0]
        {'path': 'head'}
        """
        return {
            "rules": [[_write_key(rule.key), rule.policy.get_config()] for rule in self.rules],
            "default": None if self.default is None else self.default.get_config(),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "PolicyMap":
        """The map that `get_config` described; modules that keys name as types are imported.

        Raises:
          ValueError: the config is not of that form, or a type in it cannot be found.
        """
        if not isinstance(config, Mapping) or config.keys() != {"rules", "default"}:
            got = sorted(config) if isinstance(config, Mapping) else repr(config)
            raise ValueError(f"A map's config has the keys 'rules' and 'default', got {got}. {_show_config()}")
        for rule in config["rules"]:
            if not isinstance(rule, list | tuple) or len(rule) != 2:
                raise ValueError(f"The rule {quote(rule)} of a PolicyMap's config is not a pair. {_show_config()}")
        rules = [(_read_key(key), Policy.from_config(policy)) for key, policy in config["rules"]]
        return cls(rules, None if config["default"] is None else Policy.from_config(config["default"]))

    def with_default(self, default: "Policy | PolicyMap") -> "PolicyMap":
        """This map with its open default closed: what it does not cover is left to `default`.

        >>> import jmp_policy as jmp
        >>> jmp.PolicyMap({"head": "float32"}).with_default(jmp.Policy(None, None, None)).default.name
        'infer'
        """
        if self.default is not None:
            return self
        if isinstance(default, PolicyMap):
            return PolicyMap([*_rule_pairs(self.rules), *_rule_pairs(default.rules)], default.default)
        return PolicyMap(_rule_pairs(self.rules), default)

    def _find_hiding_key(self, rule: MapRule, types: Mapping[str, Any]) -> Key | None:
        """The key of the earlier rule that covers what a rule names; `None` if it names no module."""
        covered = next((path for path in types if rule.matches(path, types[path])), None)
        hiding = None if covered is None else self.match(covered, types).rule
        return None if hiding is None else hiding.key

    def _default_policy(self, path: str, types: Mapping[str, Any]) -> Policy:
        default = self.default or read_default()
        return default.resolve(path, types) if isinstance(default, PolicyMap) else default

    def __repr__(self) -> str:
        rules = ", ".join(f"{spell_key(rule.key)}: {str(rule.policy)!r}" for rule in self.rules)
        return f"PolicyMap({{{rules}}}, default={None if self.default is None else str(self.default)!r})"

    def __reduce__(self) -> tuple:  # copies and pickles are the interned object again
        return PolicyMap, (_rule_pairs(self.rules), self.default)


def match_policy(given: Policy | PolicyMap, path: str, module_type: type | Mapping[str, type] | None = None) -> Match:
    """What a policy or a map says of a module: the one place where a path decides.

    Args:
      given: what the model was given.
      path: module names joined by `/`.
      module_type: as for `PolicyMap.resolve`.
    """
    if isinstance(given, PolicyMap):
        return given.match(path, module_type)
    return Match(_keep_by_name(given, path), None, boundary=False)


def reads_names(given: Policy | PolicyMap) -> bool:
    """Whether the quantization of any policy keeps modules by their names."""
    if isinstance(given, Policy):
        return keeps_names(given.quantization)
    default = given.default or read_default()
    return any(keeps_names(rule.policy.quantization) for rule in given.rules) or reads_names(default)


def _keep_by_name(policy: Policy, path: str) -> Policy:
    """A policy as it holds for a module, whose names may keep it in the compute dtype."""
    name = find_kept_name(policy.quantization, path)
    return policy if name is None else _keep(policy, name)  # policies are interned, and equal ones the same object


def forget_name(policy: Policy) -> Policy:
    """A policy as it was given, whatever module it holds for."""
    format = policy.quantization
    return policy.replace(quantization=format.plain) if isinstance(format, KeptNVFP4) else policy


@functools.lru_cache(256)
def _keep(policy: Policy, name: str) -> Policy:
    format: Any = policy.quantization  # of all formats, NVFP4 alone keeps modules
    return policy.replace(quantization=keep_module(format, name))


_INTERNED: weakref.WeakValueDictionary[tuple, PolicyMap] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def _make_interning_key(rules: tuple[MapRule, ...], default: Policy | None) -> tuple:
    """Types by their ids, for the map keeps them alive: a key that did so would never let go of the map."""
    return tuple((id(rule.key) if isinstance(rule.key, type) else rule.key, rule.policy) for rule in rules), default


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
    if isinstance(key, str):
        try:
            re.compile(key)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"The key {quote(key)}, {where}, is not a valid pattern: {error}. {_show_pattern(key)}"
            ) from None
    elif not isinstance(key, type):
        is_module = callable(key) and type(key).__module__ != "builtins"
        example = type(key).__qualname__ if is_module else "'head'"
        raise TypeError(
            f"The key {describe(key)}, {where}, is neither a pattern nor a module type. For example: {example}."
        )
    return MapRule(key, _parse_rule_policy(spec, f"for key {spell_key(key)}, {where}"))


def _show_pattern(key: str) -> str:
    """Shows a valid pattern; of a glob such as `*norm`, the pattern that it stands for."""
    if key.startswith(("*", "?")):
        return f"Keys are regular expressions. For example: {re.sub('[*?]', '.*', key)!r}."
    return "For example: r'block_\\d+/mlp'."


def _parse_rule_policy(spec: Spec, where: str) -> Policy:
    spec = spec.__jmp_policy__() if hasattr(spec, "__jmp_policy__") else spec
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, PolicyMap) or spec is None:
        raise ValueError(f"{quote(spec)} {where} is not the policy of one module. For example: 'mixed_bfloat16'.")
    _check_flat(spec, where)
    try:
        return parse_policy(spec) if isinstance(spec, str) else Policy(*[parse_dtype(spec)] * 3)
    except ValueError as error:
        raise ValueError(f"{error} It stands {where}.") from None


def _check_flat(spec: object, where: str) -> None:
    if isinstance(spec, Mapping) and spec and "param_dtype" not in spec:
        inner = next(iter(spec))
        raise ValueError(
            f"{quote(spec)} {where} is not the policy of one module: rules do not nest, and paths have slashes. "
            f"For example: {{'head/{inner if isinstance(inner, str) else 'dense'}': 'mixed_bfloat16'}}."
        )


_MOST_PATHS = 1 << 16


def _find_rank(rules: PolicyMap, path: str, module_type: type | None) -> int:
    """The place of the first rule that names a module itself, or the number of rules where none does."""
    known, key = rules._ranks, (path, weakref.ref(module_type or _Untyped))
    try:
        return known[key]  # a model of many modules is traced many times
    except KeyError:
        if len(known) >= _MOST_PATHS:
            known.clear()
        ranks = (i for i, rule in enumerate(rules.rules) if rule.matches(path, module_type))
        rank = known[key] = next(ranks, len(rules.rules))
        return rank


class _Untyped:
    """Stands for a module of which the path alone is known."""


def _write_key(key: Key) -> dict[str, str]:
    return {"path": key} if isinstance(key, str) else {"type": f"{key.__module__}:{key.__qualname__}"}


def _show_config() -> str:
    return f"For example: {PolicyMap({'head': 'float32'}).get_config()}."


def _read_key(config: Mapping[str, str]) -> Key:
    if not isinstance(config, Mapping) or not config.keys() & {"path", "type"}:
        wrong = f"The key {quote(config)} of a PolicyMap's config has neither 'path' nor 'type'."
        raise ValueError(f"{wrong} {_show_config()}")
    if "path" in config:
        return config["path"]
    module, _, name = config["type"].partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError, ValueError, TypeError):
        raise ValueError(f"The module type {quote(config['type'])} of a PolicyMap's config cannot be found.") from None
    return found
