"""Makes the modules inside an attached module store and compute in the dtypes of their policy.

A flag of a module's scope tells that its boundary is running. Flax copies flags to the clones that lifted transforms
call and to the scopes inside, and into the jit key of `nn.jit`.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
from flax import linen as nn
from flax.core import freeze
from flax.linen.module import InterceptorContext

from .._base import Args, Kwargs
from ..modules import cast_arguments, cast_result, keep_carry_dtypes, matmul_precision, resolve_policy, widen_policy
from ..modules.common import find_wider_dtype, keep_wide_results
from ..policy import Policy
from ..quant._weights import WEIGHT_NAMES, Misread
from ._active_policy import CURRENT, NOTES, ActivePolicy
from ._fields import PARAMETER_WRAPPERS, find_fields, has_open_dtype, written_dtype
from ._place import add_paths_to_jit_keys, calling, path_text
from ._products import multiply_by_policy
from ._quantized import name_misread_weight
from ._variables import INSIDE, fill_fields

_UNCHANGED = contextlib.nullcontext()
_RUNNING = "jmp_policy_running"


def make_interceptor(outermost: ActivePolicy) -> Callable[..., Any]:
    """Returns the interceptor (`nn.intercept_methods`) that applies a policy to the modules inside an attached one."""

    def intercept(next_fun: Callable[..., Any], args: Args, kwargs: Kwargs, context: InterceptorContext) -> Any:
        module: nn.Module = context.module
        active: ActivePolicy = CURRENT.value
        # A submodule with a policy of its own has another interceptor, which runs as well.
        if active.attachment is not outermost.attachment or module.scope is None:
            return next_fun(*args, **kwargs)
        try:
            return _call_inside(active, module, next_fun, args, kwargs, context)
        except Misread as error:
            name_misread_weight(module, error)
            raise

    return intercept


def _call_inside(
    active: ActivePolicy,
    module: nn.Module,
    next_fun: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    context: InterceptorContext,
) -> Any:
    """Calls a method of the attached module, or of a module inside it."""
    # Another method of this module is running: the fields are filled in.
    if INSIDE in vars(module):
        policy = widen_policy(vars(module)[INSIDE])
        is_filled = policy is vars(module)[INSIDE]  # false if `force_full_precision` is between the two methods
        fields = _UNCHANGED if is_filled else fill_fields(module, policy, until_it_returns=True)
        with calling(module), fields:
            return _compute_as(policy, module, context, next_fun)(*args, **kwargs)

    # Find the policy of this module, and its rule.
    match = active.match(module)
    inside = active if match.rule is active.rule else active.replace_rule(match.rule)

    # Decide if the module casts its inputs and outputs. A transform of functions, such as
    # `nn.cond(pred, f, g, module, x)`, runs them as if they were methods.
    is_method = hasattr(type(module), context.method_name)
    at_boundary = match.boundary and is_method and context.method_name != "setup" and _is_cast_due(module)
    if at_boundary and match.rule is not None and match.rule.policy.compute_dtype is None:
        inside = inside.replace_inferred(resolve_policy(match.rule.policy, (args, kwargs)).compute_dtype)
        match = inside.match(module)

    # Run the method with the policy's dtypes in the fields. Under a map, the path of a module is part of its jit key.
    fields = fill_fields(module, match.policy, until_it_returns=is_method)
    scope: Any = module.scope
    paths = add_paths_to_jit_keys(scope) if active.has_paths else _UNCHANGED
    with calling(module), paths, CURRENT(inside) if inside is not active else _UNCHANGED, fields:
        if isinstance(module, nn.MultiHeadDotProductAttention):
            _check_cache(module)
        next_fun = _compute_as(match.policy, module, context, next_fun)
        if at_boundary:
            out = _call_at_boundary(module, match.policy, next_fun, args, kwargs)
        else:
            out = next_fun(*args, **kwargs)

    # Record the author's dtype. The carry of a cell keeps its dtype, which a scan around it needs.
    _note_layer(module, match.policy)
    if not isinstance(module, nn.RNNCellBase) or context.method_name != "__call__":
        return out
    return keep_carry_dtypes(args[0] if args else kwargs.get("carry"), out)


def _compute_as(
    policy: Policy, module: nn.Module, context: InterceptorContext, next_fun: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `next_fun` with the matmul of the policy."""
    is_plain = policy.quantization is None and policy.accumulate_dtype is None
    if is_plain and not isinstance(module, PARAMETER_WRAPPERS):
        return next_fun
    bound: Any = context.orig_method  # a partial of the function
    return multiply_by_policy(module, inspect.unwrap(bound.func), policy, next_fun)


def _is_cast_due(module: nn.Module) -> bool:
    """True if a module that a rule names casts its inputs: at its outermost call, unless its author wrote a dtype."""
    is_open = has_open_dtype(module) or not find_fields(type(module)).has_dtype
    return is_open and not _is_inside_boundary(module)


def _note_layer(module: nn.Module, policy: Policy) -> None:
    """Records the author's dtype of a layer with a weight, for a warning."""
    scope: Any = module.scope
    if not find_fields(type(module)).has_dtype or not any(map(scope.has_variable, repeat("params"), WEIGHT_NAMES)):
        return
    written = written_dtype(module)
    NOTES.get().layers[path_text(module)] = None if written is None else find_wider_dtype(written, policy)


def _check_cache(module: nn.MultiHeadDotProductAttention) -> None:
    """Raises a `ValueError` if the decode cache of an attention module has another dtype than the module."""
    if not module.has_variable("cache", "cached_key"):
        return
    found, dtype = module.get_variable("cache", "cached_key").dtype, module.dtype
    if dtype is not None and found != np.dtype(dtype):
        path, computed = path_text(module) or type(module).__name__, np.dtype(dtype).name
        raise ValueError(
            f"The cache of {path!r} is {found}, but under its policy the layer computes in {computed}. Make the cache "
            "under the same policy, model.init(...)['cache'], or cast it, "
            f"jmp_policy.cast_floating(cache, {computed!r})."
        )


def _call_at_boundary(module: nn.Module, policy: Policy, fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    policy, args, kwargs = cast_arguments(policy, fun, (), args, kwargs)
    with _mark_boundary(module), matmul_precision(policy), keep_wide_results() as results:
        out = fun(*args, **kwargs)
    return cast_result(policy, results.restore(policy, out))


@contextlib.contextmanager
def _mark_boundary(module: nn.Module) -> Iterator[None]:
    """Marks a module, and any clone of it, as running inside of its boundary."""
    scope: Any = module.scope
    before = scope.flags
    scope.flags = freeze({**before, _RUNNING: module.path})
    try:
        yield
    finally:
        # A method that calls the method of its base class has replaced the scope.
        module.scope.flags = before  # type: ignore[union-attr]


def _is_inside_boundary(module: nn.Module) -> bool:
    """True if the boundary of this module, or of the one that it is a clone of, is running."""
    return module.scope.flags.get(_RUNNING) == module.path  # type: ignore[union-attr]
