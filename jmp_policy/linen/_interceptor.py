"""Makes the modules inside an attached module store and compute in the dtypes of their policy.

While a method of one of them runs, its fields have the policy's dtypes, and it makes and reads variables by the policy:
they are drawn in the dtypes of their author, and parameters are stored in the param dtype.

A flag of a module's scope tells that its boundary is running. Flax copies flags to the clones that lifted transforms
call and to the scopes inside, and into the jit key of `nn.jit`.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any

from flax import linen as nn
from flax.core import freeze
from flax.linen.module import InterceptorContext

from .._base import Args, Kwargs, cast_floating, is_in_full_precision
from ..modules import (
    across_bridge,
    cast_arguments,
    cast_result,
    find_adapter,
    find_other_dtype,
    keep_carry_dtypes,
    keep_wide_results,
    matmul_precision,
    resolve_policy,
    widen_policy,
)
from ..policy import Policy, match_policy, stored_format_of
from ..quant import WEIGHT_NAMES, Misread
from ._active_policy import CURRENT, NOTES, ActivePolicy
from ._fields import (
    PARAMETER_WRAPPERS,
    find_dtype_fields,
    has_open_dtype,
    is_filled_in,
    is_widening_params,
    mark_dtype,
    mark_param_dtype,
    needs_param_dtype,
    read_authors_dtype,
    temporarily_set,
    written_dtype,
)
from ._own_weights import note_weight
from ._place import add_paths_to_jit_keys, calling, path_text
from ._products import multiply_by_policy
from ._quantized import check_cache, name_misread_weight, read_quantized_param

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
            return _call_inside(active, next_fun, args, kwargs, context)
        except Misread as error:
            name_misread_weight(module, error)
            raise

    return intercept


def _call_inside(
    active: ActivePolicy, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs, context: InterceptorContext
) -> Any:
    """Calls a method of the attached module, or of a module inside it."""
    module = context.module
    if INSIDE in vars(module):  # another method of this module is running
        return _call_from_inside(next_fun, args, kwargs, context)
    match = active.match(module)
    policy, rule, inferred = match.policy, match.rule, active.inferred

    # A module that a rule names casts its inputs and outputs, and infers the dtype that the rule leaves open.
    # A transform of functions, such as `nn.cond(pred, f, g, module, x)`, runs them as if they were methods.
    is_method = hasattr(type(module), context.method_name)
    casts = match.boundary and is_method and context.method_name != "setup" and _is_cast_due(module)
    if casts and rule is not None and rule.policy.compute_dtype is None:
        inferred = resolve_policy(rule.policy, (args, kwargs)).compute_dtype
        policy = widen_policy(policy.replace(compute_dtype=inferred))
    inside = active.replace(inferred, rule)

    # Run the method with the policy's dtypes in the fields. Under a map, the path of a module is part of its jit key.
    scope: Any = module.scope
    paths = add_paths_to_jit_keys(scope) if active.has_paths else _UNCHANGED
    fields = fill_fields(module, policy, until_it_returns=is_method)
    bridge = across_bridge(path_text(module)) if is_bridge(module) else _UNCHANGED
    with calling(module), paths, CURRENT(inside) if inside is not active else _UNCHANGED, fields, bridge:
        if isinstance(module, nn.MultiHeadDotProductAttention) and policy.cache is None:
            check_cache(module, None)
        run = _compute_as(policy, context, next_fun)
        out = _call_at_boundary(policy, module, run, args, kwargs) if casts else run(*args, **kwargs)

    # Record the author's dtype. The carry of a cell keeps its dtype, which a scan around it needs.
    _note_layer(module, policy)
    if not isinstance(module, nn.RNNCellBase) or context.method_name != "__call__":
        return out
    return keep_carry_dtypes(args[0] if args else kwargs.get("carry"), out)


def _call_from_inside(next_fun: Callable[..., Any], args: Args, kwargs: Kwargs, context: InterceptorContext) -> Any:
    """Calls a method for another method of its module, which has filled in the fields."""
    module = context.module
    outer: Policy = vars(module)[INSIDE]
    policy = widen_policy(outer)  # another one if `force_full_precision` is between the two methods
    with calling(module), _UNCHANGED if policy is outer else fill_fields(module, policy, until_it_returns=True):
        return _compute_as(policy, context, next_fun)(*args, **kwargs)


def _call_at_boundary(policy: Policy, module: nn.Module, run: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    policy, args, kwargs = cast_arguments(policy, run, (), args, kwargs)
    with _mark_boundary(module), matmul_precision(policy), keep_wide_results() as results:
        out = run(*args, **kwargs)
    return cast_result(policy, results.restore(policy, out))


def _compute_as(policy: Policy, context: InterceptorContext, next_fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `next_fun` with the matmul of the policy."""
    is_plain = policy.quantization is None and policy.accumulate_dtype is None and policy.cache is None
    if is_plain and not isinstance(context.module, PARAMETER_WRAPPERS):
        return next_fun
    bound: Any = context.orig_method  # a partial of the function
    return multiply_by_policy(context.module, inspect.unwrap(bound.func), policy, next_fun)


