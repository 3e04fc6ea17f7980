"""The effects of a policy on a module: the spec, stored in its class, and the attributes that its author left open."""

import dataclasses
import enum
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from .._base import at_least_float32, remember_weakly
from ..modules import find_adapter, policy_of
from ..policy import Policy, PolicyMap
from ..quant import LayerFacts, LayerPlan, plan_layer
from ._cache import make_cached_attention
from ._layer_table import WRITTEN, read_layer
from ._products import make_wide_layer
from ._shadow import Attributes, NodeKind, find_kind

SPEC = "__jmp_spec__"
"""The attribute of a policied class that holds its spec.

The class holds it, not the instance, because classes are part of a graph definition: copies, `nnx.split`, `nnx.merge`
and the key of every jit cache carry them.
"""


class CallEffect(enum.Enum):
    """The effect of a policy on a call of a method from outside."""

    NOTHING = enum.auto()  # runs the method unchanged: the attributes of a Flax layer are enough
    COMPUTES = enum.auto()  # computes as the policy says, without casts of arguments and results
    CASTS = enum.auto()  # casts arguments and results too, because a rule of a map names the module
    CASTS_AT_ROOT = enum.auto()  # the same, because `with_policy` was applied to this very module


class DtypeSource(enum.Enum):
    """The place where the code of a module reads its compute dtype."""

    AUTHOR = enum.auto()  # a `dtype` that the author wrote, or a linen module that has a policy of its own
    FIELD = enum.auto()  # a `dtype` that the author left open: the policy writes its compute dtype there
    PARAMS = enum.auto()  # the Params: without a `dtype`, methods read them in the compute dtype
    LINEN_MODULE = enum.auto()  # the wrapped linen module, which has the policy


@dataclasses.dataclass(frozen=True)
class ModuleSpec:
    """The effects of a policy on one module."""

    base: type  # the class of the module without a policy
    policy: Policy  # the policy of this module
    # The policy or map that was attached to it, or to the module around it that has a policy of its own.
    given: Policy | PolicyMap
    # For a map, the types by path of this module and those around it, for the rules that name types.
    lineage: tuple[tuple[str, type], ...] = ()
    effect: CallEffect = CallEffect.COMPUTES  # the effect on a call of its methods
    no_cast: tuple[str, ...] = ()  # names of arguments that are not cast
    dtype_source: DtypeSource = DtypeSource.AUTHOR  # where its code reads the compute dtype
    # Makes the subclass that multiplies by its weight; `None` if the attributes are enough.
    layer_class: Callable[[Any], type] | None = None
    accumulate_dtype: np.dtype | None = None  # the output dtype of its matmul before it is cast down, or `None`
    cache: np.dtype | None = None  # the format of its decode cache, or `None` for the dtype of the layer
    authored: tuple[tuple[str, Any], ...] = ()  # attributes that the policy replaced, with their original values

    @property
    def runs(self) -> type:
        """The class whose methods run. Not a field, because pickle could not find it by name."""
        runs = self.base if self.layer_class is None else self.layer_class(self.base)
        runs = runs if self.accumulate_dtype is None else make_wide_layer(runs, self.accumulate_dtype)
        return runs if self.cache is None else make_cached_attention(runs, self.cache)

    @property
    def attached(self) -> bool:
        """True if `with_policy` was applied to this very module."""
        return self.effect is CallEffect.CASTS_AT_ROOT

    @property
    def casts(self) -> bool:
        """True if arguments and results are cast here."""
        return self.effect is CallEffect.CASTS or self.effect is CallEffect.CASTS_AT_ROOT

    @property
    def path(self) -> str:
        """The path of the module in the model that the map was attached to."""
        return self.lineage[-1][0] if self.lineage else ""


def find_spec(module: Any) -> ModuleSpec | None:
    """Returns the spec of a module, or `None` outside of policied trees."""
    return vars(type(module)).get(SPEC)  # not getattr: a subclass of a policied class has its own methods


WRAPPERS = (nnx.WeightNorm, nnx.SpectralNorm)
"""Layers that rewrite a weight. Their `dtype` is the dtype that it is stored in."""

_WRAPPED = "to_nnx__module"


def has_written_dtype(base: type, attributes: Attributes, is_open: bool) -> bool:
    return "dtype" in attributes and not is_open and not issubclass(base, WRAPPERS)


