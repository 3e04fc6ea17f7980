"""The operations of JAX that take a weight in second place, quantized: `dot_general`, `einsum`, convolution, `take`."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._base import DTypeLike, is_floating_dtype
from ..policy import BlockFormat, Float8, Quantization, draws_noise, parse_quantization
from ._products import (
    Bilinear,
    Call,
    Sharding,
    State,
    block_product,
    describe_convolution,
    describe_dot_general,
    describe_einsum,
    float8_product,
    is_matmul,
    multiply_quantized,
    needs_state,
    new_state,
    why_weight_wide,
)
from ._weights import Layout, QuantizedArray, StoredWeight, Unquantized, block_length, fake_quantize, table_layout


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array | StoredWeight,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Sharding | None = None,
    quantization: Quantization | str | None = None,
    state: State | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Computes `jax.lax.dot_general` with a quantized weight on the right, or in narrow floating point.

    A floating `rhs` may have its axes in any order. Blocks that are stored are multiplied as blocks where the axes of
    `rhs` are in the order of a batch, what is summed over, outputs; elsewhere `rhs` is dequantized to the dtype of
    `lhs`, and `lhs` is not rounded.

    Args:
      lhs: real floating, of any shape.
      rhs: a `QuantizedArray`, which says how to compute with it; or a floating array. `quantization` says how to
        quantize that: with a scale for each row or column that is summed over, or in blocks along these.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`.
      precision: as for JAX; products in 8 bits ignore it.
      preferred_element_type: the dtype of the result; `None` for the dtype of `lhs`.
      out_sharding: as for JAX.
      quantization: `Int8`, `Int4`, `Float8`, `MXFP8`, `MXFP4`, `NVFP4`, or their string, for a floating `rhs`; with
        `None` it is JAX's own operation. `Float8`, and formats of blocks with `activations`, compute the reverse-mode
        derivative in narrow numbers as well. `Float8` alone leaves small products alone.
      state: for `Float8` with `DelayedScaling`, as `float8_state` makes it. Its gradient is the next state.
      key: for `NVFP4` with `stochastic_rounding`, a new one for each product of each step. The derivative draws from
        it, and from nothing else: under `jax.jit` the same numbers on any mesh. In `jax.shard_map` each device draws
        for the part that it has; fold `jax.lax.axis_index` into the key, that their noise may differ.

    Returns:
      The product, as JAX would order its axes. Its derivative passes straight through the rounding, to `lhs` and to a
      floating `rhs`.

    Raises:
      TypeError: `lhs`, or an `rhs` to quantize, is not floating; or the derivative of a product in float8, or of one
        of blocks by blocks, is differentiated.
      ValueError: `quantization` is none, or its blocks do not divide what is summed over; a quantized `rhs` is given
        another one; or a state or key is missing, or given to a format that has none. A missing key shows where the
        product is differentiated.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> x, w = jnp.ones((2, 4)), jnp.full((4, 3), 0.5)
    >>> jmp.quant.dot_general(x, w, (((1,), (0,)), ((), ())), quantization="int8").tolist()[0]
    [2.0, 2.0, 2.0]
    """
    options = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    return _multiply(describe_dot_general(lhs, rhs, dimension_numbers, **options), quantization, state, key)


