"""Post-training quantization of nnx models."""

import warnings
from typing import Any

from flax import nnx

from ..quant._layer import Promote
from ..quant._quantizer import Quantizer
from ._adopt import adopt
from ._attachment import Attachment
from ._mismatch import reject
from ._quantized import QuantizedParam, weight_in
from ._roles import Role, role_of


def quantize(model: nnx.Module, quantizer: Quantizer) -> nnx.Module:
    """A copy of an nnx model with the policy, whose weights are quantized; see `jmp_policy.quant.quantize`."""
    attachment = Attachment(quantizer.given, reject, adopt)
    attached = attachment.attach(nnx.clone(model))
    done: dict[int, tuple[nnx.Variable, nnx.Variable]] = {}  # by id: a weight of two layers stays one; keys kept alive
    for path, module in nnx.iter_modules(attached):
        role = role_of(module)
        found = None if role is None else weight_in(role.base, vars(module))
        if role is None or found is None:
            continue
        name = "embedding" if issubclass(role.base, nnx.Embed) else "kernel"
        variable = vars(module)[name]
        if id(variable) not in done:
            new = _quantized(quantizer, "/".join(map(str, path)), name, module, role, found)
            done[id(variable)] = variable, variable if new is None else QuantizedParam(new)
        vars(module)[name] = done[id(variable)][1]
    unused = attachment.unused_rules()
    quantizer.check(unused)
    for message in unused:
        warnings.warn(message, stacklevel=3)
    return attached


def _quantized(quantizer: Quantizer, path: str, name: str, module: nnx.Module, role: Role, found: tuple) -> Any:
    array, layout = found
    is_ours = isinstance(vars(module).get("promote_dtype"), Promote)
    unfit = None if is_ours else "its author wrote the functions that it computes with"
    return quantizer.weight(path, name, array, layout, role.policy, unfit)
