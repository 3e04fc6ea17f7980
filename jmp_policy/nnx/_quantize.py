"""Post-training quantization of nnx models."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._messages import warn_user
from ..quant import QuantizedArray
from ..quant._layer import Promote
from ..quant._quantizer import Quantizer
from ._attachment import Attachment, reject_param
from ._layer_table import LayerWeight, weight_in, weight_name
from ._module_spec import ModuleSpec, find_spec
from ._quantized import QuantizedParam


def quantize(model: nnx.Module, quantizer: Quantizer) -> nnx.Module:
    """A copy of an nnx model with the policy, whose weights are quantized; see `jmp_policy.quant.quantize`."""
    spec = find_spec(model)
    attachment = Attachment(quantizer.given, reject_param, keep=spec.keep if spec else ())
    attached = attachment.attach(nnx.clone(model))
    done: dict[Any, tuple[Any, nnx.Variable]] = {}  # a weight of two layers stays one; the values keep their ids alive
    for path, module in nnx.iter_modules(attached):
        spec = find_spec(module)
        weight = None if spec is None else weight_in(spec.base, vars(module))
        if spec is None or weight is None:
            continue
        name, mask = weight_name(spec.base), vars(module).get("mask")
        variable = vars(module)[name]
        # Layers that differ in any of these make different integers of one weight.
        key = id(variable), id(mask), weight.layout, spec.policy.quantization
        if key not in done:
            new = _quantized(quantizer, "/".join(map(str, path)), module, spec, weight)
            done[key] = (variable, mask), variable if new is None else QuantizedParam(new)
        vars(module)[name] = done[key][1]
        if mask is not None and done[key][1] is not variable:
            module.mask = None  # type: ignore[attr-defined]  # the integers have it
    unused = attachment.explain_unused_rules()
    quantizer.check(unused)
    for message in unused:
        warn_user(message)
    return attached


def _quantized(
    quantizer: Quantizer, path: str, module: nnx.Module, spec: ModuleSpec, weight: LayerWeight
) -> QuantizedArray | None:
    """The weight of a layer, quantized; `None` if it stays as it is."""
    is_ours = isinstance(vars(module)["promote_dtype"], Promote)
    unfit = None if is_ours else "its author wrote the functions that it computes with"
    value, mask = weight.value, vars(module).get("mask")
    if mask is not None and not isinstance(value, QuantizedArray):
        value = _masked(value, mask)
    return quantizer.weight(path, weight_name(spec.base), value, weight.layout, spec.policy, unfit)


def _masked(kernel: Any, mask: Any) -> Any:
    """A kernel as its convolution uses it; abstract, if it is."""
    is_abstract = isinstance(kernel, jax.ShapeDtypeStruct)
    return jax.eval_shape(jnp.multiply, kernel, mask) if is_abstract else kernel * mask
