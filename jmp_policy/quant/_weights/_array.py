"""The array of narrow numbers and scales that stands for a weight, and its serialization."""

import dataclasses
import functools
import math
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ..._base import DTypeLike, Uncast, is_array, is_floating_dtype, parse_dtype, round_to_half
from ..._jaxpr import ROUNDING_SCOPE
from ...policy import BlockFormat, Int4, Int8, Quantization, StoredFormat, parse_quantization, stored_format_of
from .._numbers import (
    Blocks,
    Clip,
    Quantized,
    check_clip,
    choose_bounds,
    choose_peak,
    dequantize,
    pack,
    pack_e2m1,
    quantize_asymmetric,
    quantize_symmetric,
    round_weight,
    unpack,
    unpack_e2m1,
)
from ._layout import Layout, block_length, stack_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedArray(Uncast):
    """A weight in 8 or 4 bits: numbers, the scales that they are multiples of, and the dtype that they stand for.

    A pytree of arrays whose other fields are static; no policy casts it. Made by `quant.quantize` from a model, and by
    `quantize_array` from an array. A stack of weights may be cut along its leading axes, as `scan` and `vmap` do.

    Attributes:
      values: int8 of the weight's shape; or of shape `(*stack, blocks, bytes of a block, *channels)`: uint8, two
        numbers of 4 bits to a byte, or the e4m3 of `MXFP8`.
      scale: float32: of the weight's shape with length 1 where the weight is summed over; or
        `(*stack, blocks, 1, *channels)`: float32, or for formats of blocks e8m0 and for `NVFP4` e4m3.
      zero_point: uint8 of the shape of `scale` for 4 bits, else `None`.
      input_clip: float32, one for each of a stack: the magnitude that calibration chose to clip the layer's inputs to;
        `None` without.
      format: `Int8`, `Int4`, `MXFP8`, `MXFP4` or `NVFP4`.
      layout: which axes are summed over.
      dtype: the dtype that the weight had.
      tensor_scale: float32, one for each of a stack: what `NVFP4` multiplies all scales of blocks with; `None` without.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> w = jmp.quant.quantize_array(jnp.array([[1.0, -4.0], [0.5, 2.0]]), "int8")
    >>> w
    QuantizedArray(int8, shape=(2, 2), dtype=float32)
    >>> jnp.allclose(w.dequantize(), jnp.array([[1.0, -4.0], [0.504, 2.016]]), atol=0.005).item()
    True
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    input_clip: jax.Array | None
    format: StoredFormat = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    tensor_scale: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        if isinstance(self.format, Int8):
            return self.values.shape
        blocks_axis = self.values.ndim - 2 - self.layout.channels
        stack, channels = self.values.shape[:blocks_axis], self.values.shape[blocks_axis + 2 :]
        # Fewer blocks than the layout has are the part of one device in `shard_map`, cut along the first axis.
        first, *others = self.layout.contracted
        whole = self.layout.length // block_length(self.layout, self.format)
        return (*stack, first * self.values.shape[blocks_axis] // whole, *others, *channels)

    @property
    def ndim(self) -> int:
        """The number of axes of the weight."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the weight."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays in it."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding of the values."""
        return self.values.sharding

    @jax.named_scope(ROUNDING_SCOPE)
    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """The weight as an ordinary array.

        Args:
          dtype: the floating dtype to return; `None` for the one the weight had. The product with the scale is
            computed in float32 and rounded once.
        """
        dtype = self.dtype if dtype is None else parse_dtype(dtype)
        if isinstance(self.format, Int8):
            wide = self.values.astype(jnp.float32) * self.scale
        elif isinstance(self.format, BlockFormat):
            wide = dequantize(self.read_blocks(), -2).reshape(self.shape)
        else:
            axis = -1 - self.layout.channels
            length = block_length(self.layout, self.format)
            numbers = unpack(self.values, axis, length).astype(jnp.float32)
            wide = ((numbers - self.zero_point.astype(jnp.float32)) * self.scale).reshape(self.shape)  # type: ignore[union-attr]
        # A mere conversion could be dropped where the product computes in float32: the rounding is part of the number.
        is_half = dtype in (np.dtype("float16"), np.dtype("bfloat16"))
        return round_to_half(wide, dtype) if is_half else wide.astype(dtype)

    def read_blocks(self) -> Blocks:
        """The numbers and scales of a format of blocks, as matrices `(*stack, inputs, outputs)`."""
        axis = self.values.ndim - 2 - self.layout.channels
        packed = isinstance(self.values, jax.Array) and self.values.dtype == jnp.uint8
        values = unpack_e2m1(self.values, axis + 1) if packed else self.values
        shape = (*values.shape[:axis], values.shape[axis] * values.shape[axis + 1], -1)
        scale = self.scale.reshape(*shape[:-2], self.scale.shape[axis], -1)
        tensor_scale = None if self.tensor_scale is None else self.tensor_scale[..., None, None]
        return Blocks(values.reshape(shape), scale, tensor_scale)

    def shard(self, sharding: NamedSharding) -> "QuantizedArray":
        """Puts the weight on devices: the values as told, and the scales beside the values they belong to.

        Args:
          sharding: of the weight, with an axis of the mesh for each of its axes. Where values are in blocks, the first
            of the axes that are summed over stands for the blocks.
        """
        spec = (*sharding.spec, *[None] * (self.ndim - len(sharding.spec)))
        if not isinstance(self.format, Int8):
            first = self.ndim - self.layout.channels - len(self.layout.contracted)
            spec = (*spec[: first + 1], None, *spec[self.ndim - self.layout.channels :])

        def place(leaf: jax.Array) -> jax.Array:
            fits = [n for n in range(leaf.ndim) if leaf.shape[n] > 1]
            here = PartitionSpec(*[spec[n] if n in fits else None for n in range(leaf.ndim)])
            return jax.device_put(leaf, NamedSharding(sharding.mesh, here))

        return jax.tree.map(place, self)

    def __getattr__(self, name: str) -> Any:
        amiss = f"A quantized weight has no attribute {name!r}; what its dequantize() returns may have."
        if name.startswith("__") or name in self.__dataclass_fields__:  # Python asks, of one that is being made too
            raise AttributeError(amiss)
        raise MisreadAttribute(self, amiss)

    def __getitem__(self, index: Any) -> Any:
        amiss = "A quantized weight cannot be indexed; what its dequantize() returns can."
        if index is Ellipsis:  # as the Variables of nnx read themselves
            amiss += (
                " A float model of nnx has no place for it; restore its state into a quantized one: "
                f"nnx.update(quant.quantize(model, '{self.format}_from_mixed_bfloat16'), state)."
            )
        raise MisreadType(self, amiss)

    def __jax_array__(self) -> Any:
        raise MisreadType(
            self,
            f"{self!r} is quantized, and was read by a layer or code that computes with floats. Give the model the "
            f"policy it was quantized with: with_policy(model, '{self.format}_from_mixed_bfloat16'); in code of your "
            "own read its dequantize().",
        )

    def __repr__(self) -> str:
        try:
            shape = self.shape
        except (AttributeError, TypeError, IndexError):  # JAX rebuilds pytrees with anything as leaves
            shape = "?"
        return f"QuantizedArray({self.format}, shape={shape}, dtype={self.dtype})"


