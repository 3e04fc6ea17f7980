"""The methods of a policied class: boundaries, or what runs inside its module's frame."""

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
from ._fields import layers_noted, written_explained
from ._frame import CURRENT, Frame, frame_of, outermost_call
from ._interceptor import POLICY, interceptor
from ._place import PLACE, calling, path_of
from ._quantized import quantized_weights_explained

KEEP = "_jmp_keep"
OWNER = "_jmp_owner"
_BOUNDARY = "_jmp_boundary"


def police_methods(cls: Any, names: Iterable[str]) -> None:
    """Makes public methods boundaries, and has the others run inside the frame as well."""
    names = tuple(names)
    for name, method in methods_of(cls, names):
        setattr(cls, name, _at_boundary(method) if is_public(name) else _inside_frame(method))
    if issubclass(cls, nn.RNNCellBase) and "initialize_carry" in names:
        cls.initialize_carry = _as_returned(cls.initialize_carry, _root_policy)


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
    return (_at_boundary if is_public(name) else _inside_frame)(method)(self, *args, **kwargs)


def with_policied_method(entry: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.apply` or `Module.init_with_output` that runs inside the frame whatever it is told to call."""

    @functools.wraps(entry)
    def policied_entry(self: nn.Module, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return entry(self, *args, method=_policied_method(type(self), method), **kwargs)

    return nn.nowrap(policied_entry)


def _policied_method(cls: Any, method: Any) -> Any:
    if method is None:
        return None
    if isinstance(method, str):
        method = getattr(cls, method, method)  # a name that is unknown is Flax's to refuse
    fun = method.__func__ if inspect.ismethod(method) else method
    return _at_boundary(fun) if inspect.isfunction(fun) else method


def methods_of(cls: Any, names: Iterable[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What its author wrote: no methods of Flax's module, no fields that hold functions, nothing under `nn.nowrap`."""
    fields = {field.name for field in dataclasses.fields(cls)}
    for name in names:
        of_module = (hasattr(nn.Module, name) or name.startswith("__")) and name not in ("__call__", "setup")
        method = inspect.getattr_static(cls, name)
        if not of_module and name not in fields and inspect.isfunction(method) and not hasattr(method, "nowrap"):
            yield name, method


def is_public(name: str) -> bool:
    return name == "__call__" or (name != "setup" and not name.startswith("_"))


def _at_boundary(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method, or a function of a module, that casts at the outermost call and runs inside its module's frame."""
    if _is_boundary(method):
        return method
    without_casts = _inside_frame(method)

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


def _inside_frame(method: Callable[..., Any]) -> Callable[..., Any]:
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
    keep = getattr(module, KEEP)
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
    frame = frame_of(getattr(module, OWNER), path_of(module), getattr(module, POLICY), compute_dtype)
    with calling(module), outermost_call(frame), layers_noted(), nn.intercept_methods(interceptor(frame)):
        yield frame


def _root_policy(module: nn.Module) -> Policy:
    given, place = getattr(module, POLICY), getattr(module, PLACE)
    if isinstance(given, Policy):
        return given
    return place.match(given, (), {place.path(()): type(module)}).policy


def _as_returned(initialize_carry: Callable[..., Any], policy_of_cell: Callable[[Any], Policy]) -> Callable[..., Any]:
    """The `initialize_carry` of a cell that has a policy itself, which returns its carry in output dtype.

    A first carry in param dtype would make a scan refuse the cell.

    Args:
      initialize_carry: the author's.
      policy_of_cell: tells the policy of a cell.
    """

    @functools.wraps(initialize_carry)
    def policied(self: nn.RNNCellBase, *args: Any, **kwargs: Any) -> Any:
        policy = policy_of_cell(self)
        dtype = policy.compute_dtype if policy.output_dtype is None else policy.output_dtype
        return cast_floating(initialize_carry(self, *args, **kwargs), dtype)

    return policied
