"""Keras's mutable map from layer paths to dtype policies, and its global policy, which is our default policy."""

import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from ..._base import quote, shorten
from ...policy import (
    Policy as JmpPolicy,
    PolicyMap,
    PolicySpec,
    covers_path,
    default_origin,
    default_policy,
    set_default_policy,
)
from ._dtype_policy import DTypePolicy
from ._find_dtype_policy import convert_policy, find_dtype_policy, parse_dtype_policy, serialize
from ._loss_scale import Policy


class DTypePolicyMap(DTypePolicy, MutableMapping):
    """A mutable mapping from layer paths, or patterns of them, to dtype policies.

    A lookup returns the policy of the exact key, else of the one pattern that matches the path (`re.fullmatch`), else
    the default. Layers do not inherit from the layers around them. `jmp_policy.get_policy` converts the current
    contents to a `PolicyMap`, where a rule also covers the layers inside: deeper keys come first there, and exact keys
    before patterns.

    Args:
      default_policy: a dtype policy or the name of one; `None` for the global policy at the time of a lookup.
      policy_map: the initial contents; the dictionary is copied, unlike in Keras.

    Raises:
      TypeError: `policy_map` is not a dictionary, or a key is not a string.
      ValueError: a value is not a dtype policy, or a key is not a valid pattern.

    >>> import jmp_policy as jmp
    >>> from jmp_policy.compat import keras
    >>> policies = keras.DTypePolicyMap("mixed_bfloat16")
    >>> policies["head"] = "float32"
    >>> policies["head"], policies["body"]
    (<DTypePolicy "float32">, <DTypePolicy "mixed_bfloat16">)
    >>> jmp.get_policy(policies)
    PolicyMap({'head': 'params=float32,compute=float32,output=float32'},
      default='params=float32,compute=bfloat16,output=bfloat16')
    """

    def __init__(self, default_policy: PolicySpec = None, policy_map: dict[str, Any] | None = None):
        if policy_map is not None and not isinstance(policy_map, dict):
            raise TypeError(
                "If specified, `policy_map` must be a dict. "
                f"Received: policy_map={quote(policy_map)} of type {type(policy_map)}"
            )
        if isinstance(default_policy, DTypePolicyMap):  # maps do not nest
            default_policy = default_policy._default
        self._default = None if default_policy is None else _policy_of(default_policy)
        self._policies: dict[str, DTypePolicy] = {}
        self.update(policy_map or {})

    @property
    def default_policy(self) -> DTypePolicy:
        """Policy of all other layers; the global policy by default."""
        return parse_dtype_policy(None) if self._default is None else self._default

    @property
    def name(self) -> str:
        """`"map_"` and the name of the default policy."""
        return "map_" + self.default_policy.name

    @property
    def _policy(self) -> JmpPolicy:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.default_policy.__jmp_policy__()

    @property
    def quantization_mode(self) -> str | None:
        """Quantization mode of the default policy."""
        return self.default_policy.quantization_mode

    def __getitem__(self, key: str) -> DTypePolicy:
        if key in self._policies:
            return self._policies[key]
        matching = [pattern for pattern in self._policies if covers_path(pattern, key)]
        if len(matching) > 1:
            raise ValueError(
                f"Path {quote(key)} matches multiple dtype policy specification keys: {quote(matching)}. Please make "
                "sure each path only matches at most one dtype policy specification key in the DTypePolicyMap."
            )
        return self._policies[matching[0]] if matching else self.default_policy

    def __setitem__(self, key: str, policy: PolicySpec) -> None:
        if key in self._policies:
            raise ValueError(
                f"{shorten(key)} already exist in the DTypePolicyMap with value {self._policies[key]}. "
                "Please make sure to not use duplicated keys."
            )
        if not isinstance(key, str):
            raise TypeError(f"A key of a DTypePolicyMap is a path or a pattern, got {quote(key)}. For example: 'head'.")
        value = _policy_of(policy)
        PolicyMap({key: value.__jmp_policy__()})  # raises for a bad pattern
        self._policies[key] = value

    def __delitem__(self, key: str) -> None:
        del self._policies[key]

    def __contains__(self, key: object) -> bool:
        return key in self._policies

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def get_config(self) -> dict[str, Any]:
        """Returns the map as dictionaries and strings; it is not changed."""
        return {
            "default_policy": None if self._default is None else serialize(self._default),
            "policy_map": {key: serialize(policy) for key, policy in self._policies.items()},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Mapping[str, type] | None = None) -> Any:
        """Returns the map of a `get_config()`; `custom_objects` are further policy classes, by name."""
        policies = {key: _policy_of(spec, custom_objects) for key, spec in config["policy_map"].items()}
        default = config["default_policy"]
        return cls(None if default is None else _policy_of(default, custom_objects), policies)

    def __jmp_policy__(self) -> PolicyMap:
        rules = [(key, policy.__jmp_policy__()) for key, policy in self._policies.items()]
        default = None if self._default is None else self._default.__jmp_policy__()
        # Deeper keys come first, and exact keys before patterns.
        return PolicyMap(sorted(rules, key=lambda rule: (-rule[0].count("/"), re.escape(rule[0]) != rule[0])), default)

    def __eq__(self, other: object) -> bool:
        return type(other) is DTypePolicyMap and self.get_config() == other.get_config()

    __hash__ = None  # pyright: ignore[reportAssignmentType] # mutable

    def __repr__(self) -> str:
        default = None if self._default is None else self._default.name
        mapping = [(key, policy.name) for key, policy in self._policies.items()]
        return f"<DTypePolicyMap default_policy={default}, mapping={mapping}>"


