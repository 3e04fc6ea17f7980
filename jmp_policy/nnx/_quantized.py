"""What a quantized policy does in nnx's layers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .._formats import Quantization
from ..quant import QuantizedArray, dot_general, take
from ..quant._bilinear import Einsum, einsum as labels_of
from ..quant._layer import Multiply, Promote, Round, weight_of
from ..quant._layout import Layout, kernel_layout, table_layout, why_left
from ..quant._weight import Unquantized, fake_quantized


class QuantizedParam(nnx.Variable):
    """The Variable of a quantized weight: it holds a `QuantizedArray`, and is no `nnx.Param`, for nothing trains it."""

    def get_value(self, **options: Any) -> Any:
        """The quantized weight, of which `param[...]` is the whole and no other part can be had."""
        return super().get_value(**{} if options.get("index") is Ellipsis else options)


def quantized_attributes(base: type, attributes: dict[str, Any], format: Quantization | None) -> dict[str, Any]:
    """The attributes that a quantized policy gives a layer: how it promotes, and how it multiplies.

    None, where its weight is too small, or its author wrote the functions that it multiplies with.
    """
    found = None if format is None else weight_in(base, attributes)
    if found is None or format is None or attributes.get("promote_dtype") is not _default_promote():
        return {}
    value, layout = found
    if not isinstance(value, QuantizedArray) and why_left(value.shape, layout, format):
        return {}
    name, operation = _multiplies_with(base)
    if issubclass(base, nnx.Embed):
        return {"promote_dtype": Promote(format, attributes["promote_dtype"], as_tuple=True, layout=layout)}
    if name is None or attributes.get("mask") is not None:
        return {"promote_dtype": Round(format, attributes["promote_dtype"], as_tuple=True, layout=layout)}
    own = attributes[name]
    if own not in (None, *_DEFAULTS) or attributes.get("dot_general_cls") is not None:
        return {}
    promote = Promote(format, attributes["promote_dtype"], as_tuple=True, layout=layout)
    return {"promote_dtype": promote, name: Multiply(lax.dot_general if own is None else own, operation)}


def quantized_body(base: type, attributes: dict[str, Any], format: Quantization | None) -> type | None:
    """The class whose methods run in place of a layer's, where its functions are no attributes."""
    if not issubclass(base, nnx.Embed) or not quantized_attributes(base, attributes, format):
        return None
    return _embed_class(base)


def weight_in(base: type, attributes: dict[str, Any]) -> tuple[Any, Layout] | None:
    """The weight of a layer of Flax's that can be quantized, and its layout; `None` if it has none."""
    name = "embedding" if issubclass(base, nnx.Embed) else "kernel"
    variable = attributes.get(name)
    if not isinstance(variable, nnx.Variable) or "promote_dtype" not in attributes:
        return None
    value: Any = variable.get_raw_value()
    shape = getattr(value, "shape", ())
    if len(shape) < 2:
        return None
    return value, _layout(base, attributes, shape)


def _layout(base: type, attributes: dict[str, Any], shape: tuple[int, ...]) -> Layout:
    """The layout as the layer tells it; axes before those of the layer are of a stack."""
    if issubclass(base, nnx.Embed):
        return table_layout(shape)
    if issubclass(base, nnx.Linear):
        return Layout(shape[-2:-1], 1)
    if issubclass(base, nnx.LinearGeneral):
        channels, summed = len(attributes["out_features"]), len(attributes["in_features"])
        return Layout(shape[len(shape) - channels - summed : len(shape) - channels], channels)
    if issubclass(base, nnx.Conv | nnx.ConvTranspose):
        return Layout(shape[len(shape) - len(attributes["kernel_shape"]) : -1], 1)
    if issubclass(base, nnx.Einsum):
        return _einsum_layout(attributes, shape)
    bias = attributes.get("bias")
    return kernel_layout(shape, None if bias is None else bias.shape)


def _einsum_layout(attributes: dict[str, Any], shape: tuple[int, ...]) -> Layout:
    equation, own = attributes["einsum_str"], tuple(attributes["kernel_shape"])
    if equation is None or "..." in equation.partition("->")[0].split(",")[1]:
        return kernel_layout(own)
    left = equation.partition(",")[0].replace(" ", "").replace("...", "")
    labels = labels_of(len(left), len(own), Einsum(equation))
    summed = labels.summed(labels.right)
    return Layout(own[summed[0] : summed[-1] + 1], len(own) - 1 - summed[-1]) if summed else kernel_layout(own)


def _multiplies_with(base: type) -> tuple[str | None, str]:
    """The attribute that a layer multiplies with, and what it is."""
    if issubclass(base, nnx.Linear | nnx.LinearGeneral):
        return "dot_general", "dot_general"
    if issubclass(base, nnx.Conv):
        return "conv_general_dilated", "conv_general_dilated"
    return ("einsum_op", "einsum") if issubclass(base, nnx.Einsum) else (None, "")


_DEFAULTS = (lax.dot_general, lax.conv_general_dilated, jnp.einsum)


@functools.cache
def _default_promote() -> Callable[..., Any]:
    return inspect.signature(nnx.Linear.__init__).parameters["promote_dtype"].default


@functools.cache
def _embed_class(base: type[nnx.Embed]) -> type:
    """A subclass of an embedding that reads rows, and attends to them, by their integers."""

    def call(self: Any, inputs: jax.Array, *args: Any, **kwargs: Any) -> Any:
        table = _table(self)
        if isinstance(table, QuantizedArray | Unquantized) and jnp.issubdtype(inputs.dtype, jnp.integer):
            if self.num_embeddings == 1:
                return jnp.broadcast_to(fake_quantized(table, self.dtype), (*inputs.shape, self.features))
            return take(table, inputs, self.dtype)
        return base.__call__(self, inputs, *args, **kwargs)

    def attend(self: Any, query: jax.Array, *, out_sharding: Any = None) -> Any:
        query, table, _ = self.promote_dtype((query, self.embedding[...], None), dtype=self.dtype)
        return dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())), out_sharding=out_sharding)

    methods: dict[str, Any] = {}
    if base.__call__ is nnx.Embed.__call__:
        methods["__call__"] = call
    if base.attend is nnx.Embed.attend:
        methods["attend"] = attend
    metaclass: Any = type(base)
    return metaclass(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **methods})


def _table(embed: Any) -> Any:
    promote: Promote = embed.promote_dtype
    return weight_of(embed.embedding[...], promote.format, table_layout(embed.embedding[...].shape))
