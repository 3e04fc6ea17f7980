"""Quantized weights of a checkpoint as matrices, and the way from and to the arrays of a `QuantizedArray`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..policy import E4M3, MXFP4, NF4, NVFP4, Int4, Int8, StoredFormat
from ..quant import ARRAYS, Layout, QuantizedArray, quantize_array, stack_shape

PER_WORD = 8  # 4-bit values in an int32


class Header(NamedTuple):
    """Shape and dtype of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Unreadable(Exception):
    """Raised if tensors do not have the shapes, dtypes or values of their layout; the message describes them."""


class Matrix(NamedTuple):
    """Quantized weight between two layouts, one byte per value."""

    values: np.ndarray  # (*stack, inputs, outputs): int8, or uint8 from 0 to 15; e2m1 as their bits
    scale: np.ndarray  # (*stack, groups, outputs); e8m0 for e2m1
    zero_point: np.ndarray | None = None  # like scale
    order: np.ndarray | None = None  # (*stack, inputs): the place of each input among the values
    dtype: np.dtype = np.dtype(np.float32)  # of the weight that they stand for


class Facts(NamedTuple):
    """Facts about a weight in headers."""

    kind: str  # of the format
    shape: tuple[int, ...]  # (*stack, inputs, outputs)
    groups: int
    square: int = 0  # of float8: the size of squares, or -1 for a scale per output

    @property
    def format(self) -> StoredFormat:
        """The format that stores such weights, of any size."""
        if self.kind == "int8":
            return Int8(min_size=0)
        if self.kind == "e4m3":
            return E4M3(block_size=self.square, min_size=0)
        block = self.shape[-2] // self.groups
        if self.kind == "nf4":
            return NF4(block_size=block, min_size=0)
        return MXFP4(block_size=block, min_size=0) if self.kind == "mxfp4" else Int4(block_size=block, min_size=0)


Headers = Mapping[str, Header]  # by the suffix of a tensor
Tensors = Mapping[str, np.ndarray]
ReadTensor = Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """Layout of the tensors of one weight. Their names are a stem and a suffix each.

    Attributes:
      name: the `quant_method` of it.
      suffixes: the ends of names; the first is of the values.
      optional: the ends that may be missing.
      ending: the end of the name of the weight in a checkpoint without quantization, after the stem.
      outputs: by suffix, of each tensor with outputs: their axis, counted from the end, and how many share an element.
      measure: checks headers; it may read small tensors, such as the order of inputs.
      read: makes a matrix.
      write: makes the tensors of a matrix; the dtype is of scales that are stored as floats.
    """

    name: str
    suffixes: tuple[str, ...]
    optional: tuple[str, ...]
    ending: str
    outputs: Mapping[str, tuple[int, int]]
    measure: Callable[[Headers, ReadTensor], Facts]
    read: Callable[[Tensors], Matrix]
    write: Callable[[Matrix, np.dtype], dict[str, np.ndarray]]


def split_heads(array: np.ndarray, stack: Sequence[int]) -> np.ndarray:
    """Moves the leading outputs of the last axis to the front: `(inputs, heads * n)` becomes `(heads, inputs, n)`."""
    parts = array.reshape(*array.shape[:-1], *stack, -1)
    return np.moveaxis(parts, range(array.ndim - 1, array.ndim - 1 + len(stack)), range(len(stack)))


def find_dimensions(weight: QuantizedArray, depth: int = 0) -> tuple[int, ...]:
    """Returns the shape `(*stack, inputs, outputs)` of a weight, without its first `depth` axes."""
    stack = stack_shape(weight.shape, weight.layout)
    outputs = math.prod(weight.shape) // math.prod((*stack, weight.layout.length))
    return (*stack, weight.layout.length, outputs)[depth:]


_CHUNK = 1 << 22  # values that are repacked or rounded at a time
_SQUARE = 128  # outputs that share a scale in the squares of `E4M3`


