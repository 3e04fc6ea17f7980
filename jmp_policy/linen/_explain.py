"""`jmp_policy.explain` for linen modules."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import DenyList

from .._policy_map import Match, PolicyMap
from ..explanation import Explanation
from ..explanation._build import explanation
from ..explanation._module import ModuleInfo, module_info
from ..explanation._observation import observe, observe_call, shapes
from ..explanation._operations import operations
from ._active_policy import CURRENT, ActivePolicy
from ._classes import unpolicied_class
from ._fields import written_dtype
from ._place import calling, explain_unknown, is_trial, path_of
from ._quantized import quantization_of


def explain(model: nn.Module, inputs: tuple, method: Any, rngs: Any, kwargs: dict[str, Any]) -> Explanation:
    """Explains a linen module; its variables are made abstractly, by its `init`.

    Args:
      model: an unbound module.
      inputs: positional arguments of the method.
      method: what to call, as in `Module.apply`.
      rngs: a key or keys by name, as in `Module.init`; without them one key stands for all.
      kwargs: keyword arguments of the method.
    """
    met = _Met()
    method = met.meeting(method) if inspect.isfunction(method) else method

    def init(rngs: Any, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        return model.init(_named(rngs), *inputs, method=method, **kwargs)

    def apply(variables: Any, rngs: Any, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        with nn.intercept_methods(met.intercept):
            mutable = DenyList("params")  # a cache, statistics and what is sown: any call may write them
            return model.apply(variables, *inputs, rngs=_named(rngs), method=method, mutable=mutable, **kwargs)

    variables = shapes(init, rngs, inputs, kwargs)
    observation, program = observe(apply, variables, rngs, inputs, kwargs)
    params = _params_by_module(variables.get("params", {}), met.modules)
    unknown = explain_unknown(met.modules)
    return explanation(met.modules, params, observation, list(operations(program.jaxpr)), met.unused(), unknown)


class _Met:
    """The modules that were called.

    Attributes:
      modules: what holds at each, by path.
    """

    def __init__(self) -> None:
        self.modules: dict[str, ModuleInfo] = {}
        # The types of the modules in each, by path relative to it.
        self._frames: dict[ActivePolicy, dict[str, type]] = {}

    def intercept(self, next_fun: Callable[..., Any], args: tuple, kwargs: dict, context: Any) -> Any:
        """The interceptor that observes calls; the first in place, and so outside of those that apply policies."""
        module: nn.Module = context.module
        if context.method_name == "setup" or module.scope is None or is_trial(module, context.method_name):
            return next_fun(*args, **kwargs)
        self._meet(module)
        with calling(module):
            return observe_call("/".join(path_of(module)), next_fun, args, kwargs)

    def meeting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the root, which Flax does not intercept as it does methods: the root is met all the same."""

        @functools.wraps(function)
        def meeting_root(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._meet(module)
            with calling(module):
                return function(module, *args, **kwargs)

        return meeting_root

    def unused(self) -> list[str]:
        """What to say of the rules that decided for no module."""
        maps = [(frame.policy, types) for frame, types in self._frames.items() if isinstance(frame.policy, PolicyMap)]
        return [message for rules, types in maps for message in rules.explain_unused(types)]

    def _meet(self, module: nn.Module) -> None:
        path = "/".join(path_of(module))
        if path not in self.modules:
            self.modules[path] = self._info(module)

    def _info(self, module: nn.Module) -> ModuleInfo:
        frame: ActivePolicy | None = CURRENT.value
        kind = unpolicied_class(type(module))
        if frame is None:
            return ModuleInfo(kind)
        attached = frame.belongs_to(module)
        relative = "/".join(path_of(module)[len(frame.path) :])
        self._frames.setdefault(frame.attachment, {})[relative] = type(module)
        match: Match = frame.match(module)
        by_map = isinstance(frame.policy, PolicyMap)
        info = module_info(kind, match, attached=attached, by_map=by_map, written=written_dtype(module))
        return dataclasses.replace(info, quantization=quantization_of(module, match.policy))


def _named(rngs: Any) -> dict[str, Any]:
    if isinstance(rngs, Mapping):
        return {"params": jax.random.key(0), **rngs}
    return {"params": jax.random.key(0) if rngs is None else rngs}


def _params_by_module(params: Any, modules: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The parameters of each module itself: those that no module inside it, of those met, has."""
    owned: dict[str, list[Any]] = {}
    for keys, leaf in jax.tree.leaves_with_path(params):
        names = [str(key.key) for key in keys if isinstance(key, jax.tree_util.DictKey)]
        around = ("/".join(names[:n]) for n in range(len(names), -1, -1))
        owned.setdefault(next(path for path in around if path in modules), []).append(leaf)
    return owned
