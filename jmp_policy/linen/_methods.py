"""Subclasses of linen modules with a policy, whose public methods cast inputs and outputs. Also hooks around methods.

The class has the policy, because Flax clones modules field by field and would lose an attribute of an instance. The
subclass has the name of its base, so that the names of parameters do not depend on the policy.
"""

import contextvars
import copyreg
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from flax import linen as nn
from flax.errors import ScopeParamShapeError

from .._base import (
    Args,
    Kwargs,
    PyTree,
    cast_floating,
    hide_frames,
    prepare_state,
    remember_on_class,
    remember_recent,
    restore_state,
    warn_once,
)
from ..modules import (
    Hook,
    ModuleCall,
    cast_arguments,
    cast_result,
    check_no_cast,
    find_by_name,
    keep_wide_results,
    make_subclass,
    matmul_precision,
    widen_policy,
)
from ..policy import Policy, PolicyMap
from ..quant import has_float8, warn_of_odd_rows
from ._active_policy import (
    CLASS_POLICY,
    CURRENT,
    ActivePolicy,
    ClassPolicy,
    activate_policy,
    intern_active_policy,
    read_class_policy,
)
from ._interceptor import make_interceptor
from ._own_weights import call_by_weights
from ._place import ModulePlace, calling, is_trial, path_of, path_text
from ._quantized import has_float8_state, note_quantized_weights, plan_module


def make_boundary_class(
    base: type[nn.Module], policy: Policy | PolicyMap, no_cast: frozenset[str], place: ModulePlace
) -> Any:
    """Returns the subclass of a linen class whose public methods are boundaries; the same one for equal arguments."""
    make = _make_class if isinstance(policy, Policy) else _make_class_of_map
    return make(_choose_shortest_lived(base, policy), base, policy, no_cast, place)


def _make_uncached_class(
    _: type, base: type[nn.Module], policy: Policy | PolicyMap, no_cast: frozenset[str], place: ModulePlace
) -> Any:
    if no_cast:
        public = [method for name, method in _list_methods(base, dir(base)) if _is_public(name)]
        check_no_cast(base.__call__, no_cast, public)
    recipe = (make_boundary_class, (base, policy, no_cast, place))
    cls = make_subclass(base, {"__init_subclass__": classmethod(_init_subclass)}, recipe)
    setattr(cls, CLASS_POLICY, ClassPolicy(base, policy, no_cast, place, owner=cls))
    # Set now, not in the namespace: Flax wraps each method there, and would intercept our boundary instead.
    _wrap_methods(cls, dir(base))
    cls._call_wrapped_method = _call_wrapped_method
    apply = _wrap_entry(base.apply)
    cls.apply = _keep_state(apply) if has_float8_state(policy) else apply
    cls.init_with_output = _wrap_entry(base.init_with_output)
    cls.__reduce__ = _reduce_module  # type: ignore[method-assign]
    return cls


_make_class = remember_on_class(_make_uncached_class)
_make_class_of_map = remember_recent(_make_uncached_class)  # a program may make any number of maps


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
    _wrap_methods(cls, vars(cls))


