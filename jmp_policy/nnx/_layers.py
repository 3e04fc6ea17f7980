"""What the author of a module left open, and what a policy writes there: dtypes, functions, linen modules."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from .._base import at_least_float32, remember_weakly
from ..modules import find_adapter, policy_of
from ..policy import Policy
from ._module_spec import DtypeSource, ModuleSpec
from ._products import make_product_attributes
from ._shadow import Attributes, NodeKind, find_kind

WRAPPERS = (nnx.WeightNorm, nnx.SpectralNorm)
"""Layers that rewrite a weight. Their `dtype` is the one it is stored in, and not the one they compute in."""

_WRAPPED = "to_nnx__module"


def is_dtype_open(base: type, attributes: Attributes, handed_on: DTypeLike | None) -> bool:
    """Whether a layer has a `dtype` that its author left open: at the default of its constructor.

    Args:
      base: the class of the layer.
      attributes: its attributes.
      handed_on: the open dtype of the layer around it, which that one may have passed to its parts, as
        `nnx.SimpleCell` does with its default of float32.
    """
    if "dtype" not in attributes or issubclass(base, WRAPPERS):
        return False
    dtype = attributes["dtype"]
    if dtype is None:
        return True
    defaults = [_find_default_dtype(base), handed_on]
    if issubclass(base, nnx.Embed):  # which replaces None by the dtype of its table
        defaults.append(attributes["embedding"].get_raw_value().dtype)
    return any(_is_same_dtype(dtype, default) for default in defaults)


def has_written_dtype(base: type, attributes: Attributes, is_open: bool) -> bool:
    """Whether a layer has a `dtype` that its author wrote."""
    return "dtype" in attributes and not is_open and not issubclass(base, WRAPPERS)


def is_plain_layer(base: type, attributes: Attributes) -> bool:
    """Whether a module is a layer of Flax's that heeds its `dtype` and has no modules inside."""
    kinds = {find_kind(type(value)) for value in attributes.values()}
    own_params = NodeKind.PARAM in kinds and "dtype" not in attributes
    has_inside = NodeKind.MODULE in kinds or NodeKind.PYTREE in kinds
    return base.__module__.startswith("flax.nnx.nn.") and not own_params and not has_inside


def find_dtype_source(base: type, attributes: Attributes, is_open: bool, hands_on: bool) -> DtypeSource:
    """Where the code of a module finds the dtype that it computes in.

    Args:
      base: the class of the module.
      attributes: its attributes.
      is_open: whether it has a `dtype` that its author left open.
      hands_on: whether the linen module that it wraps gets the policy.
    """
    if hands_on:
        return DtypeSource.LINEN_MODULE
    if is_open:
        return DtypeSource.FIELD
    return DtypeSource.AUTHOR if "dtype" in attributes or is_bridge(base) else DtypeSource.PARAMS


def make_attributes(base: type, attributes: Attributes, policy: Policy, is_open: bool) -> Attributes:
    """The attributes that a policy gives a layer, by name: those its author would write for these dtypes."""
    if issubclass(base, WRAPPERS):
        return _make_wrapper_attributes(attributes, policy.param_dtype)
    new = {}
    if is_open and policy.compute_dtype is not None:
        new["dtype"] = policy.compute_dtype
    if "param_dtype" in attributes and policy.param_dtype is not None:
        new["param_dtype"] = policy.param_dtype
    return new | make_product_attributes(base, attributes, policy)


def _make_wrapper_attributes(attributes: Attributes, param_dtype: np.dtype | None) -> Attributes:
    """The `dtype` of a wrapper: an open one would promote a half weight and its float32 state to float32."""
    if param_dtype is None or attributes["dtype"] is not None or param_dtype == at_least_float32(param_dtype):
        return {}
    return {"dtype": param_dtype}


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
    except TypeError:  # another thing that goes by the name of `dtype`
        return False


def is_bridge(base: type) -> bool:
    """Whether a module wraps a linen one, whose variables are its Params, and who reads them itself."""
    return issubclass(base, nnx.bridge.ToNNX)


def has_open_linen_module(base: type, attributes: Attributes, spec: ModuleSpec | None) -> bool:
    """Whether a module wraps a linen one that has no policy but the one a module around it handed on."""
    if not is_bridge(base):
        return False
    was_handed_on = spec is not None and spec.dtype_source is DtypeSource.LINEN_MODULE
    return was_handed_on or policy_of(attributes[_WRAPPED]) is None


def make_linen_attributes(attributes: Attributes, spec: ModuleSpec, inferred: np.dtype | None = None) -> Attributes:
    """The attribute that holds the linen module, which gets what the model was given, and does all the casting.

    Args:
      attributes: the attributes of the module that wraps it.
      spec: the spec of the wrapping module.
      inferred: the compute dtype, where the policy leaves it open and a call told.
    """
    module = attributes[_WRAPPED]
    linen: Any = find_adapter(module)  # which alone has the method
    return {_WRAPPED: linen.attach_for_nnx(module, spec.given, spec.keep, spec.lineage, spec.casts, inferred)}
