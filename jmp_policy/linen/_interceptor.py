"""Makes the modules inside an attached module store and compute in the dtypes of their policy.

Whether a rule's boundary around a module is running is told by a flag of its scope. Flax hands flags to the clones that
lifted transforms call and to the scopes inside, and has them in the key under which `nn.jit` finds its program.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flax import linen as nn
from flax.core import freeze

from .._call_casts import cast_arguments, cast_result, keep_carry_dtypes, matmul_precision, resolve_policy
from .._policy import Policy
from ..quant._array import Misread
from ._active_policy import CURRENT, ActivePolicy
from ._fields import has_dtype_field, has_open_dtype, note_layer
from ._place import add_paths_to_jit_keys, calling, path_of
from ._quantized import name_misread_weight, quantize_method
from ._variables import INSIDE, fill_fields

POLICY = "_jmp_policy"
"""The attribute of a policied class that holds its policy."""

_UNCHANGED = contextlib.nullcontext()
_RUNNING = "jmp_policy_running"


def make_interceptor(outermost: ActivePolicy) -> Callable[..., Any]:
    """The interceptor, for `nn.intercept_methods`, that applies a policy."""

    def intercept(next_fun: Callable[..., Any], args: tuple, kwargs: dict, context: Any) -> Any:
        module: nn.Module = context.module
        current: ActivePolicy = CURRENT.value
        # Another policy is in charge inside a submodule with a policy of its own.
        if current.attachment is not outermost.attachment or module.scope is None:
            return next_fun(*args, **kwargs)
        try:
            return _call_inside(current, module, next_fun, args, kwargs, context)
        except Misread as error:
            name_misread_weight(module, error)
            raise

    return intercept


def _call_inside(
    current: ActivePolicy, module: nn.Module, next_fun: Callable[..., Any], args: tuple, kwargs: dict, context: Any
) -> Any:
    """Calls a method of a module inside of the attached one."""
    if INSIDE in vars(module):
        next_fun = quantize_method(module, context.orig_method, vars(module)[INSIDE], next_fun)
        with calling(module):
            return next_fun(*args, **kwargs)
    match = current.match(module)
    inside = current.replace_rule(match.rule)
    # Transforms of functions, such as `nn.cond(pred, f, g, module, x)`, run those as if they were methods.
    is_method = hasattr(type(module), context.method_name)
    at_boundary = match.boundary and is_method and context.method_name != "setup" and _is_cast_due(module)
    if at_boundary and match.rule is not None and match.rule.policy.compute_dtype is None:
        inside = inside.replace_inferred(resolve_policy(match.rule.policy, (args, kwargs)).compute_dtype)
        match = inside.match(module)
    fields = fill_fields(module, match.policy, until_it_returns=is_method)
    with calling(module), _activate_inside(current, inside, module), fields:
        _check_cache(module)
        next_fun = quantize_method(module, context.orig_method, match.policy.quantization, next_fun)
        if at_boundary:
            out = _call_at_boundary(module, match.policy, next_fun, args, kwargs)
        else:
            out = next_fun(*args, **kwargs)
    note_layer(module, match.policy)
    return keep_carry_dtypes(_find_carry(module, context.method_name, args, kwargs), out)


def _find_carry(module: nn.Module, method_name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The carry that a call hands to a recurrent cell; `None` if the call is no step of one."""
    if not isinstance(module, nn.RNNCellBase) or method_name != "__call__":
        return None
    return args[0] if args else kwargs.get("carry")


def _is_cast_due(module: nn.Module) -> bool:
    """Whether a module that a rule matches casts what enters now: once, and not where its author wrote a dtype.

    Casting to another dtype before a layer whose dtype was written would lose what its author wanted.
    """
    return (has_open_dtype(module) or not has_dtype_field(type(module))) and not _is_inside_boundary(module)


@contextlib.contextmanager
def _activate_inside(current: ActivePolicy, inside: ActivePolicy, module: nn.Module) -> Iterator[None]:
    """The context of a module's method: `inside` is in charge, and jitted modules in it are told apart by place."""
    places = add_paths_to_jit_keys(module.scope) if current.has_paths and module.scope is not None else _UNCHANGED
    with places, CURRENT(inside) if inside is not current else _UNCHANGED:
        yield


def _check_cache(module: nn.Module) -> None:
    """Checks the decode cache of an attention module against its dtype.

    Raises:
      ValueError: there is a cache, and it has another dtype.
    """
    if not isinstance(module, nn.MultiHeadDotProductAttention) or not module.has_variable("cache", "cached_key"):
        return
    found, dtype = module.get_variable("cache", "cached_key").dtype, module.dtype
    if dtype is not None and found != np.dtype(dtype):
        path, computed = "/".join(path_of(module)) or type(module).__name__, np.dtype(dtype).name
        raise ValueError(
            f"The cache of {path!r} is {found}, but under its policy the layer computes in {computed}. Make the cache "
            "under the same policy, model.init(...)['cache'], or cast it, "
            f"jmp_policy.cast_floating(cache, {computed!r})."
        )


def _call_at_boundary(
    module: nn.Module, policy: Policy, fun: Callable[..., Any], args: tuple, kwargs: dict
) -> Any:
    policy, args, kwargs = cast_arguments(policy, fun, (), args, kwargs)
    with _mark_boundary(module), matmul_precision(policy):
        return cast_result(policy, fun(*args, **kwargs))


@contextlib.contextmanager
def _mark_boundary(module: nn.Module) -> Iterator[None]:
    """A context in which a module, and any clone of it, is known to have cast what entered."""
    before = _read_flags(module)
    _write_flags(module, freeze({**before, _RUNNING: module.path}))
    try:
        yield
    finally:
        # The module may have got another scope: a method that calls its base's gives it one.
        _write_flags(module, before)


def _is_inside_boundary(module: nn.Module) -> bool:
    """Whether the boundary of this very module, or of the one that it is a clone of, is running."""
    return _read_flags(module).get(_RUNNING) == module.path


def _read_flags(module: nn.Module) -> Any:
    assert module.scope is not None
    return module.scope.flags


def _write_flags(module: nn.Module, flags: Any) -> None:
    assert module.scope is not None
    module.scope.flags = flags