ARRAYS = ("values", "scale", "zero_point", "input_clip", "tensor_scale")
"""The fields of a quantized weight that are arrays, some of which may be `None`."""


def is_quantized(node: Any) -> TypeGuard[QuantizedArray]:
    """Whether a node of a tree is a quantized weight, and so a leaf to walks that ask this."""
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
      array: real floating, of one or more axes and elements; an abstract one (`jax.ShapeDtypeStruct`) becomes an
        abstract result.
      quantization: `Int8`, `Int4`, `MXFP8`, `MXFP4`, `NVFP4`, or their string.
      layout: which axes are summed over; all but the last, if `None` (of a vector, its only one).
      clip: how the range of integers is chosen: `"absmax"` takes it whole; a percentile in (0, 100] of the magnitudes,
        and `"mse"`, the range of the least mean square error, clip what is outside. Formats of blocks take it whole.
      input_clip: a number to clip the inputs of the layer to, where the format quantizes these to integers.
      where: what the error message says of the place the weight stands in.

    Raises:
      TypeError: `array` is not a floating array, or has no axes or elements.
      ValueError: blocks do not divide it, or it is quantized already; `quantization` or `clip` is not of its kind, or
        `clip` is of no use to a format of blocks.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.quant.quantize_array(jnp.ones((256, 8)), "int4").scale.shape
    (2, 1, 8)
    >>> w = jmp.quant.quantize_array(jnp.ones((256, 8)), "nvfp4")
    >>> w.values.dtype, w.scale.dtype, w.scale.shape, 8 * w.nbytes / w.size
    (dtype('uint8'), dtype(float8_e4m3fn), (16, 1, 8), 4.515625)
    """
    format = stored_format_of(parse_quantization(quantization))
    if format is None:
        given = None if quantization is None else str(quantization)
        raise ValueError(
            f"quantize_array needs a quantization by which weights are stored, got {given!r}. "
            "For example: quantize_array(w, 'int8')."
        )
    _check_quantizable(array, where)
    if isinstance(array, jax.ShapeDtypeStruct):
        options: dict[str, Any] = {"clip": clip, "input_clip": input_clip, "where": where}
        return jax.eval_shape(lambda array: quantize_array(array, format, layout, **options), array)
    array = jnp.asarray(array)
    layout = layout or _default_layout(array.shape)
    if isinstance(format, BlockFormat):
        _check_takes_all(check_clip(clip), format, where)
        return _quantize_in_blocks(array, layout, format, where)
    if isinstance(format, Int8):
        made = quantize_symmetric(array, choose_peak(array, layout.axes, clip))
    else:
        made = _quantize_blocks(array, layout, format, clip, where)
    input_clip = _repeat_input_clip(array, layout, format, input_clip)
    return QuantizedArray(*made, input_clip, format, layout, np.dtype(array.dtype))


def _check_quantizable(array: Any, where: str) -> None:
    if isinstance(array, QuantizedArray):
        raise ValueError(f"The weight{where} is quantized already: {array!r}. Quantize what its dequantize() returns.")
    if not is_array(array) or not is_floating_dtype(array.dtype) or array.ndim == 0 or array.size == 0:
        got = f"{array.dtype}{list(array.shape)}" if is_array(array) else repr(array)
        raise TypeError(
            f"Only floating arrays with axes and elements are quantized, got {got}{where}. "
            "For example: jnp.ones((8, 8))."
        )


def _check_takes_all(clip: Clip, format: BlockFormat, where: str) -> None:
    """Checks that the range of a weight in blocks is not to be chosen.

    The better one of two powers of two for each block took 3 % off the error of `mxfp4`, and nothing off `mxfp8`'s.
    """
    if clip != "absmax":
        raise ValueError(
            f"clip={clip!r} is for integers, and {str(format)!r} scales each block of the weight{where} by its largest "
            "number. Leave clip out; where a map has integers too, quantize those first, with a map of their rules "
            "alone, and the rest afterwards."
        )


def _repeat_input_clip(
    array: jax.Array, layout: Layout, format: StoredFormat, input_clip: ArrayLike | None
) -> jax.Array | None:
    """Repeats the magnitude to clip inputs to for each weight of a stack, so that both are cut into layers."""
    if input_clip is None or not isinstance(format, Int8) or not format.activations:
        return None
    return jnp.full(stack_shape(array.shape, layout), input_clip, jnp.float32)


def _default_layout(shape: tuple[int, ...]) -> Layout:
    """The layout that sums over all axes but the last; of a vector, over its only one."""
    return Layout(shape[:-1], 1) if len(shape) > 1 else Layout(shape, 0)


def _quantize_blocks(array: jax.Array, layout: Layout, format: Int4, clip: Clip, where: str) -> Quantized:
    block = block_length(layout, format, where)
    stack = array.shape[: array.ndim - layout.channels - len(layout.contracted)]
    channels = array.shape[array.ndim - layout.channels :]
    blocks = array.reshape(*stack, layout.length // block, block, *channels)
    axis = -1 - layout.channels
    low, high = choose_bounds(blocks, (axis,), clip)
    made = quantize_asymmetric(blocks, low, high)
    return made._replace(values=pack(made.values, axis))


def _quantize_in_blocks(array: jax.Array, layout: Layout, format: BlockFormat, where: str) -> QuantizedArray:
    """Quantizes a weight to narrow floating point; its blocks lie along the axes that are summed over."""
    block = block_length(layout, format, where)
    stack = array.shape[: array.ndim - layout.channels - len(layout.contracted)]
    channels = array.shape[array.ndim - layout.channels :]
    made = round_weight(array.reshape(*stack, layout.length, math.prod(channels)), format, -2, block)
    blocks = made.values.reshape(*stack, layout.length // block, block, *channels)
    values = blocks if format.bits == 8 else pack_e2m1(blocks, len(stack) + 1)
    scale = made.scale.reshape(*stack, layout.length // block, 1, *channels)
    tensor_scale = None if made.tensor_scale is None else made.tensor_scale.reshape(stack)
    return QuantizedArray(values, scale, None, None, format, layout, np.dtype(array.dtype), tensor_scale)


class Misread(Exception):
    """A quantized weight was read by code that knows nothing of it.

    Attributes:
      weight: the weight that was read.
    """

    def __init__(self, weight: Any, amiss: str):
        super().__init__(f"{amiss} {_remedy(weight, 'the weight', 'path/of/its/module')}")
        self.weight = weight
        self._amiss = amiss

    def name_weight(self, module: str, name: str) -> None:
        """Says in the message which weight it was.

        Args:
          module: the path of the module that it belongs to.
          name: its own.
        """
        path = f"{module}/{name}" if module else name
        self.args = (f"{self._amiss} {_remedy(self.weight, repr(path), module)}",)


class MisreadType(Misread, TypeError):
    """A `Misread` by an operation."""


class MisreadAttribute(Misread, AttributeError):
    """A `Misread` by the name of an attribute."""


def _remedy(weight: Any, named: str, module: str) -> str:
    return (
        f"Or leave {named} out by a rule of the map that it is quantized by. "
        f"For example: PolicyMap({{{module!r}: 'mixed_bfloat16'}}, '{weight.format}_from_mixed_bfloat16')."
    )


@functools.cache
def register_with_flax() -> None:
    """Registers quantized weights with Flax, once."""
    from flax import serialization

    serialization.register_serialization_state(QuantizedArray, _save_arrays, _restore_arrays)


def _save_arrays(weight: QuantizedArray) -> dict[str, Any]:
    """The arrays that there are; format and layout are not saved, and come from the target again."""
    return {name: array for name in ARRAYS if (array := getattr(weight, name)) is not None}


def _restore_arrays(target: QuantizedArray, state: Any) -> QuantizedArray:
    """The weight that was saved, as the target says; shapes and dtypes tell whether that is what it was.

    Raises:
      ValueError: what was saved is not of the target's format, sizes, or calibration.
    """
    wanted = _shapes(_save_arrays(target))
    found = _shapes(state) if isinstance(state, dict) and "values" in state else None
    if found != wanted:
        what = f"a weight that is not quantized: {_shape(state)}" if found is None else f"{found}"
        from flax import serialization

        path = serialization.current_path().removeprefix("./")
        raise ValueError(
            f"The target at {path!r} is {target!r}, of the arrays {wanted}; what was saved is {what}. Restore "
            "into what it was saved from: quantize the target with the policy of the checkpoint, or quantize what is "
            "restored into an unquantized one."
        )
    return dataclasses.replace(target, **{name: jnp.asarray(array) for name, array in state.items()})


def _shapes(arrays: dict[str, Any]) -> dict[str, str]:
    return {name: _shape(array) for name, array in sorted(arrays.items())}


def _shape(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
