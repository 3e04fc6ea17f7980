"""Methods of nnx modules under a policy, and hooks around them."""

import contextvars
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from .._base import IN_FULL_PRECISION, INFERRED, Args, Kwargs, PyTree, remember_on_class
from ..modules import (
    Hook,
    ModuleCall,
    across_bridge,
    cast_arguments,
    cast_result,
    check_no_cast,
    is_flax_object,
    keep_carry_dtypes,
    keep_wide_results,
    make_subclass,
    matmul_precision,
    resolve_policy,
    widen_policy,
)
from ..policy import Policy
from ..quant import Misread, warn_of_odd_rows
from ._cache import check_layer_cache
from ._module_spec import SPEC, DtypeSource, ModuleSpec, find_spec, has_linen_module, make_linen_attributes, plan_again
from ._own_weights import call_rewritten, is_of_flax, is_rewritten
from ._products import QuantizedParam
from ._shadow import Attributes, call_on_shadow, pytree_options, walk_modules

_INHERITED = frozenset(dir(nnx.Module)) - {"__call__"}


class Method(Protocol):
    """A method in a class: a function or another descriptor."""

    def __get__(self, instance: Any, owner: type | None = None, /) -> Callable[..., Any]: ...


def list_public_methods(base: type) -> Iterator[tuple[str, Method]]:
    """Lists the public methods of a class by name, without the wrappers of a policy."""
    for name in dir(base):
        if name in _INHERITED or (name.startswith("_") and name != "__call__"):
            continue
        found = inspect.getattr_static(base, name)
        if isinstance(found, staticmethod | classmethod | property | type):
            continue
        if callable(found) and hasattr(found, "__get__"):
            # Flax takes the wrappers of `nnx.capture` off again; a made class would keep them.
            found = vars(found)["__wrapped__"] if hasattr(found, "_does_capturing") else found
            yield name, getattr(found, "_jmp_method", found)


def parse_no_cast(base: type, no_cast: Collection[str]) -> tuple[str, ...]:
    """Returns the sorted names of `no_cast`. Raises a `ValueError` unless each is an argument of a public method."""
    methods: dict[str, Any] = dict(list_public_methods(base))
    check_no_cast(methods.get("__call__", base), no_cast, methods.values())
    return tuple(sorted(no_cast))


_INSIDE: contextvars.ContextVar[bool | None] = contextvars.ContextVar("_INSIDE", default=None)
"""Inside of a call of a module with a policy: true if its program is rewritten, by all weights of the model."""


def run_method(module: nnx.Module, spec: ModuleSpec, method: Method, args: Args, kwargs: Kwargs) -> Any:
    """Runs a method of the class without a policy, as the spec of the module says."""
    around = _INSIDE.get()
    rewrites = not around and is_rewritten(module, spec, is_outermost=spec.attached or around is None)
    token = _INSIDE.set(bool(around or rewrites))
    try:
        if rewrites:
            run = lambda module, *args, **kwargs: run_method(module, spec, method, args, kwargs)
            return call_rewritten(run, module, spec.given, vars(module).get(_PATH, ""), args, kwargs)
        with across_bridge(vars(module).get(_PATH, "")) if has_linen_module(spec.base) else nullcontext():
            return _run_inside(module, spec, method, args, kwargs)
    except Misread as error:
        _name_misread_weight(module, error)
        raise
    finally:
        _INSIDE.reset(token)


def _name_misread_weight(module: nnx.Module, error: Misread) -> None:
    """Adds the path of a quantized weight to the error of code that read it as an array."""
    for path, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, QuantizedParam) and node.get_raw_value().values is error.weight.values:
            *names, name = map(str, path)
            error.name_weight("/".join(names), name)


