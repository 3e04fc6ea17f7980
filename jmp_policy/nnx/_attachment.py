"""Giving a policy to every module of a tree."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from .._formats import integers_of
from .._overwrite import OVERWRITE
from .._policy import Policy
from .._policy_map import Match, PolicyMap
from ..explanation._written import explain_written, wider_dtype
from ..quant._weight import WEIGHT_NAMES
from ._bridge import has_open_linen_module, is_bridge, linen_attributes
from ._call import Adopt
from ._classes import policied_class
from ._layer_table import open_field
from ._layers import WRAPPERS, dtype_attributes, has_written_dtype, is_dtype_open
from ._quantized import check_weight, float8_attributes, is_float8, reads_quantized_rows
from ._roles import Kind, Role, blank, floating_dtypes, items_of, kind_of, role_of, with_items

AUTOCAST_EXAMPLE = "autocast(lambda model, x: model(x), 'mixed_bfloat16')"

Mismatch = Callable[[str, nnx.Param, Policy], None]
"""What happens to a Param, at a path, that is not stored in the param dtype of its policy."""


class _Around(NamedTuple):
    """What holds around a value in the tree.

    Attributes:
      policy: that of the module around it.
      handed_on: an open dtype that this module may have handed on.
      rewritten: whether a module around it rewrites the weights of what is inside, which therefore stay floats.
    """

    policy: Policy
    handed_on: Any = None
    rewritten: bool = False


class Attachment:
    """One walk over a module tree that gives each module its role.

    Modules are copied, and share their Variables with the originals; or changed in place, where they are `owned`.

    Args:
      given: the policy or map.
      on_mismatch: what to do about a Param of another dtype.
      adopt: what policied modules call to notice modules assigned to them later.
      keep: names of arguments that enter the root uncast.
      owned: whether a module may be changed in place.
      lineage: the types by path of the modules around the root of the walk, where it starts inside a tree.

    Attributes:
      types: the types of the modules met, by path.
    """

    def __init__(
        self,
        given: Policy | PolicyMap,
        on_mismatch: Mismatch,
        adopt: Adopt,
        *,
        keep: tuple[str, ...] = (),
        owned: Callable[[nnx.Module], bool] = lambda module: False,
        lineage: tuple[tuple[str, type], ...] = (),
    ):
        self.given = given
        self.keep = keep
        self.types = dict(lineage)
        self._on_mismatch = on_mismatch
        self._adopt = adopt
        self._owned = owned
        self._layers: dict[str, np.dtype | None] = {}
        self._done: dict[int, tuple[Any, Any]] = {}  # what became of what, by id; the keys are kept alive

    def attach(self, module: nnx.Module) -> nnx.Module:
        """Gives the policy to a module, as the root of a tree, and to the modules inside."""
        return self._module(module, (), None, attached=True)

    def unused_rules(self) -> list[str]:
        """What to say of the rules that decide for no module that was met."""
        # Which modules a linen one has inside shows when it is called, and a rule may be for one of them.
        if isinstance(self.given, Policy) or any(map(is_bridge, self.types.values())):
            return []
        return self.given.explain_unused(self.types)

    def written_explained(self) -> list[str]:
        """What to say of dtypes that an author wrote on layers, if they keep most of those out of their policy's."""
        return explain_written(self._layers, AUTOCAST_EXAMPLE)

    def include(self, value: Any, path: tuple[str, ...], policy: Policy) -> Any:
        """Gives the policy to the modules in a value that stands at a path inside a tree."""
        rewritten = policy is not self._match("/".join(path[:-1])).policy  # it was taken its quantization
        return self._value(value, path, _Around(policy, rewritten=rewritten))

    def _value(self, value: Any, path: tuple[str, ...], around: _Around | None) -> Any:
        match kind_of(type(value)):
            case Kind.MODULE:
                return self._module(value, path, around)
            case Kind.PARAM:
                self._param(value, path, around)
            case Kind.STATE:
                for name, item in items_of(value):
                    self._value(item, (*path, name), around)
            case Kind.PYTREE | Kind.BUILTIN:
                return self._container(value, path, around)
        return value

    def _container(self, container: Any, path: tuple[str, ...], around: _Around | None) -> Any:
        if id(container) in self._done:
            return self._done[id(container)][1]
        if isinstance(container, nnx.Module):  # nnx.List and nnx.Dict have paths, and rules may name them
            self.types.setdefault("/".join(path), type(container))
            around = around and around._replace(policy=self._match("/".join(path)).policy)
        self._done[id(container)] = container, container
        items = items_of(container)
        new = [self._value(item, (*path, name), around) for name, item in items]
        if any(a is not b for a, (_, b) in zip(new, items, strict=True)):
            self._done[id(container)] = container, with_items(container, new)
        return self._done[id(container)][1]

    def _module(self, module: nnx.Module, path: tuple[str, ...], around: _Around | None, attached: bool = False) -> Any:
        if id(module) in self._done:
            return self._done[id(module)][1]
        role = role_of(module)
        base = type(module) if role is None else role.base
        self.types.setdefault("/".join(path), base)
        if not attached and (around is None or (role is not None and role.attached)):
            return self._rebuilt(module, type(module), path, None, vars(module), {})
        attributes = vars(module) | dict(role.authored if role else ())
        state = attributes.pop(OVERWRITE, None)
        open_dtype = is_dtype_open(base, attributes, around.handed_on if around else None)
        rewritten = issubclass(base, WRAPPERS) or (around is not None and around.rewritten)
        new_role = self._role(base, attributes, path, attached, open_dtype, rewritten)
        policy = new_role.policy
        check_weight("/".join(path), base, attributes, policy)
        if "dtype" in attributes and any(name in attributes for name in WEIGHT_NAMES):
            written = attributes["dtype"] if has_written_dtype(base, attributes, open_dtype) else None
            self._layers["/".join(path)] = wider_dtype(written, policy)
        new_attributes = dtype_attributes(base, attributes, policy, open_dtype)
        known = attributes if state is None else attributes | {OVERWRITE: state}
        new_attributes |= float8_attributes(base, known, policy.quantization)
        if has_open_linen_module(base, attributes, role):
            new_role = dataclasses.replace(new_role, bridges=True)
            new_attributes |= linen_attributes(attributes, new_role)
        inside = _Around(policy, attributes["dtype"] if open_dtype else None, rewritten)
        return self._rebuilt(module, policied_class(new_role, self._adopt), path, inside, attributes, new_attributes)

    def _role(
        self,
        base: type,
        attributes: dict[str, Any],
        path: tuple[str, ...],
        attached: bool,
        open_dtype: bool,
        rewritten: bool,
    ) -> Role:
        match = self._match("/".join(path))
        rewritten_integers = rewritten and integers_of(match.policy.quantization) is not None
        policy = match.policy.replace(quantization=None) if rewritten_integers else match.policy
        # A dtype that the author wrote wins over a rule: casting to another one first would lose what they wanted.
        boundary = attached or (match.boundary and not has_written_dtype(base, attributes, open_dtype))
        replaced = dtype_attributes(base, attributes, policy, open_dtype)
        in_float8 = is_float8(base, attributes, policy.quantization)
        acts = boundary or policy.compute_dtype is None or in_float8
        does_nothing = not acts and _is_plain_layer(base, attributes)
        return Role(
            base=base,
            policy=policy,
            given=self.given,
            lineage=self._lineage(path),
            attached=attached,
            boundary=boundary,
            calls=not issubclass(base, nnx.List | nnx.Dict) and not does_nothing,
            keep=self.keep if attached else (),
            casts_params="dtype" not in attributes and not is_bridge(base),
            open_dtype=open_dtype,
            authored=tuple((name, attributes[name]) for name in replaced),
            reads_quantized_rows=reads_quantized_rows(base, attributes, policy.quantization),
            multiplies_in_float8=open_field(base, attributes) if in_float8 else None,
        )

    def _rebuilt(
        self,
        module: nnx.Module,
        kind: type,
        path: tuple[str, ...],
        inside: _Around | None,
        attributes: dict[str, Any],
        new_attributes: dict[str, Any],
    ) -> Any:
        new = module if self._owned(module) else blank(type(module), {})
        self._done[id(module)] = module, new
        values = {name: self._value(value, (*path, name), inside) for name, value in attributes.items()}
        written = values | new_attributes
        state = written.pop(OVERWRITE, None)
        vars(new).update(written)
        object.__setattr__(new, "__class__", kind)
        if state is not None:
            setattr(new, OVERWRITE, nnx.data(state))  # past vars: nnx keeps account of the attributes there are
        elif OVERWRITE in vars(module):
            vars(new)[OVERWRITE] = None  # to be deleted, and so taken off that account
            delattr(new, OVERWRITE)
        return new

    def _param(self, param: nnx.Param, path: tuple[str, ...], around: _Around | None) -> None:
        if around is None or around.policy.param_dtype is None:
            return
        here, dtype = "/".join(path), around.policy.param_dtype
        if id(param) not in self._done:
            self._done[id(param)] = param, (here, dtype)
            if not floating_dtypes(param) <= {dtype}:
                self._on_mismatch(here, param, around.policy)
        first, stored = self._done[id(param)][1]
        if stored != dtype:
            raise ValueError(
                f"The parameter {here!r} is {first!r} as well, but one policy stores it in {dtype} and the other in "
                f"{stored}. Give both places one param dtype. For example: 'params={stored},compute={dtype}'."
            )

    def _match(self, path: str) -> Match:
        if isinstance(self.given, PolicyMap):
            return self.given.match(path, self.types)
        return Match(self.given, None, boundary=False)

    def _lineage(self, path: tuple[str, ...]) -> tuple[tuple[str, type], ...]:
        if not isinstance(self.given, PolicyMap):
            return ()
        paths = ["/".join(path[:n]) for n in range(len(path) + 1)]
        return tuple((outer, self.types[outer]) for outer in paths if outer in self.types)


def _is_plain_layer(base: type, attributes: dict[str, Any]) -> bool:
    """Whether a module is a layer of Flax's that heeds its `dtype` and has no modules inside."""
    kinds = {kind_of(type(value)) for value in attributes.values()}
    own_params = Kind.PARAM in kinds and "dtype" not in attributes
    return base.__module__.startswith("flax.nnx.nn.") and not own_params and not kinds & {Kind.MODULE, Kind.PYTREE}
