"""`NNX`: the adapter of nnx, and the description of an nnx model for `explain`."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .._base import Args, Kwargs, PyTree, warn_user
from ..modules import Adapter, Hook, Method, ModelInfo, ModuleInfo, describe_module
from ..policy import Policy, PolicyMap, match_policy
from ..quant import LayerFacts, LayerPlan, Layout, QuantizedArray, is_quantized
from ._attachment import AUTOCAST_EXAMPLE, Attachment, reject_param
from ._decorate import attach_wrapped, decorate_class, find_given_policy
from ._grad import value_and_grad
from ._layer_state import find_state
from ._layer_table import WRITTEN, read_layer
from ._lift import lift
from ._methods import find_modules, hook_modules, parse_no_cast
from ._module_spec import DtypeSource, ModuleSpec, find_spec, has_written_dtype, plan_again
from ._own_weights import list_own_weights
from ._products import QuantizedParam
from ._shadow import NodeKind, find_kind, list_items, replace_nodes


def examine(
    model: Any, inputs: Args, method: Method, rngs: PyTree, kwargs: Kwargs, trace: Callable[..., None], hook: Hook
) -> ModelInfo:
    """Traces a copy of an nnx module, which may be abstract (`Adapter.examine`)."""
    tree = _Tree(model)
    graphdef, state = nnx.split(model)
    if rngs is not None or _requires_rngs(find_method(model, method)):
        kwargs = {"rngs": rngs, **kwargs}

    def call(state: Any, inputs: Args, kwargs: Kwargs) -> Any:
        run = lambda copy: find_method(copy, method)(*inputs, **kwargs)
        return hook_modules(run, hook)(nnx.merge(graphdef, state))

    trace(call, state, inputs, kwargs)
    return ModelInfo(tree.modules, tree.params, tree.explain_unused())


def _requires_rngs(method: Callable[..., Any]) -> bool:
    """True if a method has a required keyword-only argument `rngs`, so that `None` must be passed too."""
    given = inspect.signature(method).parameters.get("rngs") if callable(method) else None
    return given is not None and given.kind is given.KEYWORD_ONLY and given.default is given.empty


class _Given(NamedTuple):
    """A policy or map that was attached to a module `depth` names deep, and the types inside by relative path."""

    policy: Policy | PolicyMap
    depth: int
    types: dict[str, type]

    def strip_path(self, path: tuple[str, ...]) -> str:
        return "/".join(path[self.depth :])


class _Tree:
    """The modules of a model, each under the first path that leads to it."""

    def __init__(self, model: nnx.Module):
        self.modules: dict[str, ModuleInfo] = {}  # the modules, by path
        # The parameters of each module itself, by path. A shared one is listed once.
        self.params: dict[str, list[Any]] = {}
        self._given: list[_Given] = []
        self._seen: set[int] = set()
        self._visit_module(model, (), None)

    def explain_unused(self) -> list[str]:
        maps = [(given.policy, given.types) for given in self._given if isinstance(given.policy, PolicyMap)]
        return [message for rules, types in maps for message in rules.explain_unused(types)]

    def _visit_module(self, module: nnx.Module, path: tuple[str, ...], given: _Given | None) -> None:
        spec = find_spec(module)
        if spec is None:
            given = None
        elif spec.attached or given is None:
            given = _Given(spec.given, len(path), {})
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
        attributes, is_open = vars(module), spec.dtype_source is DtypeSource.FIELD
        return describe_module(
            spec.base,
            match,
            attached=spec.attached,
            by_map=isinstance(given.policy, PolicyMap),
            written=attributes["dtype"] if has_written_dtype(spec.base, attributes, is_open) else None,
            quantization=plan_again(module, spec, match.policy)[1].quantization,
            sums=spec.accumulate_dtype,
        )


def find_method(module: nnx.Module, method: Method) -> Callable[..., Any]:
    """Returns the method to call, by its name: the class of the module may have replaced it."""
    if method is None:
        return module  # type: ignore[return-value]
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    if isinstance(method, str) or hasattr(type(module), name):
        return getattr(module, name)
    return functools.partial(method, module)


class _Nnx(Adapter):
    """The adapter of nnx. Its modules hold their Variables, and a call may write to them. See `Adapter`."""

    autocast_example = AUTOCAST_EXAMPLE
    audit_example = "audit(lambda model, x: model(x))(model, x)"

    def attach(self, target: Any, policy: Policy | PolicyMap, no_cast: Collection[str]) -> Any:
        """Copies a module, which shares its Variables with the copy, or makes a subclass of a class."""
        base = target if isinstance(target, type) else type(target)
        names = parse_no_cast(base, no_cast)
        if isinstance(target, type):
            return decorate_class(target, policy, names)
        attachment = Attachment(policy, reject_param, no_cast=names)
        module = attachment.attach(target)
        unused = *attachment.explain_unused_rules(), *attachment.explain_unused_cache()
        for message in (*unused, *attachment.explain_written_dtypes()):
            warn_user(message)
        return module

    def policy_of(self, target: Any) -> Policy | PolicyMap | None:
        """Returns the policy that was given to a module or class, or by a rule that names it."""
        if isinstance(target, type):
            return find_given_policy(target)
        spec = find_spec(target)
        if spec is None or not spec.casts:
            return None
        return spec.given if spec.attached else spec.policy

    def hook_calls(self, fun: Callable[..., Any], hook: Hook, *, setup: bool = False) -> Callable[..., Any]:
        return hook_modules(fun, hook)

    find_modules = staticmethod(find_modules)

    def bind(self, model: nnx.Module, variables: Any) -> nnx.Module:
        if variables is not None:
            raise ValueError("variables belong to a linen module; an nnx model has its own.")
        return model

    def run(self, model: nnx.Module, inputs: Args, method: Method, kwargs: Kwargs, hook: Hook) -> Any:
        def call(copy: nnx.Module) -> Any:  # the inputs are not arguments: modules among them are not hooked
            return find_method(copy, method)(*inputs, **kwargs)

        return hook_modules(call, hook)(nnx.clone(model))

    examine = staticmethod(examine)
    value_and_grad = staticmethod(value_and_grad)

    def find_weights(self, model: nnx.Module) -> dict[str, Any]:
        weights = {}
        for path, module in nnx.iter_modules(model):
            spec = find_spec(module)
            facts = read_layer(type(module), vars(module)) if spec is None else plan_again(module, spec)[0]
            if facts.weight is not None:
                weights["/".join(map(str, path))] = facts.weight
        return weights

    def list_parameters(self, model: nnx.Module) -> dict[str, Any]:
        kinds = (nnx.Param, QuantizedParam)
        nodes = ((path, node) for path, node in nnx.iter_graph(model, graph=True) if isinstance(node, kinds))
        return {"/".join(map(str, path)): node.get_raw_value() for path, node in nodes}

    def quantize(
        self,
        model: nnx.Module,
        policy: Policy | PolicyMap,
        quantize_weight: Callable[..., Any],
        own_layouts: Mapping[str, Layout],
    ) -> tuple[nnx.Module, list[str]]:
        """Quantizes the weights of a copy of a model; see `jmp_policy.quant.quantize`."""
        spec = find_spec(model)
        attachment = Attachment(policy, reject_param, no_cast=spec.no_cast if spec else ())
        attached = attachment.attach(nnx.clone(model))
        # Maps each variable to its new one, so that tied weights stay tied. The values keep the ids in the keys valid.
        done: dict[Any, tuple[Any, nnx.Variable]] = {}
        for path, module in nnx.iter_modules(attached):
            spec = find_spec(module)
            if spec is None:
                continue
            facts, plan = plan_again(module, spec)
            if facts.layer is None or facts.weight is None:
                continue
            name, mask = facts.layer.weight, vars(module).get("mask")
            variable = vars(module)[name]
            # Layers that differ in one of these quantize the same weight differently.
            key = id(variable), id(mask), facts.layout, spec.policy.quantization
            if key not in done:
                new = _quantize_layer(quantize_weight, "/".join(map(str, path)), mask, spec, facts, plan)
                done[key] = (variable, mask), variable if new is None else QuantizedParam(new)
            vars(module)[name] = done[key][1]
            if mask is not None and done[key][1] is not variable:
                module.mask = None  # type: ignore[attr-defined]  # the mask is in the quantized weight
        replaced: dict[int, Any] = {}
        for own in list_own_weights(attached):
            if own.path in own_layouts:
                module, _, name = own.path.rpartition("/")
                layout, value = own_layouts[own.path], own.variable.get_raw_value()
                stored = quantize_weight(module, name, value, layout, own.policy)
                replaced |= {} if stored is None else {id(own.variable): QuantizedParam(stored)}
        replace_nodes(attached, replaced)
        return attached, attachment.explain_unused_rules()

    def take_apart(self, args: Args) -> tuple[Any, Callable[[Any], Args]]:
        graph, state = nnx.split(args)
        return state, lambda state: nnx.merge(graph, state)

    attach_wrapped = staticmethod(attach_wrapped)
    find_state = staticmethod(find_state)
    lift = staticmethod(lift)


NNX = _Nnx()


def _quantize_layer(
    quantize_weight: Callable[..., Any], path: str, mask: Any, spec: ModuleSpec, facts: LayerFacts, plan: LayerPlan
) -> QuantizedArray | None:
    """Returns the quantized weight of a layer, or `None` if it stays floating."""
    value, layer = facts.weight, facts.layer
    assert layer is not None
    if mask is not None and not isinstance(value, QuantizedArray):  # of a convolution
        is_abstract = isinstance(value, jax.ShapeDtypeStruct)
        value = jax.eval_shape(jnp.multiply, value, mask) if is_abstract else value * mask
    unfit = WRITTEN if plan.format is None else None
    return quantize_weight(path, layer.weight, value, facts.layout, spec.policy, unfit)
