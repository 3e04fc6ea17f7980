"""The quantized array, and its serialization."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from .._base import ROUNDING_SCOPE, DTypeLike, Uncast, is_array, is_floating, parse_dtype, round_to_half
from ..policy import (
    E4M3,
    NF4,
    PER_CHANNEL,
    BlockFormat,
    Int4,
    Int8,
    Quantization,
    StoredFormat,
    parse_quantization,
    stored_format_of,
)
from ._block_numbers import (
    Blocks,
    dequantize,
    pack,
    pad_axes,
    quantize_squares,
    round_operand,
    spread_over_axis,
    unpack,
)
from ._layout import BlockedFormat, Layout, block_length, count_blocks, describe_padding, stack_shape
from ._numbers import (
    Clip,
    Quantized,
    check_clip,
    choose_bounds,
    choose_peak,
    measure_amax,
    quantize_asymmetric,
    quantize_e4m3,
    quantize_normal,
    quantize_symmetric,
    read_normal,
)

_EMPTY: Any = object()  # a last array that JAX mapped to None: the tree keeps its structure


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedArray(Uncast):
    """Weight in 8 or 4 bits: values, their scales, and the dtype that they stand for.

    A pytree of arrays with static other fields; no policy casts it. `quant.quantize` makes it from a model, and
    `quantize_array` from an array. A stack of weights may be sliced along its leading axes, as `scan` and `vmap` do.

    Attributes:
      values: int8, or the e4m3 of `E4M3`, of the weight's shape; or of shape `(*stack, blocks, bytes of a block,
        *channels)`: uint8, two 4-bit values to a byte, or the e4m3 of `MXFP8`. A byte of `Int4` has a value of the
        first half of its block in its low half, and one of the second half in its high half, and so one of `NF4`, whose
        values are places in its table; bytes of floats have two neighbors.
      scale: float32 of the weight's shape, with length 1 on summed axes; or of shape `(*stack, blocks, 1, *channels)`:
        float32 for `Int4` and `NF4`, e8m0 for `MXFP8` and `MXFP4`, e4m3 for `NVFP4`; or float32 of shape `(*stack,
        blocks of inputs, blocks of outputs)` for `E4M3` in squares.
      zero_point: uint8 of the shape of `scale` for `Int4`, else `None`.
      input_clip: float32, one per weight of a stack: the calibrated magnitude to clip the layer's inputs to, or `None`.
      format: `Int8`, `Int4`, `E4M3`, `NF4`, `MXFP8`, `MXFP4` or `NVFP4`.
      layout: the axes that are summed over.
      dtype: the dtype of the original weight.
      tensor_scale: float32, one per weight of a stack, for `NVFP4`, else `None`.
      input_scale: float32 of shape `(*stack, blocks, length of a block, 1, ...)`: for `Int4` from `awq`, factors of the
        weights of each input, else `None`.
      input_order: int32 of shape `(*stack, inputs)`: for `Int4` from GPTQ checkpoints with `desc_act`, the place of
        each input among the stored values, else `None`.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.quant.quantize_array(jnp.array([[1.0, -4.0], [0.5, 2.0]]), "int8")
    QuantizedArray(int8, shape=(2, 2), dtype=float32)
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    input_clip: jax.Array | None
    format: StoredFormat
    layout: Layout
    dtype: np.dtype
    tensor_scale: jax.Array | None = None
    input_scale: jax.Array | None = None
    input_order: jax.Array | None = None

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        """Returns the arrays by name and the static fields, for JAX."""
        # Orbax silently skips a saved array where the target has None, and values without their input scale or order
        # are wrong. So these are not in the tree if they are None, and Orbax reports the difference.
        arrays = [getattr(self, name) for name in ARRAYS]
        while len(arrays) > _ALWAYS and arrays[-1] is None:
            arrays.pop()
        keys = map(jax.tree_util.GetAttrKey, ARRAYS[: len(arrays)])
        arrays = [None if array is _EMPTY else array for array in arrays]
        return list(zip(keys, arrays, strict=True)), (self.format, self.layout, self.dtype)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], arrays: Sequence[Any]) -> "QuantizedArray":
        """Makes a weight of its arrays and static fields, for JAX."""
        last = arrays[_ALWAYS:]
        if last and last[-1] is None:
            last = [*last[:-1], _EMPTY]
        return cls(*arrays[:4], *static, *arrays[4:_ALWAYS], *last)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        if isinstance(self.format, Int8 | E4M3):
            return self.values.shape
        blocks_axis = self.values.ndim - 2 - self.layout.channels
        stack, channels = self.values.shape[:blocks_axis], self.values.shape[blocks_axis + 2 :]
        # In `shard_map`, a shard has a part of the blocks, split along the first axis.
        first, *others = self.layout.contracted
        whole, part = count_blocks(self.layout, self.format), self.values.shape[blocks_axis]
        if part != whole and (padding := describe_padding(self.layout, self.format)):
            raise ValueError(
                f"A weight in {str(self.format)!r}{padding}, cannot be split along its inputs in shard_map, and a "
                f"shard has {part} of its {whole} blocks. Leave its inputs whole, as in_specs=P(None, 'model') does, "
                f"or use a block size that divides the {self.layout.length} inputs."
            )
        return (*stack, first * part // whole, *others, *channels)

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the weight."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Total bytes of all arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Sharding of the values."""
        return self.values.sharding

    @jax.named_scope(ROUNDING_SCOPE)
    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Returns the weight as a floating array, rounded once from float32 to `dtype` (default: the original)."""
        dtype = self.dtype if dtype is None else parse_dtype(dtype)
        if isinstance(self.format, Int8 | E4M3):
            wide = self.values.astype(jnp.float32) * self._spread_scale()
        elif isinstance(self.format, BlockFormat):
            wide = self._drop_padding(dequantize(self.read_blocks(), -2))
        else:
            values, scale, _ = self.split_blocks()
            wide = values.astype(jnp.float32) * scale
            wide = wide if self.input_scale is None else wide * self.input_scale
            wide = self._drop_padding(wide) if self.input_order is None else self._restore_order(wide)
        # XLA could drop a plain conversion if the matmul computes in float32.
        is_half = dtype in (np.dtype("float16"), np.dtype("bfloat16"))
        return round_to_half(wide, dtype) if is_half else wide.astype(dtype)

    def _restore_order(self, blocks: jax.Array) -> jax.Array:
        """Returns `(*stack, blocks, block, *channels)` in the order of inputs, in the shape of the weight."""
        order: Any = self.input_order
        axis = blocks.ndim - 2 - self.layout.channels
        length = blocks.shape[axis] * blocks.shape[axis + 1]
        if not length == order.shape[-1] == self.layout.length:
            raise ValueError(
                f"{self!r} has an input_order of all {self.layout.length} inputs, and `shard_map` gave each device a "
                "part of these. Split its outputs instead, or none of its axes."
            )
        rows = jnp.take_along_axis(blocks.reshape(*blocks.shape[:axis], length, -1), order[..., None], axis=-2)
        return rows.reshape(self.shape)

    def split_blocks(self) -> Quantized:
        """Returns values and scales in blocks of inputs: of `Int4` (int8, without zero points), `NF4` or `E4M3`.

        Their shapes are `(*stack, blocks, block, *channels)` and `(*stack, blocks, 1, *channels)`. A partial block of
        `E4M3` is padded with zeros.
        """
        axis, format = -1 - self.layout.channels, self.format
        if isinstance(format, E4M3):
            stack, (inputs, outputs), channels = self._split_shape()
            block = inputs if format.block_size == PER_CHANNEL else format.block_size
            values = pad_axes(self.values.reshape(*stack, inputs, outputs), (len(stack),), block)
            scale = self.scale
            if format.block_size != PER_CHANNEL:
                scale = spread_over_axis(scale, -1, block, outputs)
            blocks = (*stack, values.shape[-2] // block)
            return Quantized(values.reshape(*blocks, block, *channels), scale.reshape(*blocks, 1, *channels))
        length = block_length(self.layout, format)  # type: ignore[arg-type]
        values = lax.slice_in_dim(unpack(self.values, axis, jnp.uint4), 0, length, axis=axis)
        if self.zero_point is None:
            return Quantized(read_normal(values), self.scale)
        return Quantized(values.astype(jnp.int8) - self.zero_point.astype(jnp.int8), self.scale)

    def _drop_padding(self, wide: jax.Array) -> jax.Array:
        """Reshapes whole blocks of inputs to the shape of the weight."""
        stack, (inputs, outputs), _ = self._split_shape()
        if wide.size != self.size:
            wide = lax.slice_in_dim(wide.reshape(*stack, -1, outputs), 0, inputs, axis=len(stack))
        return wide.reshape(self.shape)

    def _split_shape(self) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, ...]]:
        """Returns the axes of the stack, the numbers of inputs and outputs, and the axes of the channels."""
        shape, end = self.shape, self.ndim - self.layout.channels
        first = end - len(self.layout.contracted)
        return shape[:first], (math.prod(shape[first:end]), math.prod(shape[end:])), shape[end:]

    def _spread_scale(self) -> jax.Array:
        """Returns the scale of `Int8` or `E4M3`, broadcastable to the values."""
        if isinstance(self.format, Int8) or self.format.block_size == PER_CHANNEL:
            return self.scale
        _, (inputs, outputs), _ = self._split_shape()
        # Outputs first: XLA for TPUs fuses the larger of both repetitions into the matmul if it is along the inputs.
        spread = spread_over_axis(self.scale, -1, self.format.block_size, outputs)
        return spread_over_axis(spread, -2, self.format.block_size, inputs).reshape(self.values.shape)

    def read_blocks(self) -> Blocks:
        """Returns the values and scales of a block format as matrices `(*stack, inputs, outputs)`."""
        axis = self.values.ndim - 2 - self.layout.channels
        packed = isinstance(self.values, jax.Array) and self.values.dtype == jnp.uint8
        values = unpack(self.values, axis + 1, jnp.float4_e2m1fn) if packed else self.values
        shape = (*values.shape[:axis], values.shape[axis] * values.shape[axis + 1], -1)
        scale = self.scale.reshape(*shape[:-2], self.scale.shape[axis], -1)
        tensor_scale = None if self.tensor_scale is None else self.tensor_scale[..., None, None]
        return Blocks(values.reshape(shape), scale, tensor_scale)

    def shard(self, sharding: NamedSharding) -> "QuantizedArray":
        """Places values by the sharding of the weight, and each scale beside its values.

        For block formats, the entry of the first summed axis applies to the blocks. Each device has all scales of
        squares.
        """
        spec = (*sharding.spec, *[None] * (self.ndim - len(sharding.spec)))
        if not isinstance(self.format, Int8 | E4M3):
            first = self.ndim - self.layout.channels - len(self.layout.contracted)
            spec = (*spec[: first + 1], None, *spec[self.ndim - self.layout.channels :])
        is_in_squares = isinstance(self.format, E4M3) and self.format.block_size != PER_CHANNEL

        def place(leaf: jax.Array) -> jax.Array:
            is_whole = is_in_squares and leaf is self.scale
            fits = [n for n in range(leaf.ndim) if leaf.shape[n] > 1 and not is_whole]
            here = PartitionSpec(*[spec[n] if n in fits else None for n in range(leaf.ndim)])
            return jax.device_put(leaf, NamedSharding(sharding.mesh, here))

        return jax.tree.map(place, self)

    def __getattr__(self, name: str) -> Any:
        amiss = f"A quantized weight has no attribute {name!r}; the array of its dequantize() may have it."
        if name.startswith("__") or name in self.__dataclass_fields__:  # Python asks for these, even before __init__
            raise AttributeError(amiss)
        raise MisreadAttribute(self, amiss)

    def __getitem__(self, index: Any) -> Any:
        amiss = "A quantized weight cannot be indexed; the array of its dequantize() can."
        if index is Ellipsis:  # nnx Variables read themselves like this
            amiss += (
                " A float model of nnx has no place for it; restore its state into a quantized one: "
                f"nnx.update(quant.quantize(model, '{self.format}_from_mixed_bfloat16'), state)."
            )
        raise MisreadType(self, amiss)

    def __jax_array__(self) -> Any:
        raise MisreadType(
            self,
            f"{self!r} is quantized, and was read by a layer or code that computes with floats. Give the model the "
            "policy it was quantized with: with_policy(model, policy); in your own code, call its dequantize().",
        )

    def __float__(self) -> float:
        raise MisreadType(
            self,
            f"{self!r} is not one number. A table of parameters can leave its statistics out, as "
            "clu.parameter_overview.get_parameter_overview(params, include_stats=False); or pass it dequantize().",
        )

    def __repr__(self) -> str:
        try:
            shape = self.shape
        except (AttributeError, TypeError, IndexError, ValueError):  # JAX rebuilds pytrees with arbitrary leaves
            shape = "?"
        return f"QuantizedArray({self.format}, shape={shape}, dtype={self.dtype})"


# Fields that are arrays or None, in the order of the leaves.
ARRAYS = ("values", "scale", "zero_point", "input_clip", "tensor_scale", "input_scale", "input_order")
_ALWAYS = 5  # the first five are in the tree even if they are None


def is_quantized(node: Any) -> TypeGuard[QuantizedArray]:
    return isinstance(node, QuantizedArray)


def quantize_array(
    array: Any,
    quantization: Quantization | str,
    layout: Layout | None = None,
    *,
    clip: Clip = "absmax",
    input_clip: ArrayLike | None = None,
    where: str = "",
) -> QuantizedArray:
    """Quantizes one weight.

    Args:
      array: a non-empty real floating array of at least one axis; a `jax.ShapeDtypeStruct` gives an abstract result.
      quantization: `Int8`, `Int4`, `E4M3`, `NF4`, `MXFP8`, `MXFP4`, `NVFP4`, or their string.
      layout: the axes that are summed over; by default all but the last (of a vector, its only one).
      clip: how the range of integers is chosen: `"absmax"` is the full range; a percentile in (0, 100] of the
        magnitudes, or `"mse"` (least mean square error), clips values outside the range. Formats of floats support
        `"absmax"` only.
      input_clip: a magnitude to clip the inputs of the layer to, if the format quantizes inputs to integers.
      where: the place of the weight, for error messages.

    Raises:
      TypeError: `array` is not a floating array, or has no axes or elements.
      ValueError: it is quantized already, `quantization` or `clip` is not valid, or
        `act_scale="static"` has no `input_clip`. For a `jax.ShapeDtypeStruct` it needs none.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.quant.quantize_array(jnp.ones((256, 8)), "int4").scale.shape
    (2, 1, 8)
    """
    format = stored_format_of(parse_quantization(quantization))
    if format is None:
        given = None if quantization is None else str(quantization)
        raise ValueError(
            f"quantize_array needs a format that stores weights, got {given!r}. For example: quantize_array(w, 'int8')."
        )
    _check_quantizable(array, where)
    if isinstance(format, Int8) and format.act_scale == "static" and input_clip is None:
        if not isinstance(array, jax.ShapeDtypeStruct):
            raise UncalibratedError(format, where)
        input_clip = 0.0  # its value does not matter
    if isinstance(array, jax.ShapeDtypeStruct):
        options: dict[str, Any] = {"clip": clip, "input_clip": input_clip, "where": where}
        return jax.eval_shape(lambda array: quantize_array(array, format, layout, **options), array)
    array = jnp.asarray(array)
    layout = layout or (Layout(array.shape[:-1], 1) if array.ndim > 1 else Layout(array.shape, 0))
    if not isinstance(format, Int8 | Int4) and check_clip(clip) != "absmax":
        raise ValueError(
            f"clip={clip!r} is for integers, and {str(format)!r} scales each block of the weight{where} by its "
            "largest element. Leave clip out; where a map has integers too, quantize those first, with a map of "
            "their rules alone, and the rest afterwards."
        )
    clips = None  # one per weight of a stack, to be sliced with it
    if input_clip is not None and format.activations and isinstance(format, Int8 | Int4):
        clips = jnp.full(stack_shape(array.shape, layout), input_clip, jnp.float32)
    if isinstance(format, E4M3):
        return _quantize_e4m3(array, layout, format)
    if not isinstance(format, Int8):
        return dataclasses.replace(_quantize_in_blocks(array, layout, format, clip), input_clip=clips)
    made = quantize_symmetric(array, choose_peak(array, layout.axes, clip))
    return QuantizedArray(*made, clips, format, layout, np.dtype(array.dtype))


class UncalibratedError(ValueError):
    """Raised for a static scale of inputs that were not calibrated."""

    def __init__(self, format: Int8, where: str):
        super().__init__(
            f"{str(format)!r} scales the inputs of a layer by a calibrated magnitude, and the weight{where} has none. "
            "For example: quantize(variables, policy, input_clips=calibrate(model, batches, variables=variables)). "
            "calibrate leaves out layers that no batch reaches: give those another policy by a rule of a PolicyMap, or "
            "a magnitude of your own: input_clips={..., 'path': 6.0}."
        )


def _check_quantizable(array: Any, where: str) -> None:
    if isinstance(array, QuantizedArray):
        raise ValueError(f"The weight{where} is quantized already: {array!r}. Quantize the array of its dequantize().")
    if not is_floating(array) or array.ndim == 0 or array.size == 0:
        got = f"{array.dtype}{list(array.shape)}" if is_array(array) else repr(array)
        raise TypeError(
            f"Only floating arrays with axes and elements are quantized, got {got}{where}. "
            "For example: jnp.ones((8, 8))."
        )


def _quantize_e4m3(array: jax.Array, layout: Layout, format: E4M3) -> QuantizedArray:
    if format.block_size == PER_CHANNEL:
        made = quantize_e4m3(array, measure_amax(array, layout.axes))
    else:
        stack = array.shape[: array.ndim - layout.channels - len(layout.contracted)]
        values, scale, _ = quantize_squares(array.reshape(*stack, layout.length, -1), format.block_size)
        made = Quantized(values.reshape(array.shape), scale)
    return QuantizedArray(*made, None, format, layout, np.dtype(array.dtype))


def _quantize_in_blocks(array: jax.Array, layout: Layout, format: BlockedFormat, clip: Clip) -> QuantizedArray:
    block, count = block_length(layout, format), count_blocks(layout, format)
    stack = array.shape[: array.ndim - layout.channels - len(layout.contracted)]
    channels = array.shape[array.ndim - layout.channels :]
    shape, axis = (*stack, count, block, *channels), len(stack) + 1
    dtype = np.dtype(array.dtype)
    if count * block != layout.length:
        array = pad_axes(array.reshape(*stack, layout.length, *channels), (len(stack),), block)
    zero_point = tensor_scale = None
    if isinstance(format, Int4):
        blocks = array.reshape(shape)
        values, scale, zero_point = quantize_asymmetric(blocks, *choose_bounds(blocks, (axis,), clip))
        values = values.astype(jnp.uint4)
    elif isinstance(format, NF4):
        blocks = array.reshape(shape)
        values, scale, _ = quantize_normal(blocks, measure_amax(blocks, (axis,)))
        values = values.astype(jnp.uint4)
    else:
        matrices = array.reshape(*stack, count * block, math.prod(channels))
        values, scale, tensor_scale = round_operand(matrices, None, format, -2, "weight")
        values, scale = values.reshape(shape), scale.reshape(*shape[:axis], 1, *channels)
        tensor_scale = None if tensor_scale is None else tensor_scale.reshape(stack)
    values = values if format.bits == 8 else pack(values, axis)
    return QuantizedArray(values, scale, zero_point, None, format, layout, dtype, tensor_scale)


class Misread(Exception):
    """Raised when code that cannot handle a quantized weight reads it."""

    def __init__(self, weight: Any, amiss: str):
        super().__init__(f"{amiss} {_suggest_rule('the weight', 'path/of/its/module')}")
        self.weight = weight
        self._amiss = amiss

    def name_weight(self, module: str, name: str) -> None:
        path = f"{module}/{name}" if module else name
        self.args = (f"{self._amiss} {_suggest_rule(repr(path), module)}",)


class MisreadType(Misread, TypeError):
    """`Misread` by an operation."""


class MisreadAttribute(Misread, AttributeError):
    """`Misread` by an attribute."""


def _suggest_rule(named: str, module: str) -> str:
    # Not by the weight's format: a table under 'int4/32' is stored in int8.
    return (
        f"Or leave {named} out by a rule beside the policy that quantizes it. "
        f"For example: PolicyMap({{{module!r}: 'mixed_bfloat16'}}, policy)."
    )


def register_weights_with_flax() -> None:
    """Registers quantized weights with `flax.serialization` if it is loaded. Called where weights may meet Flax."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None and not serialization.is_serializable(QuantizedArray):
        serialization.register_serialization_state(QuantizedArray, list_arrays, _restore_weight)


def list_arrays(weight: QuantizedArray) -> dict[str, Any]:
    return {name: array for name in ARRAYS if (array := getattr(weight, name)) is not None}


def _restore_weight(target: QuantizedArray, state: Any) -> QuantizedArray:
    """Restores the arrays; format and layout come from the target. Raises if shapes or dtypes differ."""
    is_weight = isinstance(state, dict) and "values" in state
    # These belong to the saved values, and the target may be of `quantize`, which makes none.
    own = {name: state.get(name) if is_weight else None for name in ARRAYS[_ALWAYS:]}
    wanted = describe_arrays(list_arrays(dataclasses.replace(target, **own)))
    found = describe_arrays(state) if is_weight else None
    if found != wanted:
        saved = f"a weight that is not quantized: {_describe_array(state)}" if found is None else f"{found}"
        from flax import serialization

        path = serialization.current_path().removeprefix("./")
        raise ValueError(
            f"The target at {path!r} is {target!r}, of the arrays {wanted}; the checkpoint has {saved}. Quantize the "
            "target with the policy of the checkpoint, or restore into an unquantized target and quantize that."
        )
    return dataclasses.replace(target, **own | {name: jnp.asarray(x) for name, x in state.items()})


def describe_arrays(arrays: dict[str, Any]) -> dict[str, str]:
    return {name: _describe_array(array) for name, array in sorted(arrays.items())}


def _describe_array(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__


register_weights_with_flax()  # Flax may have been loaded before


def _write_static(static: tuple[Any, ...]) -> bytes:
    format, layout, dtype = static
    return json.dumps([str(format), layout.contracted, layout.channels, dtype.name]).encode()


def _read_static(written: bytes) -> tuple[Any, ...]:
    format, contracted, channels, dtype = json.loads(written)
    return parse_quantization(format), Layout(tuple(contracted), channels), np.dtype(dtype)


# For `jax.export.Exported.serialize`; both processes must have imported this package.
export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="jmp_policy.QuantizedArray",
    serialize_auxdata=_write_static,
    deserialize_auxdata=_read_static,
)