def _run_inside(module: nnx.Module, spec: ModuleSpec, method: Method, args: Args, kwargs: Kwargs) -> Any:
    is_cell = issubclass(spec.base, nnx.RNNCellBase) and getattr(method, "__name__", "") == "__call__"
    carry = (args[0] if args else kwargs.get("carry")) if is_cell else None

    # Resolve the policy. A boundary casts its arguments, unless its linen module, which knows their names, does.
    casts = spec.casts and spec.dtype_source is not DtypeSource.LINEN_MODULE
    if casts:
        bound = method.__get__(module)
        policy, args, kwargs = cast_arguments(widen_policy(spec.policy), bound, spec.no_cast, args, kwargs)
    else:
        policy = widen_policy(infer_policy(spec.policy, args, kwargs))

    # Find the attributes of this call, and hand the dtype on to the cache of an attention layer.
    changed = _find_changes(module, spec, policy)
    dtype = changed.get("dtype", vars(module).get("dtype"))
    if isinstance(module, nnx.MultiHeadAttention) and dtype is not None:
        kwargs = _give_cache_dtype(module, method, dtype, spec.cache, args, kwargs)

    # Run the method on a shadow, because other threads may call the module. Modules inside inherit an inferred dtype.
    runs = _find_shadow_class(type(module), spec)
    params_dtype = policy.compute_dtype if spec.dtype_source is DtypeSource.PARAMS else None
    is_inferred = spec.policy.compute_dtype is None
    with (
        INFERRED((spec.policy, policy.compute_dtype)) if is_inferred else nullcontext(),
        matmul_precision(policy),
        warn_of_odd_rows(spec.given, type(module)) if spec.attached else nullcontext(),
        keep_wide_results() if casts else nullcontext() as wide,
    ):
        out = call_on_shadow(
            module,
            runs,
            changed,
            params_dtype,
            lambda shadow: method.__get__(shadow, runs)(*args, **kwargs),
            reads_stored=not is_of_flax(spec.base),
        )

    # Cast the output. The carry of a cell keeps its dtypes, unless the policy has an output dtype.
    if wide is not None and policy.output_dtype is not None:
        return cast_result(policy, wide.restore(policy, out))
    return keep_carry_dtypes(carry, out)


def _find_changes(module: nnx.Module, spec: ModuleSpec, policy: Policy) -> Attributes:
    """Returns the attributes that a call needs and attaching could not write, since its dtype depends on the call."""
    is_inferred = spec.policy.compute_dtype is None
    if spec.dtype_source is DtypeSource.FIELD and (is_inferred or IN_FULL_PRECISION.value):
        return {"dtype": policy.compute_dtype}
    if spec.dtype_source is DtypeSource.LINEN_MODULE and is_inferred and not spec.casts:
        return make_linen_attributes(vars(module), spec, policy.compute_dtype)
    return {}


def _find_shadow_class(kind: type, spec: ModuleSpec) -> type:
    """Returns the class of the shadow of a module. Methods that it calls on itself are observed too (`nnx.capture`)."""
    methods = [method for method in vars(kind).values() if hasattr(method, "_jmp_method")]
    is_observed = any(method.__wrapped__ is not method._jmp_method for method in methods)
    return _make_observed_class(kind, spec.runs) if is_observed else spec.runs