def _keep_state(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Module.apply` of a model with float8 state, which autodiff combines by max."""

    @hide_frames
    @functools.wraps(apply)
    def apply_with_state(self: nn.Module, variables: PyTree, *args: Any, **kwargs: Any) -> Any:
        return restore_state(apply(self, prepare_state(variables, 1.0), *args, **kwargs))

    return nn.nowrap(apply_with_state)


def _reduce_module(self: nn.Module) -> tuple:
    """Pickles the base class and the policy, unless Python finds the policied class by name."""
    cls: Any = type(self)
    if find_by_name(cls) is cls:
        return copyreg.__newobj__, (cls,), vars(self)  # type: ignore[attr-defined]
    given = read_class_policy(cls)
    return _rebuild, (unpolicied_class(cls), given.policy, given.no_cast, given.place), vars(self)


def _rebuild(base: type[nn.Module], policy: Policy | PolicyMap, no_cast: frozenset[str], place: ModulePlace) -> Any:
    return object.__new__(make_boundary_class(base, policy, no_cast, place))


_OURS = "_jmp_ours"
"""The attribute by which a method that we made refers to itself."""


def _wrap_methods(cls: type[nn.Module], names: Iterable[str]) -> None:
    """Makes the public methods of a class boundaries, and runs its other methods under the policy."""
    names = tuple(names)
    for name, method in _list_methods(cls, names):
        setattr(cls, name, _wrap_in_policy(method, _is_public(name)))
    if issubclass(cls, nn.RNNCellBase) and "initialize_carry" in names:
        cls.initialize_carry = _cast_first_carry(cls.initialize_carry)


def _call_wrapped_method(self: nn.Module, fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Calls a method of the class without a policy, `Base.encode(module, x)`, under the policy: a hook of Flax."""
    active: ActivePolicy | None = CURRENT.value
    if self.scope is None or (active is not None and active.belongs_to(self)):
        return nn.Module._call_wrapped_method(self, fun, args, kwargs)  # a boundary around it applied the policy

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return nn.Module._call_wrapped_method(self, fun, args, kwargs)

    name = getattr(fun, "__name__", "")
    if not any(inspect.unwrap(vars(base).get(name, call)) is inspect.unwrap(fun) for base in type(self).__mro__):
        return call(self, *args, **kwargs)  # a function of the module, given to a transform
    return _wrap_in_policy(functools.wraps(fun)(call), _is_public(name))(self, *args, **kwargs)


def _wrap_entry(entry: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Module.apply` or `Module.init_with_output`, so that any `method=` runs under the policy."""

    @hide_frames
    @functools.wraps(entry)
    def call_entry(self: nn.Module, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        if isinstance(method, str):
            method = getattr(type(self), method, method)  # Flax rejects an unknown name
        fun = method.__func__ if inspect.ismethod(method) else method
        method = _wrap_in_policy(fun, casts=True) if inspect.isfunction(fun) else method
        return entry(self, *args, method=method, **kwargs)

    return nn.nowrap(call_entry)


def _list_methods(cls: type[nn.Module], names: Iterable[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Lists the methods that the author of a class wrote, without those under `nn.nowrap` and functions in fields."""
    fields = {field.name for field in dataclasses.fields(cls)}
    for name in names:
        is_flax = (hasattr(nn.Module, name) or name.startswith("__")) and name not in ("__call__", "setup")
        method = inspect.getattr_static(cls, name)
        if is_flax or name in fields or not inspect.isfunction(method) or hasattr(method, "nowrap"):
            continue
        if method is not nn.Module.setup:
            yield name, method


def _is_public(name: str) -> bool:
    return name == "__call__" or (name != "setup" and not name.startswith("_"))


def _wrap_in_policy(method: Callable[..., Any], casts: bool) -> Callable[..., Any]:
    """Wraps a method, or a function of a module: runs under the module's policy, and may cast at the outermost call."""
    if getattr(method, _OURS, None) is method:  # not after a decorator such as `nn.remat` wrapped it
        return method

    @hide_frames
    @functools.wraps(method)
    def call_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        active: ActivePolicy | None = CURRENT.value
        if self.scope is None or (active is not None and active.belongs_to(self)):
            return method(self, *args, **kwargs)
        return (_call_boundary if casts else _call_without_casts)(method, self, args, kwargs)

    setattr(call_method, _OURS, call_method)
    return call_method


def _call_boundary(method: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    # A linen module inside a model of nnx is not a boundary where no rule names it.
    if not read_class_policy(module).place.boundary:
        return _call_without_casts(method, module, args, kwargs)
    hook = BOUNDARY_HOOK.get()
    if hook is None:
        return _call_with_casts(method, module, args, kwargs)
    # The hook sees the inputs before they are cast.
    call = lambda *args, **kwargs: _call_with_casts(method, module, args, kwargs)
    return hook(_describe_call(module, method.__name__), call, args, kwargs)


def _call_with_casts(method: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    given = read_class_policy(module)

    # Inputs are cast to the compute dtype, which the first floating input decides if the policy has none.
    bound = functools.partial(method, module)
    policy, args, kwargs = cast_arguments(_read_root_policy(given, type(module)), bound, given.no_cast, args, kwargs)

    # The interceptor applies the policy to the modules inside.
    active = intern_active_policy(given.owner, path_of(module), policy.compute_dtype)
    odd_rows: Any = nullcontext()
    if has_float8(given.policy):
        odd_rows = warn_of_odd_rows(given.policy, given.owner, initializes=module.is_initializing())
    with (
        activate_policy(active, module),
        nn.intercept_methods(make_interceptor(active)),
        matmul_precision(policy),
        odd_rows,
    ):
        try:
            call = functools.partial(_call_and_restore, method, policy)
            out = _call_by_weights(method, call, active, module, args, kwargs)
        except ScopeParamShapeError as error:
            note_quantized_weights(module, error)
            raise
        if method.__name__ == "__call__":  # other methods may not call the modules that a rule names
            for message in active.explain_unused(module):
                warn_once(active.policy, message)
            for message in active.explain_written_dtypes():
                warn_once(given.owner, message)
    return cast_result(policy, out)


def _call_by_weights(
    method: Callable[..., Any],
    call: Callable[..., Any],
    active: ActivePolicy,
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    if method.__name__ == "setup":
        return call(module, *args, **kwargs)
    return call_by_weights(method, call, module, active.policy, active.attachment._known_weights, args, kwargs)


def _call_and_restore(method: Callable[..., Any], policy: Policy, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with keep_wide_results() as results:
        return results.restore(policy, method(module, *args, **kwargs))


def _call_without_casts(method: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    given, around = read_class_policy(module), CURRENT.value
    policy = _read_root_policy(given, type(module))
    # An open compute dtype is inherited from the call around, else from the inputs.
    if policy.compute_dtype is None:
        policy = policy.replace(compute_dtype=given.place.inferred if around is None else around.inferred)
    dtype = policy.resolve(args, kwargs).compute_dtype
    active = intern_active_policy(given.owner, path_of(module), dtype)
    with activate_policy(active, module), nn.intercept_methods(make_interceptor(active)):
        return _call_by_weights(method, method, active, module, args, kwargs)


def _read_root_policy(given: ClassPolicy, kind: type) -> Policy:
    """Returns the policy of the attached module itself."""
    if isinstance(given.policy, Policy):
        return widen_policy(given.policy)
    return widen_policy(given.place.match(given.policy, (), {given.place.path(()): kind}).policy)


def _cast_first_carry(initialize_carry: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `initialize_carry` of a cell with a policy: a scan needs a carry in the output dtype of the cell."""

    @functools.wraps(initialize_carry)
    def initialize_cast_carry(self: nn.RNNCellBase, *args: Any, **kwargs: Any) -> Any:
        policy = _read_root_policy(read_class_policy(self), type(self))
        dtype = policy.compute_dtype if policy.output_dtype is None else policy.output_dtype
        return cast_floating(initialize_carry(self, *args, **kwargs), dtype)

    return initialize_cast_carry


BOUNDARY_HOOK: contextvars.ContextVar[Hook | None] = contextvars.ContextVar("BOUNDARY_HOOK", default=None)
"""The hook that runs around the casts of a module with a policy of its own."""


def intercept_calls(
    fun: Callable[..., Any], hook: Hook, *, setup: bool = False, boundary_hook: Hook | None = None
) -> Callable[..., Any]:
    """Returns `fun` with a hook for each method of a module, inside of its casts; `boundary_hook` runs around them."""

    def intercept(next_fun: Callable[..., Any], args: Args, kwargs: Kwargs, context: Any) -> Any:
        module: nn.Module = context.module
        skips_setup = context.method_name == "setup" and not setup
        if skips_setup or module.scope is None or is_trial(module, context.method_name):
            return next_fun(*args, **kwargs)
        # Modules that run through `.apply` in the hook or the method are inside of this one.
        with calling(module):
            return hook(_describe_call(module, context.method_name), next_fun, args, kwargs)

    def call_hooked(*args: Any, **kwargs: Any) -> Any:
        token = BOUNDARY_HOOK.set(boundary_hook or BOUNDARY_HOOK.get())
        try:
            # The first interceptor is the outermost, so those that apply policies run inside of it.
            with nn.intercept_methods(intercept):
                return fun(*args, **kwargs)
        finally:
            BOUNDARY_HOOK.reset(token)

    return call_hooked


def _describe_call(module: nn.Module, method: str) -> ModuleCall:
    def describe() -> str:
        active: ActivePolicy | None = CURRENT.value
        return "" if active is None else plan_module(module, active.match(module).policy).quantization

    name = module.name or type(module).__name__
    return ModuleCall(
        path=path_text(module),
        type=type(module),
        method=method,
        scope=name if method == "__call__" else f"{name}.{method}",
        module=module,
        describe_quantization=describe,
    )
