"""`LINEN`: the adapter of linen, and the description of a linen model for `explain`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import DenyList, meta

from .._base import Args, Kwargs, PyTree, forget_warnings, list_paths_to
from ..modules import Adapter, Hook, Method, ModelInfo, ModuleCall, ModuleInfo, describe_module, eval_shapes
from ..policy import Match, Policy, PolicyMap, match_policy, spell_key
from ..quant import WEIGHT_NAMES, is_quantized
from ._active_policy import CLASS_POLICY, CURRENT, NOTES, ActivePolicy, ClassPolicy
from ._fields import AUTOCAST_EXAMPLE, written_dtype
from ._interceptor import is_bridge
from ._methods import intercept_calls, make_boundary_class, unpolicied_class
from ._place import ROOT, ModulePlace, calling, explain_unknown, path_of, path_text
from ._quantized import plan_module


def examine(
    model: nn.Module, inputs: Args, method: Method, rngs: PyTree, kwargs: Kwargs, trace: Callable[..., None], hook: Hook
) -> ModelInfo:
    """Traces a linen module, and describes each module that it calls (`Adapter.examine`)."""
    called = _CalledModules()
    method = called.note_root_of(method) if inspect.isfunction(method) else method

    def init(rngs: PyTree, inputs: Args, kwargs: Kwargs) -> Any:
        return model.init(_name_keys(rngs), *inputs, method=method, **kwargs)

    def apply(variables: Any, rngs: PyTree, inputs: Args, kwargs: Kwargs) -> Any:
        mutable = DenyList("params")  # a call may write caches, statistics and sown values
        return model.apply(variables, *inputs, rngs=_name_keys(rngs), method=method, mutable=mutable, **kwargs)

    def note_and_hook(call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        called.note(call.module)
        out = hook(call, next_fun, args, kwargs)
        called.note_wrapped(call.module)
        return out

    variables = eval_shapes(init, rngs, inputs, kwargs)
    # Around a boundary, only the hook runs: its policy becomes active inside.
    trace(intercept_calls(apply, note_and_hook, boundary_hook=hook), variables, rngs, inputs, kwargs)
    params: dict[str, list[Any]] = {}  # of each module, without those of called modules inside it
    for keys, leaf in jax.tree.leaves_with_path(variables.get("params", {})):
        names = [str(key.key) for key in keys if isinstance(key, jax.tree_util.DictKey)]
        around = list_paths_to("/".join(names))
        params.setdefault(next(path for path in reversed(around) if path in called.modules), []).append(leaf)
    unknown = [*explain_unknown(called.modules), *called.wrapped.values()]
    return ModelInfo(called.modules, params, called.explain_unused(), unknown)


class _CalledModules:
    """The called modules by path (`modules`), and a sentence for each that wraps an nnx module (`wrapped`)."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleInfo] = {}
        self.wrapped: dict[str, str] = {}
        # For each attached module, the types of the modules inside by relative path.
        self._types: dict[ActivePolicy, dict[str, type]] = {}

    def note(self, module: nn.Module) -> None:
        """Describes a module whose method is about to run."""
        path = path_text(module)
        if path not in self.modules:
            self.modules[path] = self._describe(module)

    def note_wrapped(self, module: nn.Module) -> None:
        """Records the nnx module inside of a linen one. It exists only during the call, and so has no rows."""
        active: ActivePolicy | None = CURRENT.value
        if active is None or not is_bridge(module):
            return
        here = active.locate(module)
        types = {path: kind for path, kind in NOTES.get().types.items() if not here or here in list_paths_to(path)}
        self._types.setdefault(active.attachment, {}).update(types)
        rules = active.get_rules_inside(module, active.match(module).policy)
        if isinstance(rules, Policy) and rules.quantization is None:
            return
        decided = [(path, match_policy(rules, path, types).rule) for path in types]
        named = "; ".join(f"{spell_key(rule.key)} decides for {path!r}" for path, rule in decided if rule is not None)
        self.wrapped[path_text(module)] = (
            f"{path_text(module)!r} wraps an nnx module, whose layers have no rows: each gets its policy and its "
            "format by its own path" + (f" ({named})" if named else "")
        )

    def note_root_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function of the root, which Flax does not intercept, so that it records the root too."""

        @functools.wraps(function)
        def note_and_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.note(module)
            with calling(module):
                return function(module, *args, **kwargs)

        return note_and_call

    def explain_unused(self) -> list[str]:
        maps = [(active.policy, types) for active, types in self._types.items() if isinstance(active.policy, PolicyMap)]
        return [message for rules, types in maps for message in rules.explain_unused(types)]

    def _describe(self, module: nn.Module) -> ModuleInfo:
        active: ActivePolicy | None = CURRENT.value
        kind = unpolicied_class(type(module))
        if active is None:
            return ModuleInfo(kind)
        attached = active.belongs_to(module)
        relative = "/".join(path_of(module)[len(active.path) :])
        self._types.setdefault(active.attachment, {})[relative] = type(module)
        match: Match = active.match(module)
        plan = plan_module(module, match.policy)
        return describe_module(
            kind,
            match,
            attached=attached,
            by_map=isinstance(active.policy, PolicyMap),
            written=written_dtype(module),
            quantization=plan.quantization,
            sums=plan.accumulate,
        )


def _name_keys(rngs: Any) -> dict[str, Any]:
    if isinstance(rngs, Mapping):
        return {"params": jax.random.key(0), **rngs}
    return {"params": jax.random.key(0) if rngs is None else rngs}


class _Linen(Adapter):
    """The adapter of linen, whose modules hold no arrays: a call reads and writes variables. See `Adapter`."""

    autocast_example = AUTOCAST_EXAMPLE
    audit_example = "audit(model.apply)(variables, x)"

    def attach(self, target: Any, policy: Policy | PolicyMap, no_cast: Collection[str]) -> Any:
        base = unpolicied_class(target if isinstance(target, type) else type(target))
        cls = make_boundary_class(base, policy, frozenset(no_cast), ROOT)
        forget_warnings(cls)
        forget_warnings(policy)
        return cls if isinstance(target, type) else _change_class(target, cls)

    def policy_of(self, target: Any) -> Policy | PolicyMap | None:
        given: ClassPolicy | None = getattr(target, CLASS_POLICY, None)
        return None if given is None else given.policy

    def hook_calls(self, fun: Callable[..., Any], hook: Hook, *, setup: bool = False) -> Callable[..., Any]:
        return intercept_calls(fun, hook, setup=setup)

    def bind(self, model: nn.Module, variables: Any) -> nn.Module:
        if (model.scope is None) == (variables is None):
            amiss = "and is bound to some already" if variables is not None else "and is not bound to them"
            raise ValueError(f"A linen module runs with variables, {amiss}. For example: model.bind(variables).")
        return model if variables is None else model.bind(variables)

    def run(self, model: nn.Module, inputs: Args, method: Method, kwargs: Kwargs, hook: Hook) -> Any:
        unbound, variables = model.unbind()
        mutable = DenyList("params")  # a call may write caches, statistics and sown values
        return intercept_calls(unbound.apply, hook)(variables, *inputs, method=method, mutable=mutable, **kwargs)[0]

    examine = staticmethod(examine)

    def find_weights(self, model: nn.Module) -> dict[str, Any]:
        weights = {}
        for where, leaf in self.list_parameters(model).items():
            path, _, name = where.rpartition("/")
            if name in WEIGHT_NAMES and leaf.ndim > 1:
                weights[path] = leaf
        return weights

    def list_parameters(self, model: nn.Module) -> dict[str, Any]:
        _, variables = model.unbind()
        leaves = jax.tree.leaves_with_path(meta.unbox(variables.get("params", {})), is_leaf=is_quantized)
        return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}

    def attach_for_nnx(
        self,
        module: nn.Module,
        policy: Policy | PolicyMap,
        no_cast: Collection[str],
        lineage: tuple[tuple[str, type], ...],
        boundary: bool,
        inferred: np.dtype | None,
    ) -> nn.Module:
        """Returns a linen module inside an nnx model, with the policy of that model."""
        place = ModulePlace(lineage, boundary, inferred)
        return _change_class(
            module, make_boundary_class(unpolicied_class(type(module)), policy, frozenset(no_cast), place)
        )


LINEN = _Linen()


def _change_class(target: nn.Module, kind: type[nn.Module]) -> Any:
    """Returns a copy of a module with another class."""
    module = object.__new__(kind)  # `copy.copy` reads attributes first, on which ToLinen recurses forever
    vars(module).update(vars(target))
    if target.scope is not None:
        # The original may have taken the names of its parameters: the copy starts as a second call would.
        object.__setattr__(module, "scope", target.scope.rewound())
        object.__setattr__(module, "_state", dataclasses.replace(target._state, children={**target._state.children}))
    return module
