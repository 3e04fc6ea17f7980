"""Policied subclasses of linen modules.

The policy lives in the class, because Flax clones modules field by field and would lose it from an instance. The
subclass has the name of its base, so that the names of parameters are the same with and without a policy.
"""

import contextlib
import copyreg
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from flax import linen as nn

from .._boundary import cast_arguments, cast_result, check_keep, matmul_precision
from .._made_classes import find_by_name, make_subclass
from .._memory import remember_on_class
from .._messages import warn_once
from .._policy import Policy
from .._policy_map import PolicyMap
from ..explanation._observation import observe_call
from ._carry import as_returned
from ._float8 import differentiable, storable
from ._frame import CURRENT, Frame, frame_of, outermost_call
from ._interceptor import POLICY, interceptor
from ._path import calling, path_of
from ._place import PLACE, Place
from ._quantized import quantized_weights_explained
from ._written import layers_noted, written_explained

_BASE = "_jmp_base"
_KEEP = "_jmp_keep"
_OWNER = "_jmp_owner"
_BOUNDARY = "_jmp_boundary"


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
        _KEEP: keep,
        PLACE: place,
        "__init_subclass__": classmethod(_init_subclass),
    }
    cls = make_subclass(base, namespace, (policied_class, (base, policy, keep, place)))
    setattr(cls, _OWNER, cls)
    # Set now, not in the namespace: Flax wraps what it finds there, and would intercept our boundary, not the method.
    _police_methods(cls, dir(base))
    cls._call_wrapped_method = _call_wrapped_method
    cls.apply = _policied_apply(base.apply)
    cls.init_with_output = _with_policied_method(base.init_with_output)
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


