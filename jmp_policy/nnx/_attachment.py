"""Gives a policy to each module of a tree."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from .._base import OVERWRITE, hide_frames, is_in_full_precision, remember_on_class
from ..modules import describe_written_dtypes, find_other_dtype, make_subclass
from ..policy import Match, Policy, PolicyMap, match_policy, stored_format_of
from ..quant import WEIGHT_NAMES, explain_unused_cache, plan_layer
from ._cache import cache_format_of
from ._layer_table import read_layer
from ._methods import list_public_methods, run_method
from ._module_spec import (
    SPEC,
    WRAPPERS,
    CallEffect,
    DtypeSource,
    ModuleSpec,
    find_dtype_source,
    find_spec,
    has_linen_module,
    has_written_dtype,
    is_plain_layer,
    make_dtype_attributes,
    make_linen_attributes,
)
from ._products import (
    check_weight,
    choose_layer_class,
    make_bound_layer,
    make_float8_attributes,
    make_product_attributes,
)
from ._shadow import (
    Attributes,
    Node,
    NodeKind,
    find_floating_dtypes,
    find_kind,
    list_items,
    make_blank,
    pytree_options,
    replace_items,
)

AUTOCAST_EXAMPLE = "autocast(lambda model, x: model(x), 'mixed_bfloat16')"

_MAY_HOLD_MODULES = (NodeKind.MODULE, NodeKind.PYTREE, NodeKind.BUILTIN)

Path = tuple[str, ...]
"""The names that lead to a value in a tree."""

Mismatch = Callable[[str, nnx.Param, Policy], None]
"""Called with a path, a Param that is not stored in the param dtype, and its policy."""


class _Around(NamedTuple):
    """The context of a value in the tree."""

    policy: Policy  # the policy of the module around it
    handed_on: Any = None  # an open dtype that this module may have handed on
    rewritten: bool = False  # true if a module around it rewrites the weights inside, which stay floating


class Attachment:
    """A walk that copies modules, which share their Variables, and gives each a spec; `owned` ones change in place."""

    def __init__(
        self,
        given: Policy | PolicyMap,
        on_mismatch: Mismatch,
        *,
        no_cast: tuple[str, ...] = (),
        owned: Callable[[nnx.Module], bool] = lambda module: False,
        lineage: tuple[tuple[str, type], ...] = (),
    ):
        self.given = given
        self.no_cast = no_cast
        self.types = dict(lineage)  # the types of the modules met, by path
        self._on_mismatch = on_mismatch
        self._owned = owned
        self._layers: dict[str, np.dtype | None] = {}  # path -> wider dtype of the author
        self._done: dict[int, tuple[Node, Any]] = {}  # id(value) -> (value, new); holding the value keeps its id valid

    def attach(self, module: nnx.Module) -> nnx.Module:
        """Gives the policy to a module as the root of a tree."""
        return self._attach_module(module, (), None, is_root=True)

    def attach_inside(self, module: nnx.Module, path: Path) -> nnx.Module:
        """Gives the policy to a module at a path inside a tree."""
        return self._attach_value(module, path, _Around(self._find_match("/".join(path)).policy))

    def explain_unused_rules(self) -> list[str]:
        # A rule may name a module inside of a linen one, which appears when it is called.
        if isinstance(self.given, Policy) or any(map(has_linen_module, self.types.values())):
            return []
        return self.given.explain_unused(self.types)

    def explain_written_dtypes(self) -> list[str]:
        """Returns a warning if the dtypes that authors wrote keep most layers out of the compute dtype."""
        return describe_written_dtypes(self._layers, AUTOCAST_EXAMPLE)

    def explain_unused_cache(self) -> list[str]:
        """Returns a warning if no attention layer stores its cache as the policy says."""
        layers = ((cache_format_of(kind, self._find_match(path).policy), kind) for path, kind in self.types.items())
        is_used = any(format is not None or has_linen_module(kind) for format, kind in layers)
        return [] if is_used else explain_unused_cache(self.given)

    def include(self, value: Node, path: Path, policy: Policy) -> Node:
        """Gives the policy to the modules in a value at a path inside a tree."""
        # A module around it that rewrites weights has a policy without quantization.
        rewritten = policy != self._find_match("/".join(path[:-1])).policy
        return self._attach_value(value, path, _Around(policy, rewritten=rewritten))

    def _attach_value(self, value: Node, path: Path, around: _Around | None) -> Node:
        """Returns a value with policies inside. `around` is `None` inside of a module that keeps its own policy."""
        match find_kind(type(value)):
            case NodeKind.MODULE:
                return self._attach_module(value, path, around)
            case NodeKind.PARAM:
                self._check_param(value, path, around)
            case NodeKind.STATE:
                for name, item in list_items(value):
                    self._attach_value(item, (*path, name), around)
            case NodeKind.PYTREE | NodeKind.BUILTIN:
                return self._attach_container(value, path, around)
        return value

    def _attach_container(self, container: Node, path: Path, around: _Around | None) -> Node:
        if id(container) in self._done:
            return self._done[id(container)][1]
        if isinstance(container, nnx.Module):  # nnx.List and nnx.Dict have paths, and rules may name them
            self.types.setdefault("/".join(path), type(container))
            around = around and around._replace(policy=self._find_match("/".join(path)).policy)
        # A container without modules stays the same object, in case the code compares it.
        self._done[id(container)] = container, container
        items = list_items(container)
        new = [self._attach_value(item, (*path, name), around) for name, item in items]
        if any(a is not b for a, (_, b) in zip(new, items, strict=True)):
            self._done[id(container)] = container, replace_items(container, new)
        return self._done[id(container)][1]

    def _attach_module(self, module: nnx.Module, path: Path, around: _Around | None, is_root: bool = False) -> Any:
        if id(module) in self._done:  # a shared module has the policy of the first path that leads to it
            return self._done[id(module)][1]
        old, here = find_spec(module), "/".join(path)
        base = type(module) if old is None else old.base
        self.types.setdefault(here, base)

        # A module with a policy of its own keeps it, also for the modules inside.
        if not is_root and (around is None or (old is not None and old.attached)):
            return self._rebuild(module, type(module), path, None, vars(module), {})

        # Restore the attributes that an earlier policy replaced. Float8 state outlives policies.
        attributes = vars(module) | dict(old.authored if old else ())
        state = attributes.pop(OVERWRITE, None)

        # Find the policy of the module, and where its code reads the compute dtype.
        match = self._find_match(here)
        policy, rewritten = match.policy, issubclass(base, WRAPPERS) or (around is not None and around.rewritten)
        if rewritten and stored_format_of(policy.quantization) is not None:
            policy = policy.replace(quantization=None)
        source = find_dtype_source(base, attributes, around.handed_on if around else None, old)
        is_open = source is DtypeSource.FIELD
        has_own_dtype = has_written_dtype(base, attributes, is_open)
        if "dtype" in attributes and any(name in attributes for name in WEIGHT_NAMES):
            self._layers[here] = find_other_dtype(attributes["dtype"] if has_own_dtype else None, policy)
        new_attributes = make_dtype_attributes(base, attributes, policy, is_open)

        # Decide once what the policy does to its matmul, and make the attributes that an expert would write for that.
        facts = read_layer(base, attributes)
        plan = plan_layer(facts, policy, policy.compute_dtype)
        check_weight(here, attributes, facts, plan, policy)
        new_attributes |= make_product_attributes(base, attributes, policy, facts, plan)
        new_state = make_float8_attributes(state, attributes, facts, plan)
        layer_class = choose_layer_class(base, facts.layer, plan)

        # Decide what a call does. An author's dtype wins over a rule: a cast to another one first would lose precision.
        if is_root:
            effect = CallEffect.CASTS_AT_ROOT
        elif match.boundary and not has_own_dtype:
            effect = CallEffect.CASTS
        elif policy.compute_dtype is None or layer_class is make_bound_layer or not is_plain_layer(base, attributes):
            effect = CallEffect.COMPUTES
        else:
            effect = CallEffect.NOTHING
        spec = ModuleSpec(
            base=base,
            policy=policy,
            given=self.given,
            lineage=self._find_lineage(path),
            effect=effect,
            no_cast=self.no_cast if is_root else (),
            dtype_source=source,
            layer_class=layer_class,
            accumulate_dtype=plan.accumulate,
            cache=cache_format_of(base, policy),
            authored=tuple((name, attributes[name]) for name in new_attributes),
        )

        # Copy the module with this spec in its class. The modules inside may have got its open dtype.
        new_attributes |= new_state
        if source is DtypeSource.LINEN_MODULE:
            new_attributes |= make_linen_attributes(attributes, spec)
        inside = _Around(policy, attributes["dtype"] if is_open else None, rewritten)
        return self._rebuild(module, make_policied_class(spec), path, inside, attributes, new_attributes)

    def _find_lineage(self, path: Path) -> tuple[tuple[str, type], ...]:
        """Returns the types of a module and those around it, by path; nothing under one policy, to share classes."""
        if isinstance(self.given, Policy):
            return ()
        paths = ["/".join(path[:n]) for n in range(len(path) + 1)]
        return tuple((outer, self.types[outer]) for outer in paths if outer in self.types)

    def _rebuild(
        self,
        module: nnx.Module,
        kind: type,
        path: Path,
        inside: _Around | None,
        attributes: Attributes,
        new_attributes: Attributes,
    ) -> Any:
        """Copies a module with another class, after the values inside it."""
        new = module if self._owned(module) else make_blank(type(module), {})
        self._done[id(module)] = module, new  # first, because values inside may refer to it
        values = {name: self._attach_value(value, (*path, name), inside) for name, value in attributes.items()}
        values |= new_attributes
        state = values.pop(OVERWRITE, None)
        vars(new).update(values)
        object.__setattr__(new, "__class__", kind)
        # Set and deleted as an attribute, not in vars: nnx tracks the attributes that hold arrays.
        if state is not None:
            setattr(new, OVERWRITE, nnx.data(state))
        elif OVERWRITE in vars(module):
            vars(new)[OVERWRITE] = None
            delattr(new, OVERWRITE)
        return new

    def _check_param(self, param: nnx.Param, path: Path, around: _Around | None) -> None:
        if around is None or around.policy.param_dtype is None:
            return
        here, dtype = "/".join(path), around.policy.param_dtype
        if id(param) not in self._done:
            self._done[id(param)] = param, (here, dtype)
            if not find_floating_dtypes(param) <= {dtype}:
                self._on_mismatch(here, param, around.policy)
        # A Param that two modules share has one dtype: the first module decides, and the second has to agree.
        first, stored = self._done[id(param)][1]
        if stored != dtype:
            raise ValueError(
                f"The parameter {here!r} is {first!r} as well, but one policy stores it in {dtype} and the other in "
                f"{stored}. Give both places one param dtype. For example: 'params={stored},compute={dtype}'."
            )

    def _find_match(self, path: str) -> Match:
        return match_policy(self.given, path, self.types)


def make_policied_class(spec: ModuleSpec) -> type:
    """Returns the subclass of `spec.runs` for a spec; the same one for equal specs, so that jit caches hit."""
    return _make_policied_class(spec.base, spec)


@remember_on_class
def _make_policied_class(_: type, spec: ModuleSpec) -> type:
    base = spec.runs
    namespace = {SPEC: spec, "__reduce__": lambda self: (rebuild_module, (spec, vars(self).copy()))}
    if not issubclass(base, nnx.List | nnx.Dict):
        base, methods = wrap_methods(base, spec.base)
        namespace |= methods
    return make_subclass(base, namespace, (make_policied_class, (spec,)), **pytree_options(base))


def rebuild_module(spec: ModuleSpec, attributes: Attributes) -> nnx.Module:
    """Makes a module from a pickle."""
    return make_blank(make_policied_class(spec), attributes)


def wrap_methods(base: type, owner: type) -> tuple[type, dict[str, Callable[..., Any]]]:
    """Wraps the public methods of `base`; returns a base with those that `owner` inherits, and the others by name."""
    own = {name: _wrap_method(method) for name, method in list_public_methods(base) if name in vars(owner)}
    return _wrap_inherited_methods(base, owner), own


@remember_on_class
def _wrap_inherited_methods(base: type, owner: type) -> type:
    inherited = {name: _wrap_method(method) for name, method in list_public_methods(base) if name not in vars(owner)}
    if not inherited:
        return base
    recipe = _wrap_inherited_methods, (base, owner)
    return make_subclass(base, inherited, recipe, metaclass=type(base), **pytree_options(base))


def _wrap_method(method: Any) -> Callable[..., Any]:
    @hide_frames
    @functools.wraps(method)
    def call_with_policy(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        spec = find_spec(self)
        # A shadow, an instance in its constructor, or a layer whose attributes are enough.
        if spec is None or (spec.effect is CallEffect.NOTHING and not is_in_full_precision()):
            return method.__get__(self, type(self))(*args, **kwargs)
        adopt(self, spec)
        return run_method(self, spec, method, args, kwargs)

    call_with_policy._jmp_method = method  # type: ignore[attr-defined]
    return call_with_policy


def adopt(module: nnx.Module, spec: ModuleSpec) -> None:
    """Gives the policy to copies of the modules that were assigned to a policied one since the last call."""
    for name, value in list(vars(module).items()):
        if find_kind(type(value)) in _MAY_HOLD_MODULES and _has_new_module(value, spec):
            attachment = Attachment(spec.given, reject_param, lineage=spec.lineage)
            path = (*spec.path.split("/"), name) if spec.path else (name,)
            vars(module)[name] = attachment.include(value, path, spec.policy)


def _has_new_module(value: Node, spec: ModuleSpec) -> bool:
    match find_kind(type(value)):
        case NodeKind.MODULE:
            other = find_spec(value)
            return other is None or not (other.attached or other.given is spec.given)
        case NodeKind.PYTREE | NodeKind.BUILTIN:
            return any(_has_new_module(item, spec) for _, item in list_items(value))
    return False


def reject_param(path: str, param: nnx.Param, policy: Policy) -> None:
    """Rejects a Param in another dtype that a policied module shares with the original, which no cast may change."""
    raise ValueError(
        f"The parameter {path!r} is stored in {param.get_value().dtype}, but the policy '{policy.name}' stores "
        f"parameters in {policy.param_dtype}. Cast a copy first: "
        "with_policy(jmp_policy.nnx.cast_params(model, policy), policy)."
    )
