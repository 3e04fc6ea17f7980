"""Post-training quantization of nnx models."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from .._policy import Policy
from .._policy_map import PolicyMap
from ..quant import quantize_array
from ..quant._clip import Clip
from ..quant._layout import why_left
from ._adopt import adopt
from ._attachment import Attachment
from ._mismatch import reject
from ._quantized import QuantizedParam, weight_in
from ._roles import role_of


def quantize(model: nnx.Module, given: Policy | PolicyMap, clip: Clip, input_clips: Mapping[str, Any]) -> nnx.Module:
    """A copy of an nnx model with the policy, whose weights are quantized; see `jmp_policy.quant.quantize`."""
    attached = Attachment(given, reject, adopt).attach(nnx.clone(model))
    found = 0
    for path, module in nnx.iter_modules(attached):
        role = role_of(module)
        format = None if role is None else role.policy.quantization
        weight = None if role is None else weight_in(role.base, vars(module))
        if role is None or format is None or weight is None or why_left(weight[0].shape, weight[1], format):
            continue
        here = "/".join(map(str, path))
        name = "embedding" if issubclass(role.base, nnx.Embed) else "kernel"
        array, layout = weight
        options = {"clip": clip, "input_clip": input_clips.get(here), "where": f" '{here}/{name}'"}
        new = quantize_array(array, format, layout, **options)
        vars(module)[name] = QuantizedParam(new)
        found += 1
    if not found:
        raise ValueError(f"Nothing to quantize under {given}.")
    return attached
