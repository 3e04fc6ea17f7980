"""Policied subclasses of linen modules.

The policy lives in the class, because Flax clones modules field by field and would lose it from an instance. The
subclass has the name of its base, so that the names of parameters are the same with and without a policy.
"""

import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax import linen as nn

from .._call_casts import check_keep
from .._made_classes import find_by_name, make_subclass
from .._memory import remember_on_class
from .._policy import Policy
from .._policy_map import PolicyMap
from ._float8 import differentiable, storable
from ._interceptor import POLICY
from ._methods import KEEP, OWNER, call_wrapped_method, is_public, methods_of, police_methods, with_policied_method
from ._place import PLACE, Place

_BASE = "_jmp_base"


def policied_class(base: Any, policy: Policy | PolicyMap, keep: frozenset[str], place: Place) -> Any:
    """The subclass of a linen module class whose public methods are boundaries; one for each policy.

    Raises:
      ValueError: `keep` names no argument of a public method.
    """
    return _policied_class(_first_to_die(base, policy), base, policy, keep, place)


@remember_on_class
def _policied_class(_: type, base: Any, policy: Policy | PolicyMap, keep: frozenset[str], place: Place) -> Any:
    _check_keep(base, keep)
    namespace = {
        POLICY: policy,
        _BASE: base,
        KEEP: keep,
        PLACE: place,
        "__init_subclass__": classmethod(_init_subclass),
    }
    cls = make_subclass(base, namespace, (policied_class, (base, policy, keep, place)))
    setattr(cls, OWNER, cls)
    # Set now, not in the namespace: Flax wraps what it finds there, and would intercept our boundary, not the method.
    police_methods(cls, dir(base))
    cls._call_wrapped_method = call_wrapped_method
    cls.apply = _policied_apply(base.apply)
    cls.init_with_output = with_policied_method(base.init_with_output)
    cls.__reduce__ = _reduce  # type: ignore[method-assign]
    return cls


def _first_to_die(base: type, policy: Policy | PolicyMap) -> type:
    """The class, or the one among the keys of its map, whose end is the end of its policied class.

    That is the first that no module has under its name: one made by a function, or in a notebook.
    """
    keys = [rule.key for rule in policy.rules if isinstance(rule.key, type)] if isinstance(policy, PolicyMap) else []
    passing = (kind for kind in (base, *keys) if kind.__module__ == "__main__" or find_by_name(kind) is not kind)
    return next(passing, base)


def unpolicied_class(cls: Any) -> Any:
    """The class that a policied class was made of, and any other as it is."""
    return vars(cls).get(_BASE, cls)


def _init_subclass(cls: Any, **kwargs: Any) -> None:
    """Makes the methods of an author's subclass of a policied class boundaries as well, once Flax has wrapped them."""
    super(getattr(cls, OWNER), cls).__init_subclass__(**kwargs)
    police_methods(cls, vars(cls))


def _policied_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.apply` that runs inside the frame, and whose state autodiff combines by max."""
    apply = with_policied_method(apply)

    @functools.wraps(apply)
    def with_state(self: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> Any:
        policy = getattr(self, POLICY)
        return storable(policy, apply(self, differentiable(policy, variables), *args, **kwargs))

    return nn.nowrap(with_state)


def _check_keep(base: Any, keep: frozenset[str]) -> None:
    if keep:
        public = [method for name, method in methods_of(base, dir(base)) if is_public(name)]
        known = [set(inspect.signature(method).parameters) for method in public]
        check_keep(base.__call__, [name for name in keep if not any(name in names for names in known)])


def _reduce(self: nn.Module) -> tuple:
    """Pickles the base class and the policy: a policied class is not found under its name, unless it decorates it."""
    cls: Any = type(self)
    if find_by_name(cls) is cls:
        return copyreg.__newobj__, (cls,), vars(self)  # type: ignore[attr-defined]
    return _rebuild, (unpolicied_class(cls), *(getattr(cls, name) for name in (POLICY, KEEP, PLACE))), vars(self)


def _rebuild(base: Any, policy: Policy | PolicyMap, keep: frozenset[str], place: Place) -> Any:
    return object.__new__(policied_class(base, policy, keep, place))