def read_arrays(layout: TensorLayout, tensors: Tensors, facts: Facts, like: QuantizedArray, depth: int) -> Tensors:
    """Returns the arrays of a weight like `like`, by name, without the first `depth` axes of its stack.

    Some outputs are repacked at a time, so that little memory is needed beside the result.
    """
    *_, inputs, outputs = facts.shape
    if isinstance(like.format, E4M3):  # only the order of axes changes
        matrix = layout.read(tensors)
        return {name: _shape_float8(getattr(matrix, name), getattr(like, name), depth) for name in ("values", "scale")}
    step = max(_CHUNK // math.prod(facts.shape[:-1]) // PER_WORD, 1) * PER_WORD if layout.outputs else outputs
    made: dict[str, np.ndarray] = {}
    order = None
    for start in range(0, outputs, step):
        matrix = layout.read(_slice_outputs(layout, tensors, start, start + step, inputs))
        order = matrix.order
        for name, array in _arrange_outputs(matrix, like).items():
            whole = made.setdefault(name, np.empty((*array.shape[:-1], outputs), array.dtype))
            whole[..., start : start + step] = array
    return _shape_arrays(made, order, like, depth)


def _shape_float8(array: np.ndarray, like: Any, depth: int) -> np.ndarray:
    return array.reshape(like.shape[depth:])


def _slice_outputs(layout: TensorLayout, tensors: Tensors, start: int, end: int, inputs: int) -> Tensors:
    sliced = dict(tensors)
    for suffix, (axis, per_word) in layout.outputs.items():
        if suffix in tensors:
            part = slice(start // per_word, -(-end // per_word))
            sliced[suffix] = tensors[suffix][(..., part, *[slice(None)] * (-1 - axis))]
    if "_shape" in tensors:  # the number of outputs tells where packed zero points end
        sliced["_shape"] = np.array([*tensors["_shape"][:-2], *sliced["_packed"].shape[-2:-1], inputs])
    return sliced


def _arrange_outputs(matrix: Matrix, like: QuantizedArray) -> dict[str, np.ndarray]:
    """Returns the arrays of some outputs, `(*stack, blocks, bytes of a block or 1, outputs)`."""
    values = matrix.values
    blocks = values.reshape(*values.shape[:-2], matrix.scale.shape[-2], -1, values.shape[-1])
    if not isinstance(like.format, Int8):
        blocks = _pack_blocks(blocks, in_pairs=isinstance(like.format, MXFP4))
    made = {"values": blocks, "scale": matrix.scale[..., None, :]}
    return made if matrix.zero_point is None else made | {"zero_point": matrix.zero_point[..., None, :]}


def _shape_arrays(made: Tensors, order: np.ndarray | None, like: QuantizedArray, depth: int) -> dict[str, np.ndarray]:
    stack = find_dimensions(like, depth)[:-2]
    if stack and made["scale"].ndim == 3:  # of a matrix
        made = {name: split_heads(array, stack) for name, array in made.items()}
        order = None if order is None else np.broadcast_to(order, (*stack, *order.shape))
    if not like.layout.channels:  # the rows of a table come first
        made = {name: np.moveaxis(array, -1, -3) for name, array in made.items()}
    shaped = {name: array.reshape(getattr(like, name).shape[depth:]) for name, array in made.items()}
    return shaped if order is None else shaped | {"input_order": order}


def quantize_tensor(array: np.ndarray, like: QuantizedArray, depth: int) -> Tensors:
    """Returns the arrays of a floating tensor in the format of `like`, by name, without the first `depth` axes.

    Some outputs are rounded at a time, so that little memory is needed beside the result.
    """
    is_table = not like.layout.channels
    array = array.reshape((-1, like.layout.length) if is_table else find_dimensions(like, depth))
    axis = 0 if is_table else -1
    outputs = array.shape[axis]
    step = max(_CHUNK * outputs // array.size // _SQUARE, 1) * _SQUARE
    step = outputs if isinstance(like.format, NVFP4) else step  # all values share a scale
    parts = []
    for start in range(0, outputs, step):
        part = array[start : start + step] if is_table else array[..., start : start + step]
        made = _quantize(part, format=like.format, is_table=is_table, dtype=like.dtype)
        parts.append({name: np.asarray(one) for name in ARRAYS if (one := getattr(made, name)) is not None})
    whole = {
        name: np.concatenate([one[name] for one in parts], axis) if parts[1:] else one for name, one in parts[0].items()
    }
    return {name: one.reshape(getattr(like, name).shape[depth:]) for name, one in whole.items()}


@functools.partial(jax.jit, static_argnames=("format", "is_table", "dtype"))  # at once, without a copy in float32
def _quantize(array: jax.Array, *, format: StoredFormat, is_table: bool, dtype: np.dtype) -> QuantizedArray:
    layout = Layout(array.shape[-1:], 0) if is_table else Layout(array.shape[-2:-1], 1)
    return quantize_array(array.astype(dtype), format, layout)


def take_apart(weight: QuantizedArray) -> Matrix:
    """Inverse of `arrange`, for a weight of NumPy arrays."""
    *stack, inputs, outputs = find_dimensions(weight)
    if isinstance(weight.format, E4M3):
        values, scale = (np.asarray(array) for array in (weight.values, weight.scale))
        per_output = (*stack, 1, outputs)
        shape = per_output if weight.format.block_size == -1 else scale.shape
        return Matrix(values.reshape(*stack, inputs, outputs), scale.reshape(shape))
    is_table = not weight.layout.channels

    def split(array: Any, groups: int) -> np.ndarray:
        array = np.asarray(array)
        if is_table:
            return np.moveaxis(array.reshape(*stack, outputs, groups, -1), -3, -1)
        return array.reshape(*stack, groups, -1, outputs)

    groups = np.asarray(weight.scale).size // math.prod((*stack, outputs))
    blocks = split(weight.values, groups)
    if not isinstance(weight.format, Int8):
        blocks = _unpack_blocks(blocks, isinstance(weight.format, MXFP4))[..., : inputs // groups, :]
    scale, zero_point = (
        None if array is None else split(array, groups)[..., 0, :] for array in (weight.scale, weight.zero_point)
    )
    assert scale is not None
    order = None if weight.input_order is None else np.asarray(weight.input_order)
    return Matrix(blocks.reshape(*stack, inputs, outputs), scale, zero_point, order, weight.dtype)


def _pack_blocks(blocks: np.ndarray, in_pairs: bool) -> np.ndarray:
    """Packs axis -2 of 4-bit values as `QuantizedArray.values` does: neighbors in a byte, or both halves of a block."""
    if blocks.shape[-2] % 2:
        blocks = np.concatenate([blocks, np.zeros_like(blocks[..., :1, :])], -2)
    half = blocks.shape[-2] // 2
    low, high = (blocks[..., ::2, :], blocks[..., 1::2, :]) if in_pairs else np.split(blocks, [half], -2)
    return low | high << 4


def _unpack_blocks(packed: np.ndarray, in_pairs: bool) -> np.ndarray:
    low, high = packed & 15, packed >> 4
    if not in_pairs:
        return np.concatenate([low, high], -2)
    return np.stack([low, high], -2).reshape(*packed.shape[:-2], -1, packed.shape[-1])
