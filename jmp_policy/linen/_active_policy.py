"""The policy that is active inside an attached module while one of its methods runs."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from .._base import ACTIVE_POLICY, IN_FULL_PRECISION, remember_on_class
from ..modules import describe_written_dtypes, widen_policy
from ..policy import MapRule, Match, Policy, PolicyMap
from ..quant import explain_unused_cache
from ._fields import AUTOCAST_EXAMPLE
from ._place import ModulePlace, calling, path_of

CLASS_POLICY = "_jmp_class_policy"
"""The attribute of a made class that holds its `ClassPolicy`."""


@dataclasses.dataclass(frozen=True, eq=False)
class ClassPolicy:
    """The arguments of `with_policy`, in an attribute of the class. Subclasses inherit it."""

    base: type[nn.Module]  # the class without a policy
    policy: Policy | PolicyMap  # the policy or map
    no_cast: frozenset[str]  # names of arguments of its public methods that are not cast
    place: ModulePlace  # the place of its modules in the model that was given the policy
    owner: type[nn.Module]  # the class that was made of `base`


def read_class_policy(target: object) -> ClassPolicy:
    return getattr(target, CLASS_POLICY)


class _CurrentPolicy:
    """The active policy, as a context that is part of every jit key. The reference is weak: JAX never frees a key."""

    @property
    def value(self) -> Any:
        """The active policy, or `None`."""
        reference = ACTIVE_POLICY.value
        return None if reference is None else reference()

    def __call__(self, active: "ActivePolicy") -> AbstractContextManager[Any]:
        """Activates a policy for a `with` block."""
        return ACTIVE_POLICY(active.reference)

    def __reduce__(self) -> str:  # by its name, for what pickles functions by value
        return "CURRENT"


CURRENT = _CurrentPolicy()


class CallNotes(NamedTuple):
    """The modules that a running call has met, by path. No cache may depend on it."""

    types: dict[str, type[nn.Module]]  # the types of the modules
    # For each layer with a weight, the author's dtype if it is wider than the policy's, else `None`.
    layers: dict[str, np.dtype | None]


NOTES: contextvars.ContextVar[CallNotes] = contextvars.ContextVar("NOTES")


@dataclasses.dataclass(frozen=True, eq=False)
class ActivePolicy:
    """The policy in force inside an attached module. Equal ones are one object: JAX compares them at each look-up."""

    given: ClassPolicy  # the `ClassPolicy` of the attached module
    path: tuple[str, ...]  # the path of that module in its model
    # The dtype in place of an open compute dtype, from the first floating input of the attached module, or of the
    # innermost module whose own rule leaves it open.
    inferred: np.dtype | None
    # Tells apart the jit keys of modules that different rules cover: the policy of the rule or the rule itself, and
    # `None` for the default.
    covering: Policy | MapRule | None
    _known_types: dict[Any, weakref.WeakValueDictionary[str, type[nn.Module]]] = dataclasses.field(default_factory=dict)
    _known_caches: list[bool] = dataclasses.field(default_factory=list)
    _known_applied: list[bool] = dataclasses.field(default_factory=list)
    _known_weights: dict[Any, bool | None] = dataclasses.field(default_factory=dict)
    _known_reads: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def policy(self) -> Policy | PolicyMap:
        """The policy or map that the attached module was given."""
        return self.given.policy

    @functools.cached_property
    def reference(self) -> "weakref.ref[ActivePolicy]":
        """A weak reference, for the jit key."""
        return weakref.ref(self)

    @functools.cached_property
    def attachment(self) -> "ActivePolicy":
        """The active policy that all those inside one attached module share."""
        return intern_active_policy(self.given.owner, self.path, None)

    @functools.cached_property
    def has_paths(self) -> bool:
        """True if modules with equal fields may have different policies at different paths."""
        return isinstance(self.policy, PolicyMap) and any(isinstance(rule.key, str) for rule in self.policy.rules)

    def belongs_to(self, module: nn.Module) -> bool:
        """True for the attached module itself, and for its clones inside a lifted transform (`nn.jit`)."""
        return issubclass(type(module), self.given.owner) and self.path == path_of(module)

    def locate(self, module: nn.Module) -> str:
        """Returns the path of a module, as the rules of a map see it."""
        return self.given.place.path(path_of(module)[len(self.path) :])

    def get_rules_inside(self, module: nn.Module, policy: Policy) -> Policy | PolicyMap:
        """Returns the policy or map inside of a module that wraps an nnx one. The outer module casts the outputs."""
        rest = policy.replace(output_dtype=None)
        if isinstance(self.policy, Policy):
            return rest
        # The rule of the module decides inside too, except for modules that an earlier rule names.
        covering = self.match(module).rule
        earlier = itertools.takewhile(lambda rule: rule is not covering, self.policy.rules)
        return PolicyMap([(rule.key, rule.policy) for rule in earlier], rest)

    def match(self, module: nn.Module) -> Match:
        """Returns the policy of a module inside, and its rule. The attached module is not a boundary a second time."""
        found = self._find_match(module)
        return dataclasses.replace(found, policy=widen_policy(found.policy)) if IN_FULL_PRECISION.value else found

    def _find_match(self, module: nn.Module) -> Match:
        if isinstance(self.policy, Policy):
            return self._match_everywhere
        whole, kind, met = path_of(module), type(module), NOTES.get().types
        names, place = whole[len(self.path) :], self.given.place
        if len(whole) - len(module.path) > len(self.path):
            self.attachment._known_applied.append(True)
        path = place.path(names)
        known = met if met.setdefault(path, kind) is kind else met | {path: kind}
        found = place.match(self.policy, names, known)
        is_outermost = names == () and place.boundary
        return Match(self._fill_compute_dtype(found.policy), found.rule, found.boundary and not is_outermost)

    def replace(self, inferred: np.dtype | None, rule: MapRule | None) -> "ActivePolicy":
        """Returns the active policy for a module that this rule covers, which is part of the jit key.

        Rules of equal policies share a key, so that JAX traces its own jitted functions once for all of them. But for a
        jitted function that runs modules by `.apply`, the place of its caller decides which rules hold.
        """
        covering: Policy | MapRule | None = rule
        if rule is not None and not self.attachment._known_applied:
            assert isinstance(self.policy, PolicyMap)
            covering = None if rule.policy is self.policy.default else rule.policy
        if covering is self.covering and inferred is self.inferred:
            return self
        return intern_active_policy(self.given.owner, self.path, inferred, covering)

    def explain_unused(self, module: nn.Module) -> list[str]:
        """Returns warnings, after a call, about rules that cover no module, and a cache that no layer has."""
        cache = [] if self.attachment._known_caches else explain_unused_cache(self.policy)
        if isinstance(self.policy, Policy) or self.given.place.lineage:  # its rules may name nnx modules
            return cache
        # Modules inside a jitted one are met in the first call only, so all calls of an equal structure count.
        structure = jax.tree.structure(module.variables.get("params"))
        known = self._known_types.setdefault(structure, weakref.WeakValueDictionary())
        known.update(NOTES.get().types)
        return [*self.policy.explain_unused(dict(known)), *cache]

    def note_cache(self) -> None:
        """Records that a layer inside stores its cache as the policy says, or may do so."""
        self.attachment._known_caches.append(True)

    def explain_written_dtypes(self) -> list[str]:
        """Returns a warning if the dtypes that authors wrote keep most layers out of the compute dtype."""
        layers = NOTES.get().layers
        return describe_written_dtypes(layers, AUTOCAST_EXAMPLE) if set(layers.values()) - {None} else []

    @functools.cached_property
    def _match_everywhere(self) -> Match:
        """The match of all modules inside, under a single policy."""
        assert isinstance(self.policy, Policy)
        return Match(self._fill_compute_dtype(self.policy), None, boundary=False)

    def _fill_compute_dtype(self, policy: Policy) -> Policy:
        return policy if policy.compute_dtype is not None else policy.replace(compute_dtype=self.inferred)


@remember_on_class
def intern_active_policy(
    owner: type, path: tuple[str, ...], inferred: np.dtype | None, covering: Policy | MapRule | None = None
) -> ActivePolicy:
    """Returns the one active policy with these values; `owner` is the class with the `ClassPolicy`."""
    return ActivePolicy(read_class_policy(owner), path, inferred, covering)


@contextlib.contextmanager
def activate_policy(active: ActivePolicy, module: nn.Module) -> Iterator[None]:
    """Activates the policy of an attached module, without any modules met so far."""
    before = NOTES.set(CallNotes({}, {}))
    try:
        with calling(module), CURRENT(active):
            yield
    finally:
        NOTES.reset(before)
