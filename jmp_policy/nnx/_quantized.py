"""Quantized weights of nnx layers: their Variable, and how a policy treats them."""

from typing import Any

from flax import nnx

from ..policy import Float8, Policy, Quantization, stored_format_of
from ..quant import QuantizedArray
from ..quant._layers import WHY_AS_NUMBERS, spell_format
from ..quant._weights import choose_format, match_format, prepare_weight, reason_unquantized
from ._float8 import make_state
from ._layer_table import find_layer, find_weight
from ._products import choose_weight_format, why_not_float8
from ._shadow import Attributes

WRITTEN = "its author wrote the functions that it computes with"


class QuantizedParam(nnx.Variable):
    """The Variable of a quantized weight. It holds a `QuantizedArray`.

    It is not an `nnx.Param`, so optimizers and gradients skip it. Its arrays are part of `nnx.state`.

    >>> import jmp_policy as jmp
    >>> from flax import nnx
    >>> model = jmp.quant.quantize(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "int8_from_float32")
    >>> type(model.kernel).__name__, model.kernel[...]
    ('QuantizedParam', QuantizedArray(int8, shape=(64, 64), dtype=float32))
    """

    def get_value(self, **options: Any) -> Any:
        """Returns the whole quantized weight: `param[...]` is the only index that it takes."""
        return super().get_value(**{} if options.get("index") is Ellipsis else options)


def has_stored_format(promote: Any) -> bool:
    """True if a policy quantizes the weight of the layer with this `promote_dtype`."""
    return getattr(getattr(promote, "product", None), "stored_format", None) is not None


def describe_quantization(base: type, attributes: Attributes, policy: Policy) -> str:
    """Describes the weight of a layer for `Row.quantization`."""
    format, weight = policy.quantization, find_weight(base, attributes)
    if isinstance(format, Float8) and weight is not None:
        left = why_not_float8(base, attributes, weight.value.shape, weight.layout, format)
        return str(format) if left is None else f"left: {left}"
    format, layer = stored_format_of(format), find_layer(base)
    if format is None or weight is None or layer is None:
        return ""
    if has_stored_format(attributes.get("promote_dtype")):
        is_replaced = layer.field is not None or issubclass(base, nnx.Embed)
        return spell_format(choose_format(format, weight.layout), layer, None if is_replaced else WHY_AS_NUMBERS)
    return f"left: {reason_unquantized(weight.value.shape, weight.layout, format) or WRITTEN}"


def make_float8_attributes(base: type, attributes: Attributes, quantization: Quantization | None) -> Attributes:
    """Returns the attribute with the float8 state of a layer, or nothing."""
    weight, format = find_weight(base, attributes), choose_weight_format(base, attributes, quantization)
    if weight is None or not isinstance(format, Float8):
        return {}
    return make_state(attributes, weight.value.shape, weight.layout, format)


def check_weight(path: str, base: type, attributes: Attributes, policy: Policy) -> None:
    """Raises a `ValueError` if a weight has another format than the policy, or no whole number of blocks."""
    weight, format = find_weight(base, attributes), stored_format_of(policy.quantization)
    if weight is None:
        return
    where = f" {f'{path}/{weight.name}'.lstrip('/')!r}"
    if isinstance(weight.value, QuantizedArray):
        if format is None:
            raise ValueError(
                f"The weight{where} is quantized, as {str(weight.value.format)!r}, but the policy {policy.name!r} "
                "stores no quantized weights. Give the model a policy that does, such as "
                f"'{weight.value.format}_from_{policy.name}', or give this policy to the original."
            )
        match_format(weight.value, format, where)
    elif format is not None and choose_weight_format(base, attributes, policy.quantization) is not None:
        prepare_weight(weight.value, format, weight.layout, where)