def _is_cast_due(module: nn.Module) -> bool:
    """True if a module that a rule names casts its inputs: at its outermost call, unless its author wrote a dtype."""
    is_open = has_open_dtype(module) or "dtype" not in find_dtype_fields(type(module))
    return is_open and module.scope.flags.get(_RUNNING) != module.path  # type: ignore[union-attr]


def _note_layer(module: nn.Module, policy: Policy) -> None:
    """Records the author's dtype of a layer with a weight, for a warning."""
    scope: Any = module.scope
    has_weight = any(map(scope.has_variable, repeat("params"), WEIGHT_NAMES))
    if "dtype" not in find_dtype_fields(type(module)) or not has_weight or is_in_full_precision():
        return
    written = written_dtype(module)
    NOTES.get().layers[path_text(module)] = None if written is None else find_other_dtype(written, policy)


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


INSIDE = "_jmp_inside"
"""The attribute of a module whose method is running, with its policy. Methods that this one calls reuse the fields."""

_NEVER_NARROWED = ("params", "batch_stats")
"""Collections that are made without the policy's compute dtype. A cache has the dtype of its layer."""


def fill_fields(module: nn.Module, policy: Policy, *, until_it_returns: bool) -> AbstractContextManager[None]:
    """Fills in the dtype fields of a bound module, and how it makes and reads variables, for a `with` block."""
    assert module.scope is not None
    param_dtype = policy.param_dtype
    values: dict[str, Any] = {INSIDE: policy} if until_it_returns else {}
    if has_open_dtype(module):
        values["dtype"] = mark_dtype(policy.compute_dtype)
    elif is_widening_params(module, param_dtype):
        values["dtype"] = mark_dtype(param_dtype)
    if param_dtype is not None and needs_param_dtype(module, param_dtype):
        values["param_dtype"] = mark_param_dtype(module, param_dtype)
    # Flax asks an initializer for its shape at every call, and an orthogonal one refuses to draw in half precision.
    is_storing = param_dtype is not None and module.scope.is_mutable_collection("params")
    is_quantized = stored_format_of(policy.quantization) is not None
    # Modules with a field `dtype` cast their own parameters, and so do Flax's own without one: PReLU casts, and the
    # parts of an LSTM cell leave it to the cell.
    kind = type(module)
    reads_in_compute = "dtype" not in find_dtype_fields(kind) and not kind.__module__.startswith("flax.linen.")
    if reads_in_compute or "param_dtype" in values or is_storing or is_quantized:
        values["param"] = functools.partial(_declare_param, module, _unpatched(module.param), policy, reads_in_compute)
    if "param_dtype" in values or "dtype" in values:
        values["variable"] = functools.partial(_declare_variable, module, _unpatched(module.variable))
    if is_bridge(module):
        values["nnx_class"] = _MakerAcross(module, policy)
    filled = temporarily_set(module, values)
    return _fill_first_carry(filled, module.cell) if isinstance(module, nn.RNN) else filled