def is_plain_layer(base: type, attributes: Attributes) -> bool:
    """True for a Flax layer that uses its `dtype` and has no modules inside."""
    kinds = {find_kind(type(value)) for value in attributes.values()}
    own_params = NodeKind.PARAM in kinds and "dtype" not in attributes
    has_inside = NodeKind.MODULE in kinds or NodeKind.PYTREE in kinds
    return base.__module__.startswith("flax.nnx.nn.") and not own_params and not has_inside


def find_dtype_source(
    base: type, attributes: Attributes, handed_on: DTypeLike | None, known: ModuleSpec | None
) -> DtypeSource:
    """Returns the place where a module reads its compute dtype, under the policy that it gets after a `known` one."""
    if has_linen_module(base):  # `policy_of` cannot tell a policy that we handed on from one of its own
        handed_policy_on = known is not None and known.dtype_source is DtypeSource.LINEN_MODULE
        is_free = handed_policy_on or policy_of(attributes[_WRAPPED]) is None
        return DtypeSource.LINEN_MODULE if is_free else DtypeSource.AUTHOR
    if "dtype" not in attributes:
        return DtypeSource.PARAMS
    return DtypeSource.FIELD if _is_dtype_open(base, attributes, handed_on) else DtypeSource.AUTHOR


def _is_dtype_open(base: type, attributes: Attributes, handed_on: DTypeLike | None) -> bool:
    """True if the author of a layer left its `dtype` at the default, or the open layer around it handed it on."""
    dtype = attributes["dtype"]
    if issubclass(base, WRAPPERS):
        return False
    if dtype is None:
        return True
    defaults = [_find_default_dtype(base), handed_on]
    if issubclass(base, nnx.Embed):  # which replaces None by the dtype of its table, which may have been cast since
        defaults += [attributes["embedding"].get_raw_value().dtype, attributes["param_dtype"]]
    return any(_is_same_dtype(dtype, default) for default in defaults)


def make_dtype_attributes(base: type, attributes: Attributes, policy: Policy, is_open: bool) -> Attributes:
    """Returns the dtype attributes that the author of a layer would write for a policy."""
    if issubclass(base, WRAPPERS):
        dtype = policy.param_dtype
        # An open dtype would upcast a half-precision weight to float32.
        if dtype is None or attributes.get("dtype", dtype) is not None or dtype == at_least_float32(dtype):
            return {}
        return {"dtype": dtype}
    new = {}
    if is_open and policy.compute_dtype is not None:
        new["dtype"] = policy.compute_dtype
    if "param_dtype" in attributes and policy.param_dtype is not None:
        new["param_dtype"] = policy.param_dtype
    return new


@remember_weakly
def _find_default_dtype(base: type) -> Any:
    for kind in base.__mro__:  # a constructor that takes **kwargs hands them to the next
        parameters = inspect.signature(kind.__init__).parameters if "__init__" in vars(kind) else {}
        if "dtype" in parameters:
            default = parameters["dtype"].default
            return None if default is inspect.Parameter.empty else default
    return None


def _is_same_dtype(dtype: DTypeLike, default: DTypeLike | None) -> bool:
    if default is None:
        return False
    try:
        return jnp.dtype(dtype) == jnp.dtype(default)
    except TypeError:  # the author's own attribute happens to be called `dtype`
        return False


def has_linen_module(base: type) -> bool:
    """True for a module that wraps a linen one, which reads its variables itself."""
    return issubclass(base, nnx.bridge.ToNNX)


def make_linen_attributes(attributes: Attributes, spec: ModuleSpec, inferred: np.dtype | None = None) -> Attributes:
    """Returns the attribute with the wrapped linen module under the policy of the model, which does the casts."""
    module = attributes[_WRAPPED]
    linen: Any = find_adapter(module)  # only the linen adapter has `attach_for_nnx`
    return {_WRAPPED: linen.attach_for_nnx(module, spec.given, spec.no_cast, spec.lineage, spec.casts, inferred)}


def plan_again(module: nnx.Module, spec: ModuleSpec, policy: Policy | None = None) -> tuple[LayerFacts, LayerPlan]:
    """Returns the facts about a layer with a policy, and its plan. `policy` is that of its path, by default its own."""
    facts = read_layer(spec.base, vars(module) | dict(spec.authored))
    policy = spec.policy if policy is None else policy
    if policy.quantization != spec.policy.quantization:  # a wrapper rewrites the weight
        facts = dataclasses.replace(facts, why_floating=WRITTEN)
    return facts, plan_layer(facts, policy, policy.compute_dtype)
