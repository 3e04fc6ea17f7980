"""Makes the modules inside an attached module store and compute in the dtypes of their policy."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from flax import linen as nn

from .._call_casts import cast_arguments, cast_result, matmul_precision, resolve_policy
from .._carry import keep_carry_dtypes
from .._formats import integers_of
from .._policy import Policy
from ..quant._misread import Misread
from ._cache import check_cache
from ._carry import carry_given, first_carry_dtype
from ._fields import (
    casts_own_params,
    filled_in,
    has_dtype_field,
    takes_dtype,
    takes_param_dtype,
    widens_params,
    with_param_dtype,
    written,
)
from ._flags import boundary_of, paths_in_jit_keys, runs_inside_boundary
from ._frame import CURRENT, Frame
from ._path import calling
from ._quantized import name_misread_weight, quantized_method
from ._variables import policied_param, policied_variable, stores_params
from ._written import note_layer

POLICY = "_jmp_policy"
"""The attribute of a policied class that holds its policy."""

_UNCHANGED = contextlib.nullcontext()

_INSIDE = "_jmp_inside"
"""The attribute of a module whose method is running; the methods that this one calls find its fields filled in. It
holds the quantization of the module's policy."""


def interceptor(frame: Frame) -> Callable[..., Any]:
    """The interceptor, for `nn.intercept_methods`, that applies a frame."""

    def intercept(next_fun: Callable[..., Any], args: tuple, kwargs: dict, context: Any) -> Any:
        module: nn.Module = context.module
        current: Frame = CURRENT.value
        # Another frame is in charge inside a submodule with a policy of its own.
        if current.attachment is not frame.attachment or module.scope is None:
            return next_fun(*args, **kwargs)
        try:
            return _call_inside(current, module, next_fun, args, kwargs, context)
        except Misread as error:
            name_misread_weight(module, error)
            raise

    return intercept


def _call_inside(
    current: Frame, module: nn.Module, next_fun: Callable[..., Any], args: tuple, kwargs: dict, context: Any
) -> Any:
    """Calls a method of a module inside of the attached one."""
    if _INSIDE in vars(module):
        next_fun = quantized_method(module, context.orig_method, vars(module)[_INSIDE], next_fun)
        with calling(module):
            return next_fun(*args, **kwargs)
    match = current.match(module)
    inside = current.under(match.rule)
    # Transforms of functions, such as `nn.cond(pred, f, g, module, x)`, run those as if they were methods.
    is_method = hasattr(type(module), context.method_name)
    at_boundary = match.boundary and is_method and context.method_name != "setup" and _casts(module)
    if at_boundary and match.rule is not None and match.rule.policy.compute_dtype is None:
        inside = inside.inferring(resolve_policy(match.rule.policy, (args, kwargs)).compute_dtype)
        match = inside.match(module)
    fields = _fields_filled_in(module, match.policy, until_it_returns=is_method)
    with calling(module), _in_charge(current, inside, module), fields:
        check_cache(module)
        next_fun = quantized_method(module, context.orig_method, match.policy.quantization, next_fun)
        if at_boundary:
            out = _call_at_boundary(module, match.policy, next_fun, args, kwargs)
        else:
            out = next_fun(*args, **kwargs)
    note_layer(module, match.policy)
    return keep_carry_dtypes(carry_given(module, context.method_name, args, kwargs), out)


def _casts(module: nn.Module) -> bool:
    """Whether a module that a rule matches casts what enters now: once, and not where its author wrote a dtype.

    Casting to another dtype before a layer whose dtype was written would lose what its author wanted.
    """
    return (takes_dtype(module) or not has_dtype_field(type(module))) and not runs_inside_boundary(module)


@contextlib.contextmanager
def _in_charge(current: Frame, inside: Frame, module: nn.Module) -> Iterator[None]:
    """The context of a module's method: `inside` is in charge, and jitted modules in it are told apart by place."""
    places = paths_in_jit_keys(module.scope) if current.has_paths and module.scope is not None else _UNCHANGED
    with places, CURRENT(inside) if inside is not current else _UNCHANGED:
        yield


def _call_at_boundary(
    module: nn.Module, policy: Policy, fun: Callable[..., Any], args: tuple, kwargs: dict
) -> Any:
    policy, args, kwargs = cast_arguments(policy, fun, (), args, kwargs)
    with boundary_of(module), matmul_precision(policy):
        return cast_result(policy, fun(*args, **kwargs))


def _fields_filled_in(module: nn.Module, policy: Policy, *, until_it_returns: bool) -> AbstractContextManager[None]:
    """The dtype of a policy in the field of a module that has one, and variables made and read accordingly.

    Args:
      module: a bound module.
      policy: what holds for it.
      until_it_returns: whether the module's methods find it so until this call is over; a function of the module may
        yet call one that is a boundary.
    """
    values: dict[str, Any] = {_INSIDE: policy.quantization} if until_it_returns else {}
    if takes_dtype(module):
        values["dtype"] = filled_in(policy.compute_dtype)
    elif widens_params(module, policy.param_dtype):
        values["dtype"] = filled_in(policy.param_dtype)
    if policy.param_dtype is not None and takes_param_dtype(module, policy.param_dtype):
        values["param_dtype"] = with_param_dtype(module, policy.param_dtype)
    reads_in_compute = not casts_own_params(type(module))
    # Flax asks an initializer for its shape at every call, and an orthogonal one refuses to draw in half precision.
    if reads_in_compute or "param_dtype" in values or stores_params(module, policy) or integers_of(policy.quantization):
        values["param"] = policied_param(module, policy, reads_in_compute)
    if "param_dtype" in values or "dtype" in values:
        values["variable"] = policied_variable(module)
    filled = written(module, values)
    return _and_first_carry(filled, module.cell) if isinstance(module, nn.RNN) else filled


@contextlib.contextmanager
def _and_first_carry(filled: AbstractContextManager[None], cell: nn.Module) -> Iterator[None]:
    """The context of an `nn.RNN`, which asks its cell for the first carry while it is not yet the cell's turn."""
    dtype = None if cell.scope is None else first_carry_dtype(CURRENT.value.match(cell).policy)
    fields = {}
    if dtype is not None and takes_param_dtype(cell, dtype):
        fields["param_dtype"] = with_param_dtype(cell, dtype)
    with filled, written(cell, fields):
        yield