def at_boundary(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method, or a function of a module, that casts at the outermost call and runs inside its module's frame."""
    if _is_boundary(method):
        return method
    without_casts = inside_frame(method)

    @functools.wraps(method)
    def policied(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        frame: Frame | None = CURRENT.value
        if self.scope is None or (frame is not None and frame.belongs_to(self)):
            return method(self, *args, **kwargs)
        if not getattr(self, PLACE).boundary:
            return without_casts(self, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return _call_in_frame(method, self, args, kwargs)

        return observe_call("/".join(path_of(self)), call, args, kwargs)  # out here, where nothing is cast yet

    setattr(policied, _BOUNDARY, policied)
    return policied


def inside_frame(method: Callable[..., Any]) -> Callable[..., Any]:
    """`setup`, or a private method, that runs inside its module's frame whoever calls it, and casts nothing."""
    if _is_boundary(method):
        return method

    @functools.wraps(method)
    def policied(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        around: Frame | None = CURRENT.value
        if self.scope is None or (around is not None and around.belongs_to(self)):
            return method(self, *args, **kwargs)
        policy = _root_policy(self)
        if policy.compute_dtype is None:
            inferred = getattr(self, PLACE).inferred if around is None else around.inferred
            policy = policy.replace(compute_dtype=inferred)
        with _frame(self, policy.resolve(args, kwargs).compute_dtype):
            return method(self, *args, **kwargs)

    setattr(policied, _BOUNDARY, policied)
    return policied


def _is_boundary(method: Callable[..., Any]) -> bool:
    """Whether a method is one of ours; not what a decorator such as `nn.remat` made of one, with all its attributes."""
    return getattr(method, _BOUNDARY, None) is method


def _call_in_frame(method: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    keep = getattr(module, _KEEP)
    policy, args, kwargs = cast_arguments(_root_policy(module), method, keep, (module, *args), kwargs)
    with _frame(module, policy.compute_dtype) as frame, matmul_precision(policy), quantized_weights_explained(module):
        out = method(*args, **kwargs)
        if method.__name__ == "__call__":  # others may leave out modules that a rule is for
            for message in frame.warnings(module):
                warn_once(frame.policy, message)
            for message in written_explained():
                warn_once(frame.owner, message)
    return cast_result(policy, out)


@contextlib.contextmanager
def _frame(module: nn.Module, compute_dtype: np.dtype | None) -> Iterator[Frame]:
    frame = frame_of(getattr(module, _OWNER), path_of(module), getattr(module, POLICY), compute_dtype)
    with calling(module), outermost_call(frame), layers_noted(), nn.intercept_methods(interceptor(frame)):
        yield frame


def _root_policy(module: nn.Module) -> Policy:
    given, place = getattr(module, POLICY), getattr(module, PLACE)
    if isinstance(given, Policy):
        return given
    return place.match(given, (), {place.path(()): type(module)}).policy


def _init_subclass(cls: Any, **kwargs: Any) -> None:
    """Makes the methods of an author's subclass of a policied class boundaries as well, once Flax has wrapped them."""
    super(getattr(cls, _OWNER), cls).__init_subclass__(**kwargs)
    _police_methods(cls, vars(cls))


def _police_methods(cls: Any, names: Iterable[str]) -> None:
    """Makes public methods boundaries, and has the others run inside the frame as well."""
    names = tuple(names)
    for name, method in _methods(cls, names):
        setattr(cls, name, at_boundary(method) if _is_public(name) else inside_frame(method))
    if issubclass(cls, nn.RNNCellBase) and "initialize_carry" in names:
        cls.initialize_carry = as_returned(cls.initialize_carry, _root_policy)


def _call_wrapped_method(self: nn.Module, fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Flax's way into every method, here for those of the class without a policy: `Base.encode(module, x)`.

    They are no boundaries themselves. Without this private hook of Flax's such a call would have no policy.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return nn.Module._call_wrapped_method(self, fun, args, kwargs)

    name = getattr(fun, "__name__", "")
    if not any(inspect.unwrap(vars(base).get(name, call)) is inspect.unwrap(fun) for base in type(self).__mro__):
        return call(self, *args, **kwargs)  # a function of the module, given to a transform
    method = functools.wraps(fun)(call)
    return (at_boundary if _is_public(name) else inside_frame)(method)(self, *args, **kwargs)


def _methods(cls: Any, names: Iterable[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What its author wrote: no methods of Flax's module, no fields that hold functions, nothing under `nn.nowrap`."""
    fields = {field.name for field in dataclasses.fields(cls)}
    for name in names:
        of_module = (hasattr(nn.Module, name) or name.startswith("__")) and name not in ("__call__", "setup")
        method = inspect.getattr_static(cls, name)
        if not of_module and name not in fields and inspect.isfunction(method) and not hasattr(method, "nowrap"):
            yield name, method


def _is_public(name: str) -> bool:
    return name == "__call__" or (name != "setup" and not name.startswith("_"))


def _with_policied_method(entry: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.apply` or `Module.init_with_output` that runs inside the frame whatever it is told to call."""

    @functools.wraps(entry)
    def policied_entry(self: nn.Module, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return entry(self, *args, method=_policied_method(type(self), method), **kwargs)

    return nn.nowrap(policied_entry)


def _policied_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.apply` that runs inside the frame, and whose state autodiff combines by max."""
    apply = _with_policied_method(apply)

    @functools.wraps(apply)
    def with_state(self: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> Any:
        policy = getattr(self, POLICY)
        return storable(policy, apply(self, differentiable(policy, variables), *args, **kwargs))

    return nn.nowrap(with_state)


def _policied_method(cls: Any, method: Any) -> Any:
    if method is None:
        return None
    if isinstance(method, str):
        method = getattr(cls, method, method)  # a name that is unknown is Flax's to refuse
    fun = method.__func__ if inspect.ismethod(method) else method
    return at_boundary(fun) if inspect.isfunction(fun) else method


def _check_keep(base: Any, keep: frozenset[str]) -> None:
    if keep:
        public = [method for name, method in _methods(base, dir(base)) if _is_public(name)]
        known = [set(inspect.signature(method).parameters) for method in public]
        check_keep(base.__call__, [name for name in keep if not any(name in names for names in known)])


def _reduce(self: nn.Module) -> tuple:
    """Pickles the base class and the policy: a policied class is not found under its name, unless it decorates it."""
    cls: Any = type(self)
    if find_by_name(cls) is cls:
        return copyreg.__newobj__, (cls,), vars(self)  # type: ignore[attr-defined]
    return _rebuild, (unpolicied_class(cls), *(getattr(cls, name) for name in (POLICY, _KEEP, PLACE))), vars(self)


def _rebuild(base: Any, policy: Policy | PolicyMap, keep: frozenset[str], place: Place) -> Any:
    return object.__new__(policied_class(base, policy, keep, place))
