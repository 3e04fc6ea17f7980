"""What a quantized policy does in nnx's layers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax

from .._float8_format import Float8
from .._formats import Quantization, integers_of
from .._memory import remember_weakly
from .._policy import Policy
from ..quant import QuantizedArray
from ..quant._bilinear import Einsum, einsum as labels_of
from ..quant._float8_layer import WHY_TABLES_WIDE
from ..quant._layer import Multiply, Promote, Round, as_format, weight_of
from ..quant._layout import Layout, format_of, kernel_layout, table_layout, why_left
from ._float8 import state_for, why_wide
from ._quantized_embed import PromoteTable

Attributes = dict[str, Any]
Shape = tuple[int, ...]


class QuantizedParam(nnx.Variable):
    """The Variable of a quantized weight: it holds a `QuantizedArray`, and is no `nnx.Param`, for nothing trains it.

    Optimizers and gradients of `nnx.Param` pass it by. Its arrays are part of `nnx.state` as any others.

    >>> from flax import nnx
    >>> model = jmp.quant.quantize(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "int8_from_float32")
    >>> type(model.kernel).__name__, model.kernel[...]
    ('QuantizedParam', QuantizedArray(int8, shape=(64, 64), dtype=float32))
    """

    def get_value(self, **options: Any) -> Any:
        """The quantized weight, of which `param[...]` is the whole and no other part can be had."""
        return super().get_value(**{} if options.get("index") is Ellipsis else options)


class Weight(NamedTuple):
    """The weight of a layer of Flax's.

    Attributes:
      value: what its Variable holds.
      layout: which of its axes are summed over.
    """

    value: Any
    layout: Layout


def weight_in(base: type, attributes: Attributes) -> Weight | None:
    """The weight of two or more axes of a layer of Flax's; `None` if there is none."""
    layer = _layer_of(base)
    variable = attributes.get(layer.weight) if layer else None
    value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
    shape = getattr(value, "shape", ())
    return Weight(value, layer.layout(attributes, shape)) if layer and len(shape) > 1 else None


def quantized_attributes(base: type, attributes: Attributes, quantization: Quantization | None) -> Attributes:
    """The attributes that a policy of integers gives a layer: how it promotes, and how it multiplies.

    None, where its weight is too small, or its author wrote the functions that it computes with.
    """
    layer, weight, format = _layer_of(base), weight_in(base, attributes), integers_of(quantization)
    if format is None or layer is None or weight is None or _has_written_function(layer, attributes):
        return {}
    if not isinstance(weight.value, QuantizedArray) and why_left(weight.value.shape, weight.layout, format):
        return {}
    promote = layer.promote(format, attributes["promote_dtype"], as_tuple=True, layout=weight.layout)
    return {"promote_dtype": promote} | ({layer.function: layer.multiply} if layer.function else {})


def reads_quantized_rows(base: type, attributes: Attributes, format: Quantization | None) -> bool:
    """Whether a layer is an embedding with a quantized table: its functions are no attributes."""
    return issubclass(base, nnx.Embed) and bool(quantized_attributes(base, attributes, format))


def quantization_of(base: type, attributes: Attributes, policy: Policy) -> str:
    """What becomes of the weight of a layer under a policy, as `Row.quantization` says it."""
    format, weight = policy.quantization, weight_in(base, attributes)
    if isinstance(format, Float8) and weight is not None:
        is_table = issubclass(base, nnx.Embed)
        left = WHY_TABLES_WIDE if is_table else why_wide(attributes, weight.value.shape, weight.layout, format)
        return str(format) if left is None else f"left: {left}"
    format = integers_of(format)
    if format is None or weight is None:
        return ""
    if isinstance(attributes.get("promote_dtype"), Promote):
        return str(format_of(format, weight.layout))
    left = why_left(weight.value.shape, weight.layout, format)
    return f"left: {left or 'its author wrote the functions that it computes with'}"


def float8_attributes(base: type, attributes: Attributes, quantization: Quantization | None) -> Attributes:
    """The attributes that a float8 policy gives a layer: its state, if it has some."""
    weight = weight_in(base, attributes)
    if not is_float8(base, attributes, quantization) or weight is None or not isinstance(quantization, Float8):
        return {}
    return state_for(attributes, weight.value.shape, weight.layout, quantization)


def is_float8(base: type, attributes: Attributes, quantization: Quantization | None) -> bool:
    """Whether a layer multiplies in 8-bit floating point."""
    weight = weight_in(base, attributes)
    if not isinstance(quantization, Float8) or weight is None or isinstance(weight.value, QuantizedArray):
        return False
    return why_wide(attributes, weight.value.shape, weight.layout, quantization) is None


