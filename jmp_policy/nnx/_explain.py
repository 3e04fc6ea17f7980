"""What `jmp_policy.explain` learns of an nnx module, and from the tree of modules in it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from .._base import Args, Kwargs, PyTree
from ..modules import Hook, Method, ModelInfo, ModuleInfo, describe_module
from ..policy import Policy, PolicyMap, match_policy
from ..quant._weights import is_quantized
from ._calls import hook_calls
from ._layers import has_written_dtype
from ._module_spec import ModuleSpec, find_spec
from ._nodes import NodeKind, find_kind, list_items
from ._quantized import QuantizedParam, describe_quantization


def examine(
    model: nnx.Module,
    inputs: Args,
    method: Method,
    rngs: PyTree,
    kwargs: Kwargs,
    trace: Callable[..., None],
    hook: Hook,
) -> ModelInfo:
    """Has an nnx module traced, or an abstract one as `nnx.eval_shape` makes it; what is called is a copy.

    Args:
      model: the module.
      inputs: positional arguments of the method.
      method: the name of what to call, a method, or a function of the module; `None` for the module itself.
      rngs: the argument `rngs` of the method, if it takes one.
      kwargs: other keyword arguments of the method.
      trace: called with a function that calls the copy, and its arguments.
      hook: runs in place of each method, around the casts of boundaries.
    """
    tree = _Tree(model)
    graphdef, state = nnx.split(model)
    if rngs is not None:
        kwargs = {"rngs": rngs, **kwargs}

    def call(state: Any, inputs: Args, kwargs: Kwargs) -> Any:
        run = lambda copy: find_method(copy, method)(*inputs, **kwargs)
        return hook_calls(run, hook)(nnx.merge(graphdef, state))

    trace(call, state, inputs, kwargs)
    return ModelInfo(tree.modules, tree.params, tree.explain_unused())


class _Given:
    """A policy or map that was attached to a module, and the types of the modules inside, by path relative to it."""

    def __init__(self, policy: Policy | PolicyMap, depth: int):
        self.policy = policy
        self.depth = depth
        self.types: dict[str, type] = {}

    def strip_path(self, path: tuple[str, ...]) -> str:
        """A path as the map sees it."""
        return "/".join(path[self.depth :])


class _Tree:
    """The modules of a model, each under the first path that leads to it.

    Attributes:
      modules: what holds at each, by path.
      params: the parameters of each module itself, by path; a shared one counts where it is met first.
    """

    def __init__(self, model: nnx.Module):
        self.modules: dict[str, ModuleInfo] = {}
        self.params: dict[str, list[Any]] = {}
        self._given: list[_Given] = []
        self._seen: set[int] = set()
        self._visit_module(model, (), None)

    def explain_unused(self) -> list[str]:
        """What to say of the rules that decided for no module."""
        maps = [(given.policy, given.types) for given in self._given if isinstance(given.policy, PolicyMap)]
        return [message for rules, types in maps for message in rules.explain_unused(types)]

    def _visit_module(self, module: nnx.Module, path: tuple[str, ...], given: _Given | None) -> None:
        spec = find_spec(module)
        if spec is None:
            given = None
        elif spec.attached or given is None:
            given = _Given(spec.given, len(path))
            self._given.append(given)
        self.modules["/".join(path)] = self._describe(module, spec, path, given)
        for name, value in list_items(module):
            self._visit(value, (*path, name), "/".join(path), given)

    def _visit(self, value: Any, path: tuple[str, ...], owner: str, given: _Given | None) -> None:
        kind = NodeKind.PARAM if issubclass(type(value), QuantizedParam) else find_kind(type(value))
        if kind is NodeKind.OTHER or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if kind is NodeKind.MODULE:
            self._visit_module(value, path, given)
        elif kind is NodeKind.PARAM:
            self.params.setdefault(owner, []).extend(jax.tree.leaves(value.get_raw_value(), is_leaf=is_quantized))
        else:
            if isinstance(value, nnx.Module) and given is not None:  # nnx.List and nnx.Dict, which rules may name
                given.types.setdefault(given.strip_path(path), type(value))
            for name, item in list_items(value):
                self._visit(item, (*path, name), owner, given)

    def _describe(
        self, module: nnx.Module, spec: ModuleSpec | None, path: tuple[str, ...], given: _Given | None
    ) -> ModuleInfo:
        if spec is None or given is None:
            return ModuleInfo(type(module))
        relative = given.strip_path(path)
        given.types[relative] = spec.base
        match = match_policy(given.policy, relative, given.types)
        info = describe_module(
            spec.base,
            match,
            attached=spec.attached,
            by_map=isinstance(given.policy, PolicyMap),
            written=_find_written_dtype(module, spec),
        )
        quantization = describe_quantization(spec.base, vars(module), match.policy)
        sums = "" if spec.accumulate_dtype is None else str(spec.accumulate_dtype)
        return dataclasses.replace(info, quantization=quantization, accumulate_dtype=sums)


def _find_written_dtype(module: nnx.Module, spec: ModuleSpec) -> Any:
    attributes = vars(module)
    return attributes["dtype"] if has_written_dtype(spec.base, attributes, spec.open_dtype) else None


def find_method(module: nnx.Module, method: Method) -> Callable[..., Any]:
    """What to call: a method is found again by its name, for the class of the module may be another one."""
    if method is None:
        return module  # type: ignore[return-value]
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    if isinstance(method, str) or hasattr(type(module), name):
        return getattr(module, name)
    return functools.partial(method, module)
