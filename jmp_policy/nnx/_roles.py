"""What a module inside a policied tree has to do, and the kinds of values that such a tree is made of."""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np
from flax import nnx

from .._dtypes import is_floating_dtype
from .._float8_format import Float8
from .._memory import remember_weakly
from .._policy import Policy
from .._policy_map import PolicyMap
from ._float8 import float8_layer
from ._quantized_embed import quantized_embed

ROLE = "__jmp_role__"
"""The attribute of a policied class that holds its role. The class holds it, not the instance, because classes are
part of a graph definition: copies, `nnx.split`, `nnx.merge` and the key of every jit cache carry them."""


@dataclasses.dataclass(frozen=True)
class Role:
    """What a policy makes of one module.

    Attributes:
      base: the class the module has without a policy.
      policy: the policy that holds for this module.
      given: what was attached to this module or to the one around it that has a policy of its own.
      lineage: with a map, the types by path of this module and those around it, for the rules that name types.
      attached: whether `with_policy` was applied to this very module.
      boundary: whether inputs and outputs are cast here.
      calls: whether its methods have anything to do; in a layer of Flax whose `dtype` says it all, they have not.
      keep: names of arguments that enter uncast.
      casts_params: whether its methods read its own Params in compute dtype, because it has no `dtype` to heed.
      open_dtype: whether the module has a `dtype` that its author left open.
      bridges: whether the policy was handed on to the linen module that this one wraps.
      authored: attributes that the policy replaced, as their author left them.
      reads_quantized_rows: whether its methods run in the subclass of an embedding that knows a quantized table.
      multiplies_in_float8: the attribute of the function that it multiplies with in 8-bit floating point, if it does.
    """

    base: type
    policy: Policy
    given: Policy | PolicyMap
    lineage: tuple[tuple[str, type], ...] = ()
    attached: bool = False
    boundary: bool = False
    calls: bool = True
    keep: tuple[str, ...] = ()
    casts_params: bool = False
    open_dtype: bool = False
    bridges: bool = False
    authored: tuple[tuple[str, Any], ...] = ()
    reads_quantized_rows: bool = False
    multiplies_in_float8: str | None = None

    @property
    def runs(self) -> type:
        """The class whose methods run; no field, because it has no name by which it could be pickled."""
        if self.multiplies_in_float8 is not None and isinstance(self.policy.quantization, Float8):
            return float8_layer(self.base, self.multiplies_in_float8, self.policy.quantization)
        return quantized_embed(self.base) if self.reads_quantized_rows else self.base

    @property
    def path(self) -> str:
        """Where the module stands in what the map was attached to."""
        return self.lineage[-1][0] if self.lineage else ""


def role_of(module: Any) -> Role | None:
    """The role of a module, `None` outside of policied trees."""
    return vars(type(module)).get(ROLE)  # not getattr: a subclass of a policied class has its own methods


class Kind(enum.Enum):
    """The kinds of values that the walks over module trees tell apart."""

    MODULE = enum.auto()
    PARAM = enum.auto()
    PYTREE = enum.auto()
    """Containers with attributes: `nnx.List`, `nnx.Dict`, and users' `nnx.Pytree` classes."""
    BUILTIN = enum.auto()
    """Lists, tuples and dictionaries."""
    STATE = enum.auto()
    """A mapping of Variables, as WeightNorm has."""
    OTHER = enum.auto()


@remember_weakly
def kind_of(kind: type) -> Kind:
    """The kind of the values of a type; a dictionary look-up, where `isinstance` of nnx runs Python code."""
    if issubclass(kind, nnx.Param):
        return Kind.PARAM
    if issubclass(kind, nnx.Rngs | nnx.RngStream):
        return Kind.OTHER
    if issubclass(kind, nnx.Module) and not issubclass(kind, nnx.List | nnx.Dict):
        return Kind.MODULE
    if issubclass(kind, nnx.Pytree):
        return Kind.PYTREE
    if issubclass(kind, nnx.State):
        return Kind.STATE
    return Kind.BUILTIN if kind in (list, tuple, dict) else Kind.OTHER


def floating_dtypes(param: nnx.Param) -> set[np.dtype]:
    """The floating dtypes that a Param is stored in: of an array, an array reference, or a tree of them."""
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(param.get_raw_value())]
    return {np.dtype(dtype) for dtype in dtypes if dtype is not None and is_floating_dtype(dtype)}


def items_of(container: Any) -> list[tuple[str, Any]]:
    """The names and values in a container of any kind; modules are containers too."""
    match kind_of(type(container)):
        case Kind.MODULE | Kind.PYTREE:
            return list(vars(container).items())
        case Kind.STATE:
            return list(container.items())
        case Kind.BUILTIN:
            pairs = container.items() if isinstance(container, dict) else enumerate(container)
            return [(str(name), item) for name, item in pairs]
    return []


def with_items(container: Any, items: list[Any]) -> Any:
    """A copy of a container with other values, in the order of `items_of`."""
    if isinstance(container, dict):
        return dict(zip(container, items, strict=True))
    if isinstance(container, list | tuple):
        return type(container)(items)
    return blank(type(container), dict(zip(vars(container), items, strict=True)))


def blank(kind: type, attributes: dict[str, Any]) -> Any:
    """An object with these attributes, made without its constructor."""
    new = object.__new__(kind)
    vars(new).update(attributes)
    return new