def check_weight(path: str, base: type, attributes: Attributes, policy: Policy) -> None:
    """Checks that a layer can compute with its weight as its policy says.

    Raises:
      ValueError: the weight is quantized already and the policy has another format or none, or blocks do not divide it.
    """
    weight = weight_in(base, attributes)
    if weight is None:
        return
    where = f" {f'{path}/{weight_name(base)}'.lstrip('/')!r}"
    if isinstance(weight.value, QuantizedArray):
        format = integers_of(policy.quantization)
        if format is None:
            raise ValueError(
                f"The weight{where} is quantized, as {str(weight.value.format)!r}, and the policy {policy.name!r} "
                f"stores no integers. Give it one that does, such as '{weight.value.format}_from_{policy.name}', or "
                "give this policy to the original."
            )
        as_format(weight.value, format, where)
    elif quantized_attributes(base, attributes, policy.quantization):
        format = integers_of(policy.quantization)
        assert format is not None
        weight_of(weight.value, format, weight.layout, where)


def weight_name(base: type) -> str:
    """The attribute that holds the weight of a layer of Flax's."""
    layer = _layer_of(base)
    assert layer is not None
    return layer.weight


def _linear(attributes: Attributes, shape: Shape) -> Layout:
    return Layout(shape[-2:-1], 1)


def _linear_general(attributes: Attributes, shape: Shape) -> Layout:
    channels = len(attributes["out_features"])
    last = len(shape) - channels
    return Layout(shape[last - len(attributes["in_features"]) : last], channels)


def _convolution(attributes: Attributes, shape: Shape) -> Layout:
    return Layout(shape[len(shape) - len(attributes["kernel_shape"]) : -1], 1)


def _einsum(attributes: Attributes, shape: Shape) -> Layout:
    """All axes from the first that the equation sums over to the last; all but the channels, where that is open."""
    equation, own = attributes["einsum_str"], shape[len(shape) - len(attributes["kernel_shape"]) :]
    if equation is None or "..." in equation.partition("->")[0].split(",")[1]:
        return kernel_layout(own)
    left = equation.partition(",")[0].replace("...", "")
    labels = labels_of(len(left), len(own), Einsum(equation))
    summed = labels.summed(labels.right)
    return Layout(own[summed[0] : summed[-1] + 1], len(own) - 1 - summed[-1]) if summed else kernel_layout(own)


def _table(attributes: Attributes, shape: Shape) -> Layout:
    return table_layout(shape)


class _Layer(NamedTuple):
    """What there is to know of a kind of layer.

    Attributes:
      weight: the attribute that holds its weight.
      layout: `(attributes, shape of the weight) -> Layout`; axes before those of the layer are of a stack.
      promote: what takes the place of its `promote_dtype`.
      function: the attribute that holds the function it multiplies with; `None` without one.
      multiply: what takes that one's place.
    """

    weight: str
    layout: Callable[[Attributes, Shape], Layout]
    promote: type[Promote] = Promote
    function: str | None = None
    multiply: Multiply | None = None


_DOT = ("dot_general", Multiply(lax.dot_general, "dot_general"))
_CONVOLUTION = ("conv_general_dilated", Multiply(lax.conv_general_dilated, "conv_general_dilated"))
_LAYERS: dict[type, _Layer] = {
    nnx.Linear: _Layer("kernel", _linear, Promote, *_DOT),
    nnx.LinearGeneral: _Layer("kernel", _linear_general, Promote, *_DOT),
    nnx.Einsum: _Layer("kernel", _einsum, Promote, "einsum_op", Multiply(jnp.einsum, "einsum")),
    nnx.Conv: _Layer("kernel", _convolution, Promote, *_CONVOLUTION),
    nnx.ConvTranspose: _Layer("kernel", _convolution, Round),
    nnx.Embed: _Layer("embedding", _table, PromoteTable),
}


@remember_weakly
def _layer_of(base: type) -> _Layer | None:
    """What there is to know of a class of layers: of Flax's own, or of the one that it is a subclass of."""
    return next((_LAYERS[kind] for kind in base.__mro__ if kind in _LAYERS), None)


def _has_written_function(layer: _Layer, attributes: Attributes) -> bool:
    """Whether an author wrote one of the functions that a layer computes with."""
    if attributes.get("promote_dtype") is not _default_promote() or attributes.get("dot_general_cls") is not None:
        return True
    own = attributes[layer.function] if layer.function else None
    return own is not None and own is not getattr(layer.multiply, "own", None)


@functools.cache
def _default_promote() -> Callable[..., Any]:
    return inspect.signature(nnx.Linear.__init__).parameters["promote_dtype"].default
