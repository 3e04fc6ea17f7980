"""The nnx layers that multiply by a weight, quantized embeddings among them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._base import Args, remember_on_class, remember_weakly
from ..modules.common import make_subclass
from ..quant import QuantizedArray, dot_general, take
from ..quant._layers import Promote, PromoteRounded, WeightedLayer, find_row, read_narrow
from ..quant._products import Einsum, label_einsum
from ..quant._weights import Layout, fake_quantize, kernel_layout, prepare_weight, table_layout
from ._shadow import Attributes

StoredTable = jax.Array | QuantizedArray
"""A table as a Param holds it, or a `QuantizedParam`."""

OutSharding = NamedSharding | PartitionSpec | None


class PromoteTable(Promote):
    """The `promote_dtype` of an embedding: the table, last of the arrays, becomes the numbers it stands for.

    Methods call it that an author wrote in a subclass, or runs by `super()`. The methods of Flax read the table by
    `read_rows` and `prepare_operands` instead.
    """

    def __call__(self, arrays: Args, *, dtype: DTypeLike | None = None, **options: Any) -> tuple[Any, ...]:
        *others, table = arrays
        numbers = fake_quantize(prepare_weight(table, self.format, table_layout(table.shape)), dtype)
        return self.promote((*others, numbers), dtype=dtype, **options)

    def read_rows(self, table: StoredTable, indices: jax.Array, dtype: DTypeLike | None) -> jax.Array:
        """Rows of the table, and no others, as floating numbers."""
        return take(prepare_weight(table, self.format, table_layout(table.shape)), indices, dtype)

    def prepare_operands(self, query: jax.Array, table: StoredTable, dtype: DTypeLike | None) -> tuple[Any, ...]:
        """The operands of the product with the whole table: the query in the dtype to compute in, and the weight."""
        return super().__call__((query, table, None), dtype=dtype)[:2]


@remember_on_class
def make_quantized_embed(base: type[nnx.Embed]) -> type[nnx.Embed]:
    """A subclass of an embedding that reads rows, and attends to them, as they are stored; one for equal classes."""
    methods: dict[str, Any] = {}
    if base.__call__ is nnx.Embed.__call__:
        methods["__call__"] = _call
    if base.attend is nnx.Embed.attend:
        methods["attend"] = _attend
    return make_subclass(base, methods, (make_quantized_embed, (base,)))


def _call(self: Any, inputs: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
    table, read = self.embedding[...], self.promote_dtype.read_rows
    if self.num_embeddings == 1 or not jnp.issubdtype(inputs.dtype, jnp.integer):
        return nnx.Embed.__call__(self, inputs, out_sharding=out_sharding)
    if out_sharding is None:
        return read(table, inputs, self.dtype)
    read = functools.partial(read, dtype=self.dtype)
    return jax.sharding.auto_axes(out_sharding=out_sharding)(read)(table, inputs)


def _attend(self: Any, query: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
    query, table = self.promote_dtype.prepare_operands(query, self.embedding[...], self.dtype)
    return dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())), out_sharding=out_sharding)


Shape = tuple[int, ...]


class LayerWeight(NamedTuple):
    """The weight of a layer of Flax's.

    Attributes:
      value: what its Variable holds.
      layout: which of its axes are summed over.
    """

    value: Any
    layout: Layout


def find_weight(base: type, attributes: Attributes) -> LayerWeight | None:
    """The weight of two or more axes of a layer of Flax's; `None` if there is none."""
    layer = find_layer(base)
    variable = attributes.get(layer.weight) if layer else None
    value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
    shape = getattr(value, "shape", ())
    if layer is None or layer.layout is None or len(shape) < 2:
        return None
    return LayerWeight(value, layer.layout(attributes, shape))


def weight_name(base: type) -> str:
    """The attribute that holds the weight of a layer of Flax's."""
    layer = find_layer(base)
    assert layer is not None
    return layer.weight


def find_open_field(base: type, attributes: Attributes) -> str | None:
    """The attribute that holds the function a layer multiplies with, if its author left that at its default."""
    layer = find_layer(base)
    if layer is None or layer.field not in attributes or attributes.get("dot_general_cls") is not None:
        return None
    function = read_narrow(attributes[layer.field])
    return layer.field if function is None or function is layer.default else None


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
    labels = label_einsum(len(left), len(own), Einsum(equation))
    summed = labels.summed_axes(labels.right)
    return Layout(own[summed[0] : summed[-1] + 1], len(own) - 1 - summed[-1]) if summed else kernel_layout(own)


def _table(attributes: Attributes, shape: Shape) -> Layout:
    return table_layout(shape)


LAYERS: dict[type, WeightedLayer] = {
    nnx.Linear: WeightedLayer("kernel", "dot_general", "dot_general", _linear),
    nnx.LinearGeneral: WeightedLayer("kernel", "dot_general", "dot_general", _linear_general),
    nnx.Einsum: WeightedLayer("kernel", "einsum", "einsum_op", _einsum),
    nnx.Conv: WeightedLayer("kernel", "conv_general_dilated", "conv_general_dilated", _convolution),
    nnx.ConvTranspose: WeightedLayer("kernel", layout=_convolution, promote=PromoteRounded),
    nnx.Embed: WeightedLayer("embedding", layout=_table, promote=PromoteTable),
}
"""The layers whose weights a quantized policy knows; their subclasses have the same row."""


@remember_weakly
def find_layer(base: type) -> WeightedLayer | None:
    """The row of a class of layers; `None` if it is neither in the table nor derived from one that is."""
    return find_row(LAYERS, base)


@functools.cache
def default_promote() -> Callable[..., Any]:
    """The `promote_dtype` of layers whose author wrote none."""
    return inspect.signature(nnx.Linear.__init__).parameters["promote_dtype"].default
