"""What holds inside an attached module while one of its methods runs."""

import contextlib
import contextvars
import dataclasses
import functools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from .._memory import remember_on_class
from .._policy import Policy
from .._policy_map import MapRule, Match, PolicyMap
from ._place import PLACE, Place, path_of


class _Current:
    """The frame in charge. Part of the key of every jit cache: the program of a jitted submodule depends on it.

    JAX never lets go of such a key, so it is a reference that keeps neither the frame nor its classes alive.
    """

    def __init__(self) -> None:
        self._reference = jax.make_user_context(None)

    @property
    def value(self) -> Any:
        """The frame, or `None`."""
        reference = self._reference.value
        return None if reference is None else reference()

    def __call__(self, frame: "Frame") -> AbstractContextManager[Any]:
        """The context in which a frame is in charge."""
        return self._reference(frame.reference)

    def __reduce__(self) -> str:  # by its name, for what pickles functions by value
        return "CURRENT"


CURRENT = _Current()


# The types of the modules met in the outermost call that is running, by path. No cache may depend on what is read here:
# all that it decides for a program, `Frame.rule` says too.
_MET: contextvars.ContextVar[dict[str, type[nn.Module]]] = contextvars.ContextVar("modules met")


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """The inside of an attached module: which policy holds at which path.

    Frames of the same values are one object. They are looked up with every cache of JAX's while a call is traced,
    which is why they are compared by identity.

    Attributes:
      owner: the policied class of the attached module.
      path: where it stands in its model.
      policy: the policy it was given.
      inferred: what stands for a compute dtype that a policy leaves open: that of the first floating input of the
        attached module, or of the innermost one around that a rule matches which leaves it open.
      rule: the rule of the policy map that covers the module whose method is running, if one does.
    """

    owner: type[nn.Module]
    path: tuple[str, ...]
    policy: Policy | PolicyMap
    inferred: np.dtype | None
    rule: MapRule | None

    @functools.cached_property
    def reference(self) -> "weakref.ref[Frame]":
        """What stands for the frame where it is not to be kept alive."""
        return weakref.ref(self)

    @functools.cached_property
    def attachment(self) -> "Frame":
        """What all frames inside one attached module have in common."""
        return frame_of(self.owner, self.path, self.policy, None)

    @functools.cached_property
    def place(self) -> Place:
        """Where the attached module stands in the model that was given the policy."""
        return getattr(self.owner, PLACE)

    @functools.cached_property
    def has_paths(self) -> bool:
        """Whether a rule may tell modules of equal fields apart by where they stand."""
        return isinstance(self.policy, PolicyMap) and any(isinstance(rule.key, str) for rule in self.policy.rules)

    def belongs_to(self, module: nn.Module) -> bool:
        """Whether `module` is the attached module itself, or what a lifted transform (`nn.jit`) clones it to inside."""
        return self.path == path_of(module) and issubclass(type(module), self.owner)

    def match(self, module: nn.Module) -> Match:
        """The policy of a module inside; the attached module's boundary is the frame's own, if that is one."""
        if isinstance(self.policy, Policy):
            return Match(self._resolved(self.policy), None, boundary=False)
        names, kind, met = path_of(module)[len(self.path) :], type(module), _MET.get()
        path = self.place.path(names)
        known = met if met.setdefault(path, kind) is kind else met | {path: kind}
        found = self.place.match(self.policy, names, known)
        is_frames = names == () and self.place.boundary
        return Match(self._resolved(found.policy), found.rule, found.boundary and not is_frames)

    def under(self, rule: MapRule | None) -> "Frame":
        """The frame that holds while a method of a module runs that this rule covers.

        The modules inside compute by that rule, and the program of a jitted one (`nn.jit`), or of a jitted function
        that runs one by `.apply`, must not be taken for that of its like elsewhere.
        """
        return self if rule is self.rule else frame_of(self.owner, self.path, self.policy, self.inferred, rule)

    def inferring(self, dtype: np.dtype | None) -> "Frame":
        """The frame in which this dtype stands for one left open."""
        return frame_of(self.owner, self.path, self.policy, dtype, self.rule)

    def warnings(self, module: nn.Module) -> list[str]:
        """What to say, when the call of the attached module is over, of rules that decided for no module."""
        if isinstance(self.policy, Policy) or self.place.lineage:  # they may be for modules of nnx
            return []
        # Those inside a jitted module are met only once: all that were met in models of one structure count.
        structure = jax.tree.structure(module.variables.get("params"))
        known = self._met_before.setdefault(structure, weakref.WeakValueDictionary())
        known.update(_MET.get())
        return self.policy.explain_unused(dict(known))

    @functools.cached_property
    def _met_before(self) -> dict[Any, weakref.WeakValueDictionary[str, type[nn.Module]]]:
        return {}

    def _resolved(self, policy: Policy) -> Policy:
        return policy if policy.compute_dtype is not None else policy.replace(compute_dtype=self.inferred)


@remember_on_class
def frame_of(
    owner: Any,
    path: tuple[str, ...],
    policy: Policy | PolicyMap,
    inferred: np.dtype | None,
    rule: MapRule | None = None,
) -> Frame:
    """The one frame of these values."""
    return Frame(owner, path, policy, inferred, rule)


@contextlib.contextmanager
def outermost_call(frame: Frame) -> Iterator[None]:
    """The context in which the call of an attached module runs: its frame is in charge, and no module was met yet."""
    before = _MET.set({})
    try:
        with CURRENT(frame):
            yield
    finally:
        _MET.reset(before)