def _unpatched(declare: Any) -> Any:
    """Returns a module's own `param` or `variable`: around a transform of a function, this library has replaced it."""
    is_ours = isinstance(declare, functools.partial) and declare.func in (_declare_param, _declare_variable)
    return declare.args[1] if is_ours else declare


def is_bridge(module: nn.Module) -> bool:
    """True if a linen module wraps an nnx one."""
    bridge = sys.modules.get("flax.nnx.bridge")
    return bridge is not None and isinstance(module, bridge.ToLinen)


class _MakerAcross:
    """Stands for the class of the nnx module that a linen one wraps: makes it with its policy."""

    def __init__(self, module: nn.Module, policy: Policy):
        active = CURRENT.value
        self._make = vars(module)["nnx_class"]
        self._rules = active.get_rules_inside(module, policy)
        self._path = active.locate(module)
        if policy.cache is not None:
            active.note_cache()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._make(*args, **kwargs)
        adapter = find_adapter(made)
        if adapter is None or adapter.attach_wrapped is None:
            return made
        made, types = adapter.attach_wrapped(made, self._rules, self._path, (args, kwargs))
        # Both modules have the same path. The outer type counts, unless a rule names the inner one.
        if match_policy(self._rules, self._path, types).rule is None:
            types.pop(self._path, None)
        NOTES.get().types.update(types)
        return made

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._make, name)
        if not callable(found):
            return found
        return lambda module, *args, **kwargs: getattr(module, name)(*args, **kwargs)


@contextlib.contextmanager
def _fill_first_carry(filled: AbstractContextManager[None], cell: nn.Module) -> Iterator[None]:
    """Fills in the fields of the cell too: `nn.RNN` asks it for the first carry before the cell is called."""
    fields, policy = {}, None if cell.scope is None else CURRENT.value.match(cell).policy
    if policy is not None and policy.param_dtype is not None:
        # The param dtype, or a wider compute dtype: a narrower carry would be rounded at each step.
        dtype = max(policy.param_dtype, policy.compute_dtype or policy.param_dtype, key=lambda dtype: dtype.itemsize)
        if needs_param_dtype(cell, dtype):
            fields["param_dtype"] = mark_param_dtype(cell, dtype)
    with filled, temporarily_set(cell, fields):
        yield


def _declare_param(
    module: nn.Module,
    param: Callable[..., Any],
    policy: Policy,
    reads_in_compute: bool,
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `Module.param`: draws in the author's dtype, stores in param dtype, and may read in compute dtype."""
    draw = functools.partial(_init_in_authors_dtype, module, "params", init_fn)
    init = lambda *args, **kwargs: policy.cast_to_param(draw(*args, **kwargs))
    if stored_format_of(policy.quantization) is not None and not kwargs:
        value = read_quantized_param(module, param, policy, name, init, *init_args)
    else:
        value = param(name, init, *init_args, **kwargs)
        note_weight(module, policy, name, value)
    return cast_floating(value, widen_policy(policy).compute_dtype) if reads_in_compute else value


def _declare_variable(
    module: nn.Module,
    variable: Callable[..., Any],
    collection: str,
    name: str,
    init_fn: Callable[..., Any] | None = None,
    *init_args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `Module.variable`: makes running statistics and other state in the author's dtype."""
    init = None if init_fn is None else functools.partial(_init_in_authors_dtype, module, collection, init_fn)
    return variable(collection, name, init, *init_args, **kwargs)


def _init_in_authors_dtype(
    module: nn.Module, collection: str, init_fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs an initializer with the author's dtypes in its arguments and on the module."""
    filled = {name: dtype for name in ("dtype", "param_dtype") if is_filled_in(dtype := vars(module).get(name))}
    if collection not in _NEVER_NARROWED:
        filled.pop("dtype", None)
        as_written = lambda x: read_authors_dtype(x) if x is filled.get("param_dtype") else x
    else:
        as_written = read_authors_dtype
    attributes = vars(module)
    attributes.update({name: read_authors_dtype(dtype) for name, dtype in filled.items()})
    try:  # a context manager would be slower, and each parameter comes through here
        return init_fn(*map(as_written, args), **{name: as_written(x) for name, x in kwargs.items()})
    finally:
        attributes.update(filled)
