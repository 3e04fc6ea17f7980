"""Traces a linen module for `jmp_policy.explain`."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import DenyList

from .._base import Args, Kwargs, PyTree, list_paths_to
from ..modules import Hook, Method, ModelInfo, ModuleCall, ModuleInfo, describe_module
from ..modules.common import eval_shapes
from ..policy import Match, Policy, PolicyMap, match_policy, spell_key
from ._active_policy import CURRENT, NOTES, ActivePolicy
from ._calls import hook_calls
from ._classes import unpolicied_class
from ._fields import written_dtype
from ._interceptor import is_bridge
from ._place import calling, explain_unknown, path_of, path_text
from ._products import find_sums_dtype
from ._quantized import quantization_of


def examine(
    model: nn.Module,
    inputs: Args,
    method: Method,
    rngs: PyTree,
    kwargs: Kwargs,
    trace: Callable[..., None],
    hook: Hook,
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
    trace(hook_calls(apply, note_and_hook, boundary_hook=hook), variables, rngs, inputs, kwargs)
    params = _params_by_module(variables.get("params", {}), called.modules)
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
        """Returns warnings about the rules that cover no module."""
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
        return describe_module(
            kind,
            match,
            attached=attached,
            by_map=isinstance(active.policy, PolicyMap),
            written=written_dtype(module),
            quantization=quantization_of(module, match.policy),
            sums=find_sums_dtype(module, match.policy),
        )


def _name_keys(rngs: Any) -> dict[str, Any]:
    if isinstance(rngs, Mapping):
        return {"params": jax.random.key(0), **rngs}
    return {"params": jax.random.key(0) if rngs is None else rngs}


def _params_by_module(params: Any, modules: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the parameters of each module, without the parameters of called modules inside it."""
    owned: dict[str, list[Any]] = {}
    for keys, leaf in jax.tree.leaves_with_path(params):
        names = [str(key.key) for key in keys if isinstance(key, jax.tree_util.DictKey)]
        around = list_paths_to("/".join(names))
        owned.setdefault(next(path for path in reversed(around) if path in modules), []).append(leaf)
    return owned
