"""An embedding with a quantized table: its methods run in a subclass, for it has no attributes to multiply with."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._base import Args, remember_on_class
from ..modules.common import make_subclass
from ..quant import QuantizedArray, dot_general, take
from ..quant._layers import Promote
from ..quant._weights import fake_quantize, prepare_weight, table_layout

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