def _policy_of(spec: PolicySpec, custom_objects: Mapping[str, type] | None = None) -> DTypePolicy:
    return find_dtype_policy(spec, "the assigned value", custom_objects)


def dtype_policy() -> DTypePolicy:
    """Returns the global policy: `jmp_policy.default_policy()` as a dtype policy or map.

    It is the object that was set, here or by `jmp_policy.use_policy`, with its name, class and loss scale. A map that
    was changed since then is returned with its contents at that time.

    Raises:
      ValueError: the default policy is a `PolicyMap` with type keys, or quantizes to int8 with float16 compute, which
        Keras cannot express.

    >>> from jmp_policy.compat import keras
    >>> keras.dtype_policy()
    <DTypePolicy "float32">
    """
    current, origin = default_policy(), default_origin()
    if isinstance(origin, DTypePolicy):
        return origin
    if isinstance(current, JmpPolicy):
        return convert_policy(current)
    policies = DTypePolicyMap(current.default)
    for rule in current.rules:
        if not isinstance(rule.key, str):
            raise ValueError(
                f"The default policy has the module type {rule.key.__qualname__} as a key: {quote(current)}."
            )
        policies[rule.key] = rule.policy
    return policies


def set_dtype_policy(policy: DTypePolicy | str) -> None:
    """Sets the global policy, which is the default policy of `jmp_policy.set_default_policy`.

    It affects later calls of `with_policy` only.

    Args:
      policy: a dtype policy, a `DTypePolicyMap` (its current contents) or the name of a policy.

    Raises:
      ValueError: `policy` is none of these.

    >>> from jmp_policy.compat import keras
    >>> keras.set_dtype_policy("mixed_bfloat16")
    >>> keras.dtype_policy()
    <DTypePolicy "mixed_bfloat16">
    >>> keras.set_dtype_policy("float32")
    """
    if isinstance(policy, str):
        policy = parse_dtype_policy(policy)
    if not isinstance(policy, DTypePolicy):
        raise ValueError(
            "Invalid `policy` argument. Expected the string name of a policy (such as 'mixed_float16') or a "
            f"`DTypePolicy` instance. Received: policy={quote(policy)} (of type {type(policy)})"
        )
    set_default_policy(policy)


def set_policy(policy: DTypePolicy | str | None) -> None:
    """Like `set_dtype_policy`, but a name sets the legacy `Policy` with its loss scale, and `None` sets float32.

    >>> from jmp_policy.compat import keras
    >>> keras.set_policy("mixed_float16")
    >>> type(keras.global_policy().loss_scale).__name__
    'DynamicLossScale'
    >>> keras.set_policy(None)
    """
    if policy is None:
        set_dtype_policy("float32")
    else:
        set_dtype_policy(Policy(policy) if isinstance(policy, str) else policy)


global_policy = dtype_policy
set_global_policy = set_dtype_policy
