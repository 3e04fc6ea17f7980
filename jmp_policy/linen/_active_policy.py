"""What holds inside an attached module while one of its methods runs."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from .._base import ACTIVE_POLICY, remember_on_class
from ..modules import is_in_full_precision, widen_policy
from ..modules.common import describe_written_dtypes
from ..policy import MapRule, Match, Policy, PolicyMap
from ._fields import AUTOCAST_EXAMPLE
from ._place import ModulePlace, calling, path_of

CLASS_POLICY = "_jmp_class_policy"
"""The attribute of a made class that holds its `ClassPolicy`."""


@dataclasses.dataclass(frozen=True, eq=False)
class ClassPolicy:
    """What a class was given by `with_policy`, which the class carries in one attribute.

    Subclasses that an author derives from the class inherit it.

    Attributes:
      base: the class without a policy.
      policy: the policy or map.
      keep: names of arguments of its public methods that enter uncast.
      place: where its modules stand in the model that was given the policy.
      owner: the class that was made of `base`, and carries this.
    """

    base: type[nn.Module]
    policy: Policy | PolicyMap
    keep: frozenset[str]
    place: ModulePlace
    owner: type[nn.Module]


def find_class_policy(target: object) -> ClassPolicy | None:
    """What a class, or the class of a module, was given by `with_policy`; `None` if nothing."""
    return getattr(target, CLASS_POLICY, None)


def read_class_policy(target: object) -> ClassPolicy:
    """What a class with a policy, or the class of a module with one, was given by `with_policy`."""
    return getattr(target, CLASS_POLICY)


class _CurrentPolicy:
    """The active policy. Part of the key of every jit cache: the program of a jitted submodule depends on it.

    JAX never lets go of such a key, so it is a reference that keeps neither the policy nor its classes alive.
    """

    def __init__(self) -> None:
        self._reference = ACTIVE_POLICY

    @property
    def value(self) -> Any:
        """The active policy, or `None`."""
        reference = self._reference.value
        return None if reference is None else reference()

    def __call__(self, active: "ActivePolicy") -> AbstractContextManager[Any]:
        """The context in which a policy is active."""
        return self._reference(active.reference)

    def __reduce__(self) -> str:  # by its name, for what pickles functions by value
        return "CURRENT"


CURRENT = _CurrentPolicy()


class CallNotes:
    """What the running call of an attached module has met so far, by path.

    No cache may depend on it: all that it decides for a program, `ActivePolicy.rule` says too.

    Attributes:
      types: the types of the modules.
      layers: for each layer with a weight, the dtype that its author wrote, if that is wider than its policy's.
    """

    def __init__(self) -> None:
        self.types: dict[str, type[nn.Module]] = {}
        self.layers: dict[str, np.dtype | None] = {}


NOTES: contextvars.ContextVar[CallNotes] = contextvars.ContextVar("NOTES")


@dataclasses.dataclass(frozen=True, eq=False)
class ActivePolicy:
    """What is in force inside an attached module: which policy holds at which path.

    Active policies of the same values are one object, and are compared by identity: JAX looks them up with each of its
    caches while a call is traced.

    Attributes:
      given: what the class of the attached module was given.
      path: where it stands in its model.
      inferred: what stands for a compute dtype that a policy leaves open: the dtype of the first floating input of the
        attached module, or of the innermost module around whose own rule leaves it open.
      rule: the rule of the policy map that covers the module whose method is running, if one does.
    """

    given: ClassPolicy
    path: tuple[str, ...]
    inferred: np.dtype | None
    rule: MapRule | None

    @functools.cached_property
    def policy(self) -> Policy | PolicyMap:
        """The policy that the attached module was given."""
        return self.given.policy

    @functools.cached_property
    def reference(self) -> "weakref.ref[ActivePolicy]":
        """What stands for the active policy where it is not to be kept alive."""
        return weakref.ref(self)

    @functools.cached_property
    def attachment(self) -> "ActivePolicy":
        """What all active policies inside one attached module have in common."""
        return intern_active_policy(self.given.owner, self.path, None)

    @functools.cached_property
    def has_paths(self) -> bool:
        """Whether modules of equal fields may be told apart by where they stand."""
        return isinstance(self.policy, PolicyMap) and any(isinstance(rule.key, str) for rule in self.policy.rules)

    def belongs_to(self, module: nn.Module) -> bool:
        """Whether `module` is the attached module itself, or what a lifted transform (`nn.jit`) clones it to inside."""
        return issubclass(type(module), self.given.owner) and self.path == path_of(module)

    def locate(self, module: nn.Module) -> str:
        """Returns the path of a module inside, as the rules of a map see it."""
        return self.given.place.path(path_of(module)[len(self.path) :])

    def get_rules_inside(self, module: nn.Module, policy: Policy) -> Policy | PolicyMap:
        """Returns the policy or the rules inside of a module that wraps one of nnx.

        Args:
          module: the module.
          policy: what holds for the module itself, which is the boundary of its outputs.
        """
        rest = policy.replace(output_dtype=None)
        if isinstance(self.policy, Policy):
            return rest
        # A rule that covers the module decides for all that is inside, but for what an earlier rule names there.
        covering = self.match(module).rule
        earlier = itertools.takewhile(lambda rule: rule is not covering, self.policy.rules)
        return PolicyMap([(rule.key, rule.policy) for rule in earlier], rest)

    def match(self, module: nn.Module) -> Match:
        """The policy of a module inside; the attached module's boundary is its own, if that is one."""
        found = self._find_match(module)
        return dataclasses.replace(found, policy=widen_policy(found.policy)) if is_in_full_precision() else found

    def _find_match(self, module: nn.Module) -> Match:
        if isinstance(self.policy, Policy):
            return self._match_everywhere
        names, kind, met = path_of(module)[len(self.path) :], type(module), NOTES.get().types
        place = self.given.place
        path = place.path(names)
        known = met if met.setdefault(path, kind) is kind else met | {path: kind}
        found = place.match(self.policy, names, known)
        is_outermost = names == () and place.boundary
        return Match(self._fill_compute_dtype(found.policy), found.rule, found.boundary and not is_outermost)

    def replace_rule(self, rule: MapRule | None) -> "ActivePolicy":
        """What is active while a method of a module runs that this rule covers.

        The modules inside compute by that rule. The program of a jitted one (`nn.jit`), or of a jitted function that
        runs one by `.apply`, must not be taken for the program of its like elsewhere.
        """
        if rule is self.rule:
            return self
        return intern_active_policy(self.given.owner, self.path, self.inferred, rule)

    def replace_inferred(self, dtype: np.dtype | None) -> "ActivePolicy":
        """What is active where this dtype stands for one left open."""
        return intern_active_policy(self.given.owner, self.path, dtype, self.rule)

    def explain_unused(self, module: nn.Module) -> list[str]:
        """What to say, when the call of the attached module is over, of rules that decided for no module."""
        if isinstance(self.policy, Policy) or self.given.place.lineage:  # they may be for modules of nnx
            return []
        # Those inside a jitted module are met only once: all that were met in models of one structure count.
        structure = jax.tree.structure(module.variables.get("params"))
        known = self._known_types.setdefault(structure, weakref.WeakValueDictionary())
        known.update(NOTES.get().types)
        return self.policy.explain_unused(dict(known))

    def explain_written_dtypes(self) -> list[str]:
        """What to say, when the call is over, if written dtypes keep most layers out of the dtype of their policy."""
        layers = NOTES.get().layers
        return describe_written_dtypes(layers, AUTOCAST_EXAMPLE) if set(layers.values()) - {None} else []

    @functools.cached_property
    def _match_everywhere(self) -> Match:
        """What holds for all modules inside, where a policy and not a map was given."""
        assert isinstance(self.policy, Policy)
        return Match(self._fill_compute_dtype(self.policy), None, boundary=False)

    @functools.cached_property
    def _known_types(self) -> dict[Any, weakref.WeakValueDictionary[str, type[nn.Module]]]:
        return {}

    def _fill_compute_dtype(self, policy: Policy) -> Policy:
        return policy if policy.compute_dtype is not None else policy.replace(compute_dtype=self.inferred)


@remember_on_class
def intern_active_policy(
    owner: type, path: tuple[str, ...], inferred: np.dtype | None, rule: MapRule | None = None
) -> ActivePolicy:
    """The one active policy of these values; `owner` is the class that carries what was given."""
    return ActivePolicy(read_class_policy(owner), path, inferred, rule)


@contextlib.contextmanager
def activate_policy(active: ActivePolicy, module: nn.Module) -> Iterator[None]:
    """The context in which a method of an attached module runs: its policy is active, and no module was met yet."""
    before = NOTES.set(CallNotes())
    try:
        with calling(module), CURRENT(active):
            yield
    finally:
        NOTES.reset(before)
