"""What a quantized policy does in nnx's layers."""

from typing import Any

from flax import nnx

from ..policy import Float8, Policy, Quantization, stored_format_of
from ..quant import QuantizedArray
from ..quant._layers import WHY_AS_NUMBERS, Promote, PromoteRounded, WeightedLayer, read_narrow, spell_format
from ..quant._weights import WHY_TABLES_WIDE, choose_format, match_format, prepare_weight, why_left
from ._float8 import make_state, why_wide
from ._layer_table import default_promote, find_layer, find_weight, weight_name
from ._module_spec import Product
from ._rounding import draw_nothing, draws_keys
from ._shadow import Attributes


class QuantizedParam(nnx.Variable):
    """The Variable of a quantized weight: it holds a `QuantizedArray`. Nothing trains it, so it is not an `nnx.Param`.

    Optimizers and gradients of `nnx.Param` pass it by. Its arrays are part of `nnx.state` as any others.

    >>> import jmp_policy as jmp
    >>> from flax import nnx
    >>> model = jmp.quant.quantize(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "int8_from_float32")
    >>> type(model.kernel).__name__, model.kernel[...]
    ('QuantizedParam', QuantizedArray(int8, shape=(64, 64), dtype=float32))
    """

    def get_value(self, **options: Any) -> Any:
        """The quantized weight, whole: `param[...]` is the only index it takes."""
        return super().get_value(**{} if options.get("index") is Ellipsis else options)


def make_quantized_attributes(base: type, attributes: Attributes, quantization: Quantization | None) -> Attributes:
    """The attributes that a policy that stores weights gives a layer: how it promotes, and how it multiplies.

    None, where its weight is too small, or its author wrote the functions that it computes with.
    """
    layer, weight, format = find_layer(base), find_weight(base, attributes), stored_format_of(quantization)
    if format is None or layer is None or weight is None or _has_written_function(layer, attributes):
        return {}
    if not isinstance(weight.value, QuantizedArray) and why_left(weight.value.shape, weight.layout, format):
        return {}
    promote = layer.promote(format, attributes["promote_dtype"], as_tuple=True, layout=weight.layout)
    multiply = {layer.field: layer.make_multiply(format, draw_nothing)} if layer.field else {}
    return {"promote_dtype": promote} | multiply


def choose_product(base: type, attributes: Attributes, quantization: Quantization | None) -> Product:
    """How a layer multiplies by its weight under a policy."""
    if is_float8(base, attributes, quantization):
        return Product.FLOAT8
    # The functions of an embedding are methods, and not attributes that a policy could replace.
    replaced = make_quantized_attributes(base, attributes, quantization)
    if replaced and issubclass(base, nnx.Embed):
        return Product.QUANTIZED_ROWS
    return Product.ROUNDED_AT_RANDOM if draws_keys(base, replaced, quantization) else Product.OWN


def describe_quantization(base: type, attributes: Attributes, policy: Policy) -> str:
    """What becomes of the weight of a layer under a policy, as `Row.quantization` says it."""
    format, weight = policy.quantization, find_weight(base, attributes)
    if isinstance(format, Float8) and weight is not None:
        is_table = issubclass(base, nnx.Embed)
        left = WHY_TABLES_WIDE if is_table else why_wide(base, attributes, weight.value.shape, weight.layout, format)
        return str(format) if left is None else f"left: {left}"
    format = stored_format_of(format)
    if format is None or weight is None:
        return ""
    promote = read_narrow(attributes.get("promote_dtype"))
    if isinstance(promote, Promote):
        why_as_numbers = WHY_AS_NUMBERS if isinstance(promote, PromoteRounded) else None
        return spell_format(choose_format(format, weight.layout), find_layer(base), why_as_numbers)
    left = why_left(weight.value.shape, weight.layout, format)
    return f"left: {left or 'its author wrote the functions that it computes with'}"


def make_float8_attributes(base: type, attributes: Attributes, quantization: Quantization | None) -> Attributes:
    """The attributes that a float8 policy gives a layer: its state, if it has some."""
    weight = find_weight(base, attributes)
    if not is_float8(base, attributes, quantization) or weight is None or not isinstance(quantization, Float8):
        return {}
    return make_state(attributes, weight.value.shape, weight.layout, quantization)


def is_float8(base: type, attributes: Attributes, quantization: Quantization | None) -> bool:
    """Whether a layer multiplies in 8-bit floating point."""
    weight = find_weight(base, attributes)
    if not isinstance(quantization, Float8) or weight is None or isinstance(weight.value, QuantizedArray):
        return False
    return why_wide(base, attributes, weight.value.shape, weight.layout, quantization) is None


def check_weight(path: str, base: type, attributes: Attributes, policy: Policy) -> None:
    """Checks that a layer can compute with its weight as its policy says.

    Raises:
      ValueError: the weight is quantized already and the policy has another format or none, or blocks do not divide it.
    """
    weight = find_weight(base, attributes)
    if weight is None:
        return
    where = f" {f'{path}/{weight_name(base)}'.lstrip('/')!r}"
    if isinstance(weight.value, QuantizedArray):
        format = stored_format_of(policy.quantization)
        if format is None:
            raise ValueError(
                f"The weight{where} is quantized, as {str(weight.value.format)!r}, and the policy {policy.name!r} "
                "stores no quantized weights. Give it one that does, such as "
                f"'{weight.value.format}_from_{policy.name}', or give this policy to the original."
            )
        match_format(weight.value, format, where)
    elif make_quantized_attributes(base, attributes, policy.quantization):
        format = stored_format_of(policy.quantization)
        assert format is not None
        prepare_weight(weight.value, format, weight.layout, where)


def _has_written_function(layer: WeightedLayer, attributes: Attributes) -> bool:
    """Whether an author wrote one of the functions that a layer computes with."""
    if attributes.get("promote_dtype") is not default_promote() or attributes.get("dot_general_cls") is not None:
        return True
    own = attributes[layer.field] if layer.field else None
    return own is not None and own is not layer.default
