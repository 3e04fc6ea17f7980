"""The methods of a policied class: boundaries, or what runs inside its module's policy."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from flax import linen as nn

from .._call_casts import cast_arguments, cast_result, matmul_precision
from .._messages import warn_once
from .._policy import Policy
from .._trees import cast_floating
from ..explanation._observation import observe_call
from ._active_policy import CURRENT, ActivePolicy, activate_policy, intern_active_policy, read_class_policy
from ._fields import collect_layers, explain_written_dtypes
from ._interceptor import make_interceptor
from ._place import calling, path_of
from ._quantized import quantized_weights_explained

_BOUNDARY = "_jmp_boundary"


def wrap_methods(cls: Any, names: Iterable[str]) -> None:
    """Makes public methods boundaries, and has the others run inside the policy as well."""
    names = tuple(names)
    for name, method in list_methods(cls, names):
        setattr(cls, name, _make_boundary(method) if is_public(name) else _make_inner_method(method))
    if issubclass(cls, nn.RNNCellBase) and "initialize_carry" in names:
        cls.initialize_carry = _cast_first_carry(cls.initialize_carry, _read_root_policy)


def call_wrapped_method(self: nn.Module, fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Flax's way into every method, here for those of the class without a policy: `Base.encode(module, x)`.

    They are no boundaries themselves. Without this private hook of Flax's such a call would have no policy.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return nn.Module._call_wrapped_method(self, fun, args, kwargs)

    name = getattr(fun, "__name__", "")
    if not any(inspect.unwrap(vars(base).get(name, call)) is inspect.unwrap(fun) for base in type(self).__mro__):
        return call(self, *args, **kwargs)  # a function of the module, given to a transform
    method = functools.wraps(fun)(call)
    return (_make_boundary if is_public(name) else _make_inner_method)(method)(self, *args, **kwargs)


def wrap_entry(entry: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.apply` or `Module.init_with_output` that runs inside the policy whatever it is told to call."""

    @functools.wraps(entry)
    def call_entry(self: nn.Module, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return entry(self, *args, method=_wrap_method_argument(type(self), method), **kwargs)

    return nn.nowrap(call_entry)


def _wrap_method_argument(cls: Any, method: Any) -> Any:
    if method is None:
        return None
    if isinstance(method, str):
        method = getattr(cls, method, method)  # a name that is unknown is Flax's to refuse
    fun = method.__func__ if inspect.ismethod(method) else method
    return _make_boundary(fun) if inspect.isfunction(fun) else method


def list_methods(cls: Any, names: Iterable[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What its author wrote: no methods of Flax's module, no fields that hold functions, nothing under `nn.nowrap`."""
    fields = {field.name for field in dataclasses.fields(cls)}
    for name in names:
        of_module = (hasattr(nn.Module, name) or name.startswith("__")) and name not in ("__call__", "setup")
        method = inspect.getattr_static(cls, name)
        if not of_module and name not in fields and inspect.isfunction(method) and not hasattr(method, "nowrap"):
            yield name, method


def is_public(name: str) -> bool:
    return name == "__call__" or (name != "setup" and not name.startswith("_"))


def _make_boundary(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method, or a function of a module, that casts at the outermost call and runs inside its module's policy."""
    if _is_boundary(method):
        return method
    call_without_casts = _make_inner_method(method)

    @functools.wraps(method)
    def call_boundary(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        active: ActivePolicy | None = CURRENT.value
        if self.scope is None or (active is not None and active.belongs_to(self)):
            return method(self, *args, **kwargs)
        if not read_class_policy(self).place.boundary:
            return call_without_casts(self, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return _call_with_casts(method, self, args, kwargs)

        return observe_call("/".join(path_of(self)), call, args, kwargs)  # out here, where nothing is cast yet

    setattr(call_boundary, _BOUNDARY, call_boundary)
    return call_boundary


def _make_inner_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """`setup`, or a private method, that runs inside its module's policy whoever calls it, and casts nothing."""
    if _is_boundary(method):
        return method

    @functools.wraps(method)
    def call_inside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        around: ActivePolicy | None = CURRENT.value
        if self.scope is None or (around is not None and around.belongs_to(self)):
            return method(self, *args, **kwargs)
        policy = _read_root_policy(self)
        if policy.compute_dtype is None:
            inferred = read_class_policy(self).place.inferred if around is None else around.inferred
            policy = policy.replace(compute_dtype=inferred)
        with _activate_on(self, policy.resolve(args, kwargs).compute_dtype):
            return method(self, *args, **kwargs)

    setattr(call_inside, _BOUNDARY, call_inside)
    return call_inside


def _is_boundary(method: Callable[..., Any]) -> bool:
    """Whether a method is one of ours; not what a decorator such as `nn.remat` made of one, with all its attributes."""
    return getattr(method, _BOUNDARY, None) is method


def _call_with_casts(method: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    keep = read_class_policy(module).keep
    policy, args, kwargs = cast_arguments(_read_root_policy(module), method, keep, (module, *args), kwargs)
    activated = _activate_on(module, policy.compute_dtype)
    with activated as active, matmul_precision(policy), quantized_weights_explained(module):
        out = method(*args, **kwargs)
        if method.__name__ == "__call__":  # others may leave out modules that a rule is for
            for message in active.explain_unused(module):
                warn_once(active.policy, message)
            for message in explain_written_dtypes():
                warn_once(active.given.owner, message)
    return cast_result(policy, out)


@contextlib.contextmanager
def _activate_on(module: nn.Module, compute_dtype: np.dtype | None) -> Iterator[ActivePolicy]:
    active = intern_active_policy(read_class_policy(module).owner, path_of(module), compute_dtype)
    with calling(module), activate_policy(active), collect_layers(), nn.intercept_methods(make_interceptor(active)):
        yield active


def _read_root_policy(module: nn.Module) -> Policy:
    given = read_class_policy(module)
    if isinstance(given.policy, Policy):
        return given.policy
    return given.place.match(given.policy, (), {given.place.path(()): type(module)}).policy


def _cast_first_carry(
    initialize_carry: Callable[..., Any], policy_of_cell: Callable[[Any], Policy]
) -> Callable[..., Any]:
    """The `initialize_carry` of a cell that has a policy itself, which returns its carry in output dtype.

    A first carry in param dtype would make a scan refuse the cell.

    Args:
      initialize_carry: the author's.
      policy_of_cell: tells the policy of a cell.
    """

    @functools.wraps(initialize_carry)
    def initialize_cast_carry(self: nn.RNNCellBase, *args: Any, **kwargs: Any) -> Any:
        policy = policy_of_cell(self)
        dtype = policy.compute_dtype if policy.output_dtype is None else policy.output_dtype
        return cast_floating(initialize_carry(self, *args, **kwargs), dtype)

    return initialize_cast_carry
