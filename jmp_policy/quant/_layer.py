"""Plans and matmuls of Flax layers under a policy: quantized, in float8, or with an accumulate dtype."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import cast_floating, is_floating_dtype
from ..policy import BlockFormat, Float8, Int8, Policy, StoredFormat, needs_rng
from ._array import QuantizedArray
from ._bilinear import Dot, label_dot
from ._float8_product import State, float8_product, needs_state, reason_not_float8, why_sizes_wide
from ._layout import (
    WHY_TABLES_WIDE,
    Layout,
    choose_format,
    describe_padding,
    kernel_layout,
    layer_size,
    reason_unquantized,
)
from ._observe import defer, observe_product
from ._operations import OPERATIONS, Multiplication, dot_general
from ._product import is_block_product, multiplies_values
from ._quantizer import FakeQuantized, StoredWeight, fake_quantize, prepare_weight
from ._wide_product import wide_product


@dataclasses.dataclass(frozen=True)
class WeightedLayer:
    """The matmul of a type of Flax layer: a row of linen's or nnx's table."""

    weight: str  # its name, one of `WEIGHT_NAMES`
    operation: str | None = None  # the key in `OPERATIONS` of its matmul, or `None` if that cannot be replaced
    field: str | None = None  # the field or attribute that holds the matmul, or `None` if a method calls it
    # `(attributes, shape of the weight) -> Layout`; `None` infers it from the weight's name and the bias.
    layout: Callable[[Any, tuple[int, ...]], Layout] | None = None

    @property
    def default(self) -> Callable[..., jax.Array] | None:
        """The matmul of the layer, unless its author gave it another one."""
        return None if self.operation is None else OPERATIONS[self.operation].default

    def needs_rng(self, format: object) -> bool:
        """True if the format rounds gradients at random; it does not in convolutions."""
        return self.operation in ("dot_general", "einsum") and needs_rng(format)


@dataclasses.dataclass(frozen=True)
class LayerProduct:
    """The matmul of one layer under a policy. Equal ones share programs, so fields that may differ do not compare."""

    operation: str | None  # as in `WeightedLayer`; `None` dequantizes a stored weight before the layer's own matmul
    format: StoredFormat | Float8 | None  # `None` if only the accumulate dtype differs
    accumulate: np.dtype | None
    promote: Callable[..., Any]  # the `promote_dtype` of the layer
    as_tuple: bool  # true if `promote` takes a tuple of arrays (nnx), false if it takes each array (linen)
    layout: Layout | None = None  # `None` infers it from the weight and the bias
    returns_sums: bool = True  # true to return results in the accumulate dtype, false to cast them down at once
    key: Callable[[], jax.Array | None] | None = dataclasses.field(default=None, compare=False)
    state: Callable[[], State] | None = dataclasses.field(default=None, compare=False)
    # The weight for errors, by its path or layer; None for a float8 layer whose state is new in this call.
    where: str | None = dataclasses.field(default="", compare=False)

    @property
    def stored_format(self) -> StoredFormat | None:
        return None if isinstance(self.format, Float8) else self.format

    def promote_arrays(self, *arrays: Any, **options: Any) -> tuple[Any, ...]:
        return tuple(self.promote(*((arrays,) if self.as_tuple else arrays), **options))


@dataclasses.dataclass(frozen=True)
class Promote:
    """The `promote_dtype` of a layer under a policy: leaves a stored weight uncast."""

    product: LayerProduct

    def __call__(self, *arrays: Any, dtype: Any = None, **options: Any) -> tuple[Any, ...]:
        product = self.product
        given = arrays[0] if product.as_tuple else arrays
        promote = functools.partial(product.promote_arrays, dtype=dtype, **options)
        if len(given) != 3:  # not an (inputs, weight, bias) call
            return promote(*given)
        inputs, weight, bias = given
        format, sums, is_stored = product.stored_format, product.accumulate, False
        if format is not None:
            layout = product.layout or kernel_layout(weight.shape, None if bias is None else bias.shape)
            weight = prepare_weight(weight, format, layout, product.where or "")
            is_stored = isinstance(weight, StoredWeight)
        elif sums is not None and is_floating_dtype(weight.dtype) and not isinstance(weight, QuantizedArray):
            # `wide_product` takes the weight uncast too, so that its gradient is not rounded to the compute dtype.
            like = jnp.zeros((), weight.dtype)  # the dtype of the weight counts in the promotion, its values stay
            new_inputs, _, new_bias = promote(inputs, like, None if product.returns_sums else bias)
            if has_fewer_bits(new_inputs, sums):
                return new_inputs, jnp.asarray(weight), cast_floating(bias, sums) if product.returns_sums else new_bias

        like = jnp.zeros((), weight.dtype) if is_stored else weight
        new_inputs, new_weight, new_bias = promote(inputs, like, bias)
        if is_stored:
            new_weight = weight if product.operation is not None else fake_quantize(weight, new_inputs.dtype)
        if sums is not None and product.returns_sums and has_fewer_bits(new_inputs, sums):
            new_bias = cast_floating(bias, sums)
        return new_inputs, new_weight, new_bias


@dataclasses.dataclass(frozen=True)
class Multiply:
    """The `dot_general`, `conv_general_dilated` or `einsum_op` of a layer under a policy."""

    product: LayerProduct

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        product = self.product
        assert product.operation is not None
        kind, dtype = OPERATIONS[product.operation], product.accumulate
        call = None if dtype is None else kind.describe(*operands, **options)
        if call is None or dtype is None or not has_fewer_bits(call.lhs, dtype):
            out = self._multiply_quantized(kind, operands, options)
            # The layer's own function, so that its program is the same as without a policy.
            return kind.default(*operands, **options) if out is None else out
        out = None
        # A weight whose stored values cannot be multiplied is dequantized for `wide_product`.
        is_stored = isinstance(call.rhs, StoredWeight)
        if not is_stored or is_block_product(*call) or multiplies_values(*call):
            out = self._multiply_quantized(kind, operands, options | {"preferred_element_type": dtype})
        if out is None:
            out = defer(functools.partial(_multiply_dequantized, call.operation, dtype), call.lhs, call.rhs)
        return out if product.returns_sums else out.astype(call.lhs.dtype)

    def _multiply_quantized(
        self, kind: Multiplication, operands: tuple[Any, ...], options: dict[str, Any]
    ) -> jax.Array | None:
        """Multiplies by a stored weight, or in float8; returns None for any other matmul."""
        product, format = self.product, self.product.format
        if any(isinstance(operand, StoredWeight) for operand in operands):
            key = {} if product.key is None else {"key": product.key()}
            return kind.quantized(*operands, **options, **key)
        if not isinstance(format, Float8):
            return None
        operation, lhs, rhs = kind.describe(*operands, **options)
        if reason_not_float8(operation, lhs.shape, rhs.shape, format) is not None:
            return None
        state = product.state() if product.state is not None and needs_state(format) else None
        return float8_product(operation, lhs, rhs, format, state, product.where)


def _multiply_dequantized(operation: Any, dtype: np.dtype, left: jax.Array, weight: Any) -> jax.Array:
    weight = observe_product(operation, left, weight)
    return wide_product(operation, left, _dequantize(weight), dtype, left.dtype)


def _dequantize(weight: Any) -> jax.Array:
    if isinstance(weight, QuantizedArray):
        return lax.stop_gradient(weight.dequantize())
    return fake_quantize(weight) if isinstance(weight, FakeQuantized) else weight


def attend(product: LayerProduct, query: jax.Array, table: Any, dtype: Any, out_sharding: Any = None) -> Any:
    """Multiplies a query by the table of an embedding; returns None if the layer's own method does the same."""
    # The dtype of the table counts in the promotion, its values stay.
    inputs = product.promote_arrays(query, jnp.zeros((), table.dtype), dtype=dtype)[0]
    if isinstance(table, StoredWeight):
        options: dict[str, Any] = {"preferred_element_type": product.accumulate, "out_sharding": out_sharding}
        return dot_general(inputs, table, (((inputs.ndim - 1,), (1,)), ((), ())), **options)
    if product.accumulate is None or not has_fewer_bits(inputs, product.accumulate):
        return None
    return multiply_wide(inputs, table, 1, product.accumulate, out_sharding)


