"""Subclasses of linen modules with a policy.

The class has the policy, because Flax clones modules field by field and would lose an attribute of an instance. The
subclass has the name of its base, so that the names of parameters do not depend on the policy.
"""

import copyreg
import functools
from collections.abc import Callable
from typing import Any

from flax import linen as nn

from .._base import PyTree, prepare_state, read_state, remember_on_class
from ..modules import check_no_cast
from ..modules.common import find_by_name, make_subclass
from ..policy import Policy, PolicyMap
from ._active_policy import CLASS_POLICY, ClassPolicy, read_class_policy
from ._methods import call_wrapped_method, is_public, list_methods, wrap_entry, wrap_methods
from ._place import ModulePlace
from ._quantized import has_float8_state


def make_policied_class(
    base: type[nn.Module], policy: Policy | PolicyMap, no_cast: frozenset[str], place: ModulePlace
) -> Any:
    """Returns the subclass of a linen class whose public methods are boundaries; the same one for equal arguments."""
    return _make_class(_choose_shortest_lived(base, policy), base, policy, no_cast, place)


@remember_on_class
def _make_class(
    _: type, base: type[nn.Module], policy: Policy | PolicyMap, no_cast: frozenset[str], place: ModulePlace
) -> Any:
    if no_cast:
        public = [method for name, method in list_methods(base, dir(base)) if is_public(name)]
        check_no_cast(base.__call__, no_cast, public)
    recipe = (make_policied_class, (base, policy, no_cast, place))
    cls = make_subclass(base, {"__init_subclass__": classmethod(_init_subclass)}, recipe)
    setattr(cls, CLASS_POLICY, ClassPolicy(base, policy, no_cast, place, owner=cls))
    # Set now, not in the namespace: Flax wraps each method there, and would intercept our boundary instead.
    wrap_methods(cls, dir(base))
    cls._call_wrapped_method = call_wrapped_method
    apply = wrap_entry(base.apply)
    cls.apply = _keep_state(apply) if has_float8_state(policy) else apply
    cls.init_with_output = wrap_entry(base.init_with_output)
    cls.__reduce__ = _reduce  # type: ignore[method-assign]
    return cls


def _choose_shortest_lived(base: type, policy: Policy | PolicyMap) -> type:
    """Returns the class, or key of its map, that is freed first: one that its module does not have under its name."""
    keys = [rule.key for rule in policy.rules if isinstance(rule.key, type)] if isinstance(policy, PolicyMap) else []
    passing = (kind for kind in (base, *keys) if kind.__module__ == "__main__" or find_by_name(kind) is not kind)
    return next(passing, base)


def unpolicied_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the base of a policied class, or any other class itself."""
    own: ClassPolicy | None = vars(cls).get(CLASS_POLICY)
    return cls if own is None else own.base


def _init_subclass(cls: Any, **kwargs: Any) -> None:
    """Makes the methods of an author's subclass of a policied class boundaries too, once Flax has wrapped them."""
    super(read_class_policy(cls).owner, cls).__init_subclass__(**kwargs)
    wrap_methods(cls, vars(cls))


def _keep_state(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Module.apply` of a model with float8 state, which autodiff combines by max."""

    @functools.wraps(apply)
    def apply_with_state(self: nn.Module, variables: PyTree, *args: Any, **kwargs: Any) -> Any:
        return read_state(apply(self, prepare_state(variables, 1.0), *args, **kwargs))

    return nn.nowrap(apply_with_state)


def _reduce(self: nn.Module) -> tuple:
    """Pickles the base class and the policy, unless Python finds the policied class by name."""
    cls: Any = type(self)
    if find_by_name(cls) is cls:
        return copyreg.__newobj__, (cls,), vars(self)  # type: ignore[attr-defined]
    given = read_class_policy(cls)
    return _rebuild, (unpolicied_class(cls), given.policy, given.no_cast, given.place), vars(self)


def _rebuild(base: type[nn.Module], policy: Policy | PolicyMap, no_cast: frozenset[str], place: ModulePlace) -> Any:
    return object.__new__(make_policied_class(base, policy, no_cast, place))