def einsum(
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array | StoredWeight,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Sharding | None = None,
    quantization: Quantization | str | None = None,
    state: State | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Computes `jax.numpy.einsum` of two operands, with a quantized weight on the right, or in narrow floating point.

    Arguments, result and errors are as of `dot_general`; the equation has its `->` and may have an ellipsis.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.quant.einsum("bd,nd->bn", jnp.ones((1, 4)), jnp.ones((2, 4)), quantization="int8").tolist()
    [[4.0, 4.0]]
    """
    options = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    return _multiply(describe_einsum(equation, lhs, rhs, **options), quantization, state, key)


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array | StoredWeight,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    *,
    quantization: Quantization | str | None = None,
    state: State | None = None,
    **options: Any,
) -> jax.Array:
    """Computes `jax.lax.conv_general_dilated` with a quantized filter, or with both operands rounded to float8.

    With `Int8` an example of the batch has one scale, because windows overlap. With `Float8` the numbers of 8 bits are
    multiplied in bfloat16 or float32. Formats of blocks round the filter alone, in blocks along all that a window sums
    over, and the product is in the dtype of `lhs`. Other arguments, result and errors are as for JAX's operation and
    for `dot_general`.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> x, w = jnp.ones((1, 1, 4)), jnp.ones((1, 1, 2))
    >>> jmp.quant.conv_general_dilated(x, w, (1,), "VALID", quantization="int8").tolist()
    [[[2.0, 2.0, 2.0]]]
    """
    return _multiply(describe_convolution(lhs, rhs, window_strides, padding, **options), quantization, state)


def take(table: StoredWeight, indices: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Rows of an embedding table in 8 or 4 bits, as floating numbers: only the rows that are read are dequantized.

    Args:
      table: a `QuantizedArray` of shape `(rows, features)` whose rows have scales of their own, or an `Unquantized`.
      indices: integers of any shape.
      dtype: of the result; `None` for the dtype of the table.

    Returns:
      Shape `(*indices.shape, features)`.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> params = {"embedding": jnp.ones((300, 64))}
    >>> table = jmp.quant.quantize(params, "int8_from_float32")["embedding"]
    >>> jmp.quant.take(table, jnp.array([3, 7])).shape
    (2, 64)
    """
    dtype = table.dtype if dtype is None else dtype
    if table.layout != table_layout(table.shape):
        return jnp.take(fake_quantize(table, dtype), indices, axis=0)
    if isinstance(table, QuantizedArray):
        rows: StoredWeight = jax.tree.map(lambda leaf: jnp.take(leaf, indices, axis=0) if leaf.ndim else leaf, table)
    else:
        rows = Unquantized(jnp.take(table.array, indices, axis=0), table.format, table.layout)
    return fake_quantize(rows, dtype)


@dataclasses.dataclass(frozen=True)
class Multiplication:
    """One of the ways in which layers multiply their inputs by their weights: an operation of JAX's, and ours.

    Attributes:
      default: JAX's function, which Flax's layers call unless told otherwise.
      describe: takes the arguments of `default`, and returns its bilinear form and its operands.
      quantized: takes the arguments of `default`, and computes with a quantized weight.
    """

    default: Callable[..., jax.Array]
    describe: Callable[..., Call]
    quantized: Callable[..., jax.Array]


OPERATIONS = {
    "dot_general": Multiplication(lax.dot_general, describe_dot_general, dot_general),
    "conv_general_dilated": Multiplication(lax.conv_general_dilated, describe_convolution, conv_general_dilated),
    "einsum": Multiplication(jnp.einsum, describe_einsum, einsum),
}
"""By the names that the rows of the tables of layers call them by."""


def float8_state(quantization: Quantization | str) -> State:
    """Makes the state of a product in 8-bit floating point before its first step: scales of one, and empty histories.

    Each product has a state of its own, a tree of float32 arrays. The gradient of the state is the next state: where
    parameters are updated the gradient overwrites it, and no optimizer should see it.

    `value_and_grad`, `optim` and casts know it by its names, wherever it stands in a tree of parameters, as long as all
    six stay together; under the key `_overwrite_with_gradient`, Flax's own, they know any part of it. In nnx, where a
    Variable's type tells what it is, each array is a `jmp_policy.nnx.Float8State`. `jax.grad` and optimizers alone do
    not know it: `jax.grad` sums what several uses of a layer saw, and keeps the loss scale in it.

    Args:
      quantization: `Float8` with `DelayedScaling`, or its string.

    Returns:
      For each of input, kernel and output_grad a `{name}_scale` of shape `(1,)` and a `{name}_amax_history` of shape
      `(amax_history_length,)`, whose first element is the newest.

    Raises:
      ValueError: `quantization` has no state.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> x, w, float8 = jnp.full((16, 16), 3.0), jnp.ones((16, 16)), "float8/2(min_size=0)"
    >>> state = jmp.quant.float8_state(float8)
    >>> product = lambda s: jmp.quant.dot_general(x, w, (((1,), (0,)), ((), ())), quantization=float8, state=s)
    >>> jax.grad(lambda s: product(s).sum())(state)["input_amax_history"].tolist()
    [3.0, 0.0]
    """
    format = parse_quantization(quantization)
    if not needs_state(format):
        raise ValueError(f"{str(format)!r} has no state. For example: float8_state(Float8()).")
    return new_state(format)


def _multiply(
    call: Call, quantization: Quantization | str | None, state: State | None, key: jax.Array | None = None
) -> jax.Array:
    operation, lhs, rhs = call
    format = parse_quantization(quantization)
    _check_state(format, state)
    if isinstance(rhs, QuantizedArray | Unquantized):
        _check_format(rhs, format)
        _check_key(rhs.format, key)
        _check_floating(lhs)
        return multiply_quantized(operation, lhs, rhs, key)
    _check_key(format, key)
    if format is None or rhs.size == 0:  # a sum of nothing is zero in any format
        return operation.compute(lhs, rhs)
    _check_floating(lhs)
    if isinstance(format, Float8):
        _check_floating(rhs)
        if why_weight_wide(operation, lhs.shape, rhs.shape, format) is not None:
            return operation.compute(lhs, rhs.astype(lhs.dtype))
        return float8_product(operation, lhs, rhs, format, None if state is None else dict(state))  # of any mapping
    if isinstance(format, BlockFormat):
        _check_floating(rhs)
        if format.activations and is_matmul(operation, lhs.shape, rhs.shape):
            # In whatever order the axes are: nothing has stored the weight as blocks.
            inputs = math.prod(rhs.shape[axis] for axis in operation.summed_axes(operation.right))
            block_length(Layout((inputs,), 1), format)
            return block_product(operation, lhs, rhs, format, key)
    return multiply_quantized(operation, lhs, Unquantized(rhs, format, _find_layout(operation, rhs.shape)), key)


def _check_format(weight: StoredWeight, format: Quantization | None) -> None:
    if format not in (None, weight.format):
        raise ValueError(
            f"The weight is quantized already, as {str(weight.format)!r}, and cannot be as {str(format)!r}. "
            "Leave quantization out, or pass rhs.dequantize()."
        )


def _check_floating(operand: jax.Array) -> None:
    if not is_floating_dtype(operand.dtype):
        raise TypeError(
            f"A quantized weight is multiplied by floating numbers, got {operand.dtype}{list(operand.shape)}. "
            "For example: dot_general(x.astype('float32'), ...)."
        )


def _check_state(format: Quantization | None, state: State | None) -> None:
    """Checks that there is a state exactly where a recipe has one."""
    if needs_state(format) and state is None:
        raise ValueError(
            f"{str(format)!r} scales by what it saw before, and is given no state. For example: "
            f"state=float8_state({str(format)!r}), or quantization='float8(recipe=current)', which needs none."
        )
    if state is not None and not needs_state(format):
        raise ValueError(f"{str(format)!r} has no state, and got one. For example: quantization='float8'.")


def _check_key(format: Quantization | None, key: jax.Array | None) -> None:
    """Checks that a key is given to a format that draws noise alone; whether one is missing, the derivative knows."""
    if key is not None and not draws_noise(format):
        raise ValueError(
            f"{format and str(format)!r} draws no noise, and got a key. For example: "
            "quantization='nvfp4(stochastic_rounding=true)'."
        )


def _find_layout(operation: Bilinear, shape: tuple[int, ...]) -> Layout:
    """Finds the layout of a floating weight: from the first axis that the operation sums over to the last."""
    summed = operation.summed_axes(operation.right)
    if not summed:
        return Layout((1,), 0) if not shape else Layout(shape[-1:], 0)
    first, last = summed[0], summed[-1]
    return Layout(shape[first : last + 1], len(shape) - 1 - last)
