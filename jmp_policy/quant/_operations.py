"""JAX operations with a quantized weight: `dot_general`, `einsum`, `conv_general_dilated`, and `embedding_lookup`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from .._base import DTypeLike, is_floating_dtype
from ..policy import MXFP8, BlockFormat, Float8, Int8, Quantization, needs_rng, parse_quantization
from ._array import QuantizedArray
from ._bilinear import Bilinear, Call, Sharding, describe_convolution, describe_dot_general, describe_einsum, is_matmul
from ._float8_product import State, float8_product, needs_state, new_state, reason_not_float8
from ._layout import Layout, table_layout
from ._product import block_product, multiply_quantized
from ._quantizer import FakeQuantized, StoredWeight, fake_quantize


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
    """Computes `jax.lax.dot_general` with a quantized right operand.

    A floating `rhs` may have its axes in any order. A `rhs` that is stored in blocks is multiplied in blocks if its
    axes are in the order batch, inputs, outputs; otherwise it is dequantized to the dtype of `lhs`, and `lhs` is not
    rounded.

    Args:
      lhs: real floating, of any shape.
      rhs: a `QuantizedArray`, or a floating array to quantize by `quantization`.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`.
      precision: as for JAX; ignored by 8-bit matmuls.
      preferred_element_type: the dtype of the output; by default the dtype of `lhs`.
      out_sharding: as for JAX.
      quantization: `Int8`, `Int4`, `E4M3`, `NF4`, `Float8`, `MXFP8`, `MXFP4`, `NVFP4`, or their string, for a
        floating `rhs`; `None` calls JAX's operation. `Float8`, and block formats with `activations`, also quantize the
        backward pass. Only `Float8` leaves small matmuls unquantized.
      state: for `Float8` with `DelayedScaling`, from `float8_state`. Its gradient is the next state.
      key: for `NVFP4` with `stochastic_rounding`, use a new key for each matmul and step. Under `jax.jit` the result
        does not depend on the mesh. In `jax.shard_map`, fold `jax.lax.axis_index` into the key so that devices draw
        different noise.

    Returns:
      The output of JAX's operation. Its derivative passes straight through the rounding, to `lhs` and to a floating
      `rhs`.

    Raises:
      TypeError: `lhs`, or an `rhs` to quantize, is not floating; or a float8 or block-scaled matmul is differentiated
        twice.
      ValueError: `quantization` is not valid; a quantized `rhs` has another format; or a state or key is missing, or
        given to a format without one. A missing key raises an error only when the function is differentiated.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> x, w = jnp.ones((2, 4)), jnp.full((4, 3), 0.5)
    >>> jmp.quant.dot_general(x, w, (((1,), (0,)), ((), ())), quantization="int8").tolist()[0]
    [2.0, 2.0, 2.0]
    """
    options = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    return _multiply_in_format(describe_dot_general(lhs, rhs, dimension_numbers, **options), quantization, state, key)


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
    """Computes `jax.numpy.einsum` of two operands with a quantized right operand.

    Arguments, output and errors are as for `dot_general`; the equation needs `->` and may have an ellipsis.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.quant.einsum("bd,nd->bn", jnp.ones((1, 4)), jnp.ones((2, 4)), quantization="int8").tolist()
    [[4.0, 4.0]]
    """
    options = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    return _multiply_in_format(describe_einsum(equation, lhs, rhs, **options), quantization, state, key)


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
    """Computes `jax.lax.conv_general_dilated` with a quantized filter.

    With `Int8`, each example has one scale, because windows overlap. With `Float8`, float8 values are multiplied in
    bfloat16 or float32. Block formats round the filter only, and compute in the dtype of `lhs`. Other arguments, output
    and errors are as for JAX's operation and `dot_general`.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> x, w = jnp.ones((1, 1, 4)), jnp.ones((1, 1, 2))
    >>> jmp.quant.conv_general_dilated(x, w, (1,), "VALID", quantization="int8").tolist()
    [[[2.0, 2.0, 2.0]]]
    """
    return _multiply_in_format(describe_convolution(lhs, rhs, window_strides, padding, **options), quantization, state)


def embedding_lookup(table: StoredWeight, indices: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Looks up rows of a quantized embedding table, and dequantizes only these.

    Args:
      table: a `QuantizedArray` of shape `(rows, features)` with a scale per row.
      indices: integers of any shape.
      dtype: dtype of the output; by default the dtype of the table.

    Returns:
      An array of shape `(*indices.shape, features)`.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> params = {"embedding": jnp.ones((300, 64))}
    >>> table = jmp.quant.quantize(params, "int8_from_float32")["embedding"]
    >>> jmp.quant.embedding_lookup(table, jnp.array([3, 7])).shape
    (2, 64)
    """
    dtype = table.dtype if dtype is None else dtype
    if table.layout != table_layout(table.shape):
        return jnp.take(fake_quantize(table, dtype), indices, axis=0)
    if isinstance(table, QuantizedArray):
        rows: StoredWeight = jax.tree.map(lambda leaf: jnp.take(leaf, indices, axis=0) if leaf.ndim else leaf, table)
    else:
        rows = FakeQuantized(jnp.take(table.array, indices, axis=0), table.format, table.layout)
    return fake_quantize(rows, dtype)


@dataclasses.dataclass(frozen=True)
class Multiplication:
    """A function of JAX that layers call on input and weight, its `Call`, and its quantized form."""

    default: Callable[..., jax.Array]
    describe: Callable[..., Call]
    quantized: Callable[..., jax.Array]


# By the names in the tables of layers.
OPERATIONS = {
    "dot_general": Multiplication(lax.dot_general, describe_dot_general, dot_general),
    "conv_general_dilated": Multiplication(lax.conv_general_dilated, describe_convolution, conv_general_dilated),
    "einsum": Multiplication(jnp.einsum, describe_einsum, einsum),
}


def float8_state(quantization: Quantization | str) -> State:
    """Returns the initial state of a float8 matmul: scales of one, and empty histories.

    Each matmul has its own state. Its gradient is its next value: it overwrites the state when parameters are updated,
    and no optimizer should see it. `value_and_grad`, `optim` and casts recognize all six arrays together anywhere in a
    tree of parameters, and any of them under Flax's key `_overwrite_with_gradient`; `jax.grad` and plain optimizers do
    not. In nnx, each array is a `jmp_policy.nnx.Float8State`.

    Args:
      quantization: `Float8` with `DelayedScaling`, or its string.

    Returns:
      For each of input, kernel and output_grad, a `{name}_scale` of shape `(1,)` and a `{name}_amax_history` of shape
      `(amax_history_length,)`, whose first element is the newest; float32.

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


def _multiply_in_format(
    call: Call, quantization: Quantization | str | None, state: State | None, key: jax.Array | None = None
) -> jax.Array:
    operation, lhs, rhs = call
    format = parse_quantization(quantization)
    _check_state(format, state)
    if isinstance(rhs, QuantizedArray | FakeQuantized):
        if format not in (None, rhs.format):
            raise ValueError(
                f"The weight is quantized already, as {str(rhs.format)!r}, and cannot be as {str(format)!r}. "
                "Leave quantization out, or pass rhs.dequantize()."
            )
        _check_key(rhs.format, key)
        check_floating(lhs)
        return multiply_quantized(operation, lhs, rhs, key)
    _check_key(format, key)
    if format is None or rhs.size == 0:  # an empty sum is zero in any format
        return operation.compute(lhs, rhs)
    check_floating(lhs)
    if isinstance(format, Float8):
        check_floating(rhs)
        if reason_not_float8(operation, lhs.shape, rhs.shape, format) is not None:
            return operation.compute(lhs, rhs.astype(lhs.dtype))
        return float8_product(operation, lhs, rhs, format, None if state is None else dict(state))
    if isinstance(format, BlockFormat):
        check_floating(rhs)
        if format.activations and is_matmul(operation, lhs.shape, rhs.shape):
            # Any order of axes is fine, because the weight is not stored in blocks yet.
            return block_product(operation, lhs, rhs, format, key)
    return multiply_quantized(operation, lhs, FakeQuantized(rhs, format, _infer_layout(operation, rhs.shape)), key)


def parse_product_format(quantization: Quantization | str | None, function: str) -> Int8 | Float8 | MXFP8 | None:
    """Reads the format of a product in which neither operand is a stored weight."""
    format = parse_quantization(quantization)
    if format is None:
        return None
    if needs_state(format):
        raise ValueError(
            f"{function} keeps no state of earlier steps, which {str(format)!r} needs. "
            "For example: quantization='float8(recipe=current)'."
        )
    if isinstance(format, Int8) and format.act_scale == "static":
        raise ValueError(f"{function} has no calibrated scale, which {str(format)!r} needs. For example: 'int8'.")
    if multiplies_8_bits(format):
        return format
    kind = "quantizes weights only" if isinstance(format, Int8 | MXFP8) else "has 4"
    raise ValueError(
        f"{function} multiplies two operands in 8 bits, and {str(format)!r} {kind}. "
        "For example: quantization='int8', 'float8(recipe=current)' or 'mxfp8'."
    )


def multiplies_8_bits(format: Quantization) -> TypeGuard[Int8 | Float8 | MXFP8]:
    """True if both operands of a matmul may be in 8 bits."""
    return isinstance(format, Float8) or (isinstance(format, Int8 | MXFP8) and format.activations)


def check_floating(operand: jax.Array, example: str = "dot_general(x.astype('float32'), ...)") -> None:
    if not is_floating_dtype(operand.dtype):
        raise TypeError(
            f"A quantized matmul takes floating arrays, got {operand.dtype}{list(operand.shape)}. "
            f"For example: {example}."
        )


def _check_state(format: Quantization | None, state: State | None) -> None:
    if needs_state(format) and state is None:
        raise ValueError(
            f"{str(format)!r} needs a state of earlier steps, but got none. For example: "
            f"state=float8_state({str(format)!r}), or quantization='float8(recipe=current)', which needs no state."
        )
    if state is not None and not needs_state(format):
        raise ValueError(f"{str(format)!r} has no state, but got one. For example: quantization='float8'.")


def _check_key(format: Quantization | None, key: jax.Array | None) -> None:
    """Rejects a key unless the format rounds stochastically; the derivative reports a missing key."""
    if key is not None and not needs_rng(format):
        raise ValueError(
            f"{format and str(format)!r} uses no stochastic rounding, but got a key. For example: "
            "quantization='nvfp4(stochastic_rounding=true)'."
        )


def _infer_layout(operation: Bilinear, shape: tuple[int, ...]) -> Layout:
    """Returns the layout from the first summed axis to the last."""
    summed = operation.summed_axes(operation.right)
    if not summed:
        return Layout((1,), 0) if not shape else Layout(shape[-1:], 0)
    first, last = summed[0], summed[-1]
    return Layout(shape[first : last + 1], len(shape) - 1 - last)