def multiply_wide(
    inputs: jax.Array, matrix: jax.Array, axis: int, dtype: np.dtype, out_sharding: Any = None
) -> jax.Array:
    """Contracts the last axis of the inputs with one axis of a matrix, with sums in `dtype`."""
    compute = Dot((((inputs.ndim - 1,), (axis,)), ((), ())), out_sharding=out_sharding)
    return wide_product(label_dot(inputs.ndim, 2, compute), inputs, matrix, dtype, inputs.dtype)


def is_own(function: object) -> bool:
    """True for a function that a policy put in the place of a layer's own."""
    return isinstance(function, Promote | Multiply)


def has_fewer_bits(x: jax.Array, dtype: np.dtype) -> bool:
    """True for a floating operand with fewer bits than `dtype`."""
    return is_floating_dtype(x.dtype) and x.dtype.itemsize < dtype.itemsize


def find_layer_row(table: Mapping[type, WeightedLayer], kind: type) -> WeightedLayer | None:
    """Returns the row of a class of layers, or of its nearest base class in the table."""
    return next((table[base] for base in kind.__mro__ if base in table), None)


_WHY_FIXED = "no policy can replace the function that it multiplies by"


@dataclasses.dataclass(frozen=True, eq=False)
class LayerFacts:
    """Facts about one layer, which its adapter gathers once."""

    layer: WeightedLayer | None = None  # its row in the table of the adapter, or `None`
    weight: Any = None  # the value of its weight, if that has two or more axes
    layout: Layout | None = None  # of the weight
    groups: int = 1  # of a convolution
    is_matmul_open: bool = False  # true if a policy may replace its matmul: its author left it to Flax
    are_sums_open: bool = False  # true if a policy may change the output dtype of its matmul
    lacks_state: bool = False  # true if it cannot keep the state that a float8 format needs
    why_floating: str | None = None  # the reason why its weight cannot be stored in 8 or 4 bits
    why_as_numbers: str | None = None  # the reason why it dequantizes its weight before its matmul


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Effect of a policy on one layer."""

    format: StoredFormat | Float8 | None = None  # the format in which it multiplies by its weight, or `None`
    accumulate: np.dtype | None = None  # the dtype in which it returns the sums of its matmul, or `None`
    quantization: str = ""  # the treatment of its weight, for `Row.quantization`


def plan_layer(facts: LayerFacts, policy: Policy, compute_dtype: Any) -> LayerPlan:
    """Decides what a policy does to a layer that computes in a dtype; `None` if only its inputs tell it."""
    accumulate = find_accumulate_dtype(policy, compute_dtype) if facts.are_sums_open else None
    format, layout, layer = policy.quantization, facts.layout, facts.layer
    if format is None or facts.weight is None or layout is None:
        return LayerPlan(None, accumulate)
    if isinstance(format, Float8):
        left = _why_not_float8(facts, layout, format)
    else:
        is_stored = isinstance(facts.weight, QuantizedArray)
        left = None if is_stored else reason_unquantized(facts.weight.shape, layout, format)
        left = left or facts.why_floating
    if left is not None:
        return LayerPlan(None, accumulate, f"left: {left}")
    if isinstance(format, Float8):
        return LayerPlan(format, accumulate, str(format))
    is_fixed = layer is not None and layer.operation is None and layer.weight == "kernel"
    why_as_numbers = _WHY_FIXED if is_fixed else facts.why_as_numbers
    stored = choose_format(format, layout)
    quantization = spell_format(stored, layer, why_as_numbers, describe_padding(layout, stored))
    return LayerPlan(format, accumulate, quantization)


def _why_not_float8(facts: LayerFacts, layout: Layout, format: Float8) -> str | None:
    """Returns the reason why a layer does not compute in float8, whatever its inputs, or `None`."""
    layer, shape = facts.layer, facts.weight.shape
    if layer is not None and layer.weight == "embedding":
        return WHY_TABLES_WIDE
    if facts.lacks_state:
        return "it runs through .apply without state to scale by, and would lose what it made"
    if layer is None or not facts.is_matmul_open:
        return "it multiplies by a function of its own"
    if facts.groups != 1:
        return "its convolution is one of groups"
    inputs = layout.contracted[-1] if layer.operation == "conv_general_dilated" else layout.length
    return why_sizes_wide(layer_size(shape, layout), format, inputs, math.prod(shape[len(shape) - layout.channels :]))


def find_accumulate_dtype(policy: Policy, compute_dtype: Any = None) -> np.dtype | None:
    """Returns the accumulate dtype of a policy (float64 needs x64), unless a layer computes in it anyway."""
    if policy.accumulate_dtype is None:
        return None
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(policy.accumulate_dtype))
    return dtype if compute_dtype is None or np.dtype(compute_dtype).itemsize < dtype.itemsize else None


def spell_format(
    format: StoredFormat, layer: WeightedLayer | None, why_as_numbers: str | None, padding: str = ""
) -> str:
    """Describes a quantized weight, and the reason why the layer dequantizes it, for `Row.quantization`."""
    spelled = f"{format}{padding}"
    if not format.activations:  # only weights are rounded, however the layer multiplies
        return spelled
    is_in_blocks = not isinstance(format, Int8)
    if why_as_numbers is None and is_in_blocks and layer is not None and layer.operation == "conv_general_dilated":
        why_as_numbers = "it is a convolution"
    if why_as_numbers is not None:
        return f"{spelled}, computed with as numbers: {why_as_numbers}"
    is_odd = isinstance(format, BlockFormat) and format.block_size != type(format)().block_size
    return f"{spelled}, in blocks that no hardware multiplies" if is_odd else spelled