@remember_on_class
def _make_observed_class(kind: type, runs: type) -> type:
    """Makes the subclass of `runs` whose methods are looked up in the policied class `kind` at each call."""

    def observe(name: str, method: Any) -> Callable[..., Any]:
        @functools.wraps(method)
        def call_observer(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            return vars(kind)[name](self, *args, **kwargs)

        return call_observer

    methods = {name: observe(name, method) for name, method in list_public_methods(runs) if name in vars(kind)}
    return make_subclass(runs, methods, (_make_observed_class, (kind, runs)), **pytree_options(runs))


def infer_policy(policy: Policy, args: Args, kwargs: Kwargs) -> Policy:
    """Fills in a missing compute dtype: the dtype that a call around inferred, or the inputs' dtype."""
    if policy.compute_dtype is not None:
        return policy
    around = INFERRED.value
    if around is not None and around[0] == policy:
        return policy.replace(compute_dtype=around[1])
    return resolve_policy(policy, (args, kwargs))


def _give_cache_dtype(
    module: nnx.MultiHeadAttention, method: Method, dtype: np.dtype, format: np.dtype | None, args: Args, kwargs: Kwargs
) -> Kwargs:
    """Adds the dtype of an attention layer to `init_cache` (by default float32); rejects a cache of another format."""
    name = getattr(method, "__name__", "")
    if name == "init_cache" and len(args) < 2:
        return {"dtype": dtype if format is None else format} | kwargs
    if name == "__call__":
        check_layer_cache(module, dtype, format, kwargs)
    return kwargs


_PATH = "_pytree__jmp_path"
"""The attribute with the path of a module. It is static, so that transforms which split and merge keep it. It is named
like Flax's bookkeeping, because the bridge turns all other attributes into variables of a linen module.
"""

_HOOKS: contextvars.ContextVar[tuple[Hook, ...]] = contextvars.ContextVar("_HOOKS", default=())
"""The hooks that run now, the outermost first. JAX would keep them alive if the classes held them."""


def hook_modules(fun: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns `fun` with a hook around each method of its arguments' modules. No other code may refer to these."""

    def call_hooked(*args: Any, **kwargs: Any) -> Any:
        out = None
        models = _find_models((args, kwargs))
        for model in models:
            for path, module in list(walk_modules(model)):
                vars(module)[_PATH] = path
                object.__setattr__(module, "__class__", _make_hooked_class(type(module)))
        token = _HOOKS.set((*_HOOKS.get(), hook))
        try:
            out = fun(*args, **kwargs)
            return out
        finally:
            _HOOKS.reset(token)
            for model in (*models, *_list_modules(out)):  # a copy of one may be returned
                for _, module in list(walk_modules(model)):
                    if vars(module).pop(_PATH, None) is not None:
                        object.__setattr__(module, "__class__", type(module).__base__)

    return call_hooked


def find_modules(arguments: PyTree) -> dict[str, type]:
    """Returns the classes, by path, of the modules among `arguments`."""
    return {path: type(module) for model in _find_models(arguments) for path, module in walk_modules(model)}


def _find_models(arguments: PyTree) -> list[nnx.Module]:
    """Lists the modules among some arguments, without those that are hooked: their paths begin further out."""
    return [module for module in _list_modules(arguments) if _PATH not in vars(module)]


def _list_modules(tree: PyTree) -> list[nnx.Module]:
    leaves = jax.tree.leaves(tree, is_leaf=is_flax_object)
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


@remember_on_class
def _make_hooked_class(kind: Any) -> type:
    """Makes the subclass of a module class whose public methods call the hooks."""
    methods = {name: _hook_method(name, inspect.getattr_static(kind, name)) for name, _ in list_public_methods(kind)}
    spec = {SPEC: vars(kind)[SPEC]} if SPEC in vars(kind) else {}
    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **spec, **methods}
    return type(kind)(kind.__name__, (kind,), namespace, **pytree_options(kind))


def _hook_method(name: str, method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        path, hooks = vars(self).get(_PATH), _HOOKS.get()
        if path is None or not hooks:
            return bound(*args, **kwargs)
        describe = lambda: "" if (spec := find_spec(self)) is None else plan_again(self, spec)[1].quantization
        # Callers compare with the class without hooks.
        call = ModuleCall(path, type(self).__base__, name, "", self, describe)  # type: ignore[arg-type]
        return _run_hooks(hooks, call, bound, args, kwargs)

    return call_hooks


def _run_hooks(hooks: tuple[Hook, ...], call: ModuleCall, fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    if not hooks:
        return fun(*args, **kwargs)
    inside = lambda *args, **kwargs: _run_hooks(hooks[1:], call, fun, args, kwargs)
    return hooks[0](call, inside, args, kwargs)
