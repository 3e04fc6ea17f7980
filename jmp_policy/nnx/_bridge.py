"""Linen modules inside nnx ones: what `nnx.bridge.ToNNX` wraps gets the policy from the linen adapter."""

from typing import Any

import numpy as np
from flax import nnx

from .._boundary import adapter_of, policy_of
from ._module_spec import ModuleSpec

_WRAPPED = "to_nnx__module"


def is_bridge(base: type) -> bool:
    """Whether a module's Params are the variables of a linen module, which reads them itself."""
    return issubclass(base, nnx.bridge.ToNNX)


def has_open_linen_module(base: type, attributes: dict[str, Any], spec: ModuleSpec | None) -> bool:
    """Whether a module wraps a linen one without a policy of its own; one that came from outside does not count."""
    if not is_bridge(base):
        return False
    return policy_of(attributes[_WRAPPED]) is None or (spec is not None and spec.bridges)


def linen_attributes(attributes: dict[str, Any], spec: ModuleSpec, inferred: np.dtype | None = None) -> dict[str, Any]:
    """The attribute that holds the linen module, with what the model was given; the linen module casts, if any does.

    Args:
      attributes: the attributes of the module that wraps it.
      spec: the spec of that one.
      inferred: what stands for a compute dtype that the policy leaves open.
    """
    module = attributes[_WRAPPED]
    attach_inside = adapter_of(module).attach_inside
    return {_WRAPPED: attach_inside(module, spec.given, spec.keep, spec.lineage, spec.boundary, inferred)}
