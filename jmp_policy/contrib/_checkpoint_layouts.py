"""Layouts in which other libraries store quantized weights.

Nothing is rounded here: integers, scales and zero points are moved and repacked, bit for bit, in NumPy.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..quant import NORMAL_FLOAT
from ._checkpoint_arrays import PER_WORD, Facts, Header, Headers, Matrix, ReadTensor, TensorLayout, Tensors, Unreadable

INT8, UINT8, INT32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)
FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_SYMMETRIC = 8  # the zero point of signed 4-bit integers that are stored with an offset

# Nibble i of a word holds column [0, 2, 4, 6, 1, 3, 5, 7][i] of eight. Source: AutoAWQ's `WQLinear_GEMM`.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_PLACES = tuple(np.argsort(_AWQ_ORDER))  # the nibble of each column


def _require_tensor(header: Header, dtypes: Sequence[np.dtype], shape: tuple[int, ...], suffix: str) -> None:
    if header.dtype not in dtypes or header.shape != shape:
        wanted = " or ".join(map(str, dtypes))
        raise Unreadable(f"its {suffix.lstrip('._') or 'tensor'} is {header}, and the layout has {wanted}{list(shape)}")


def _require_axes(header: Header, suffix: str, axes: int, *, more: bool = False) -> None:
    if len(header.shape) < axes or (len(header.shape) > axes and not more):
        raise Unreadable(f"its {suffix.lstrip('._') or 'tensor'} is {header}, and the layout has {axes} axes")


def _count_groups(inputs: int, groups: int) -> int:
    if not groups or inputs % groups:
        raise Unreadable(f"its {groups} groups of scales do not divide its {inputs} inputs")
    return groups


def _check_order(g_idx: np.ndarray, inputs: int, groups: int) -> None:
    is_known = g_idx.min(initial=0) >= 0 and g_idx.max(initial=0) < groups
    if not is_known or (np.bincount(g_idx, minlength=groups) != inputs // groups).any():
        raise Unreadable(f"its g_idx does not give each of the {groups} groups {inputs // groups} inputs")


def _unpack_words(words: np.ndarray) -> np.ndarray:
    """Unpacks int32 `(..., n)` to uint8 `(..., 8 * n)`, the lowest bits first."""
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return np.stack([octets & 15, octets >> 4], -1).reshape(*words.shape[:-1], PER_WORD * words.shape[-1])


def _pack_words(numbers: np.ndarray) -> np.ndarray:
    """Inverse of `_unpack_words`. A last axis of any other length is padded with zeros."""
    missing = -numbers.shape[-1] % PER_WORD
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, missing)]) if missing else numbers
    return np.ascontiguousarray(numbers[..., ::2] | numbers[..., 1::2] << 4).view("<i4").astype(INT32)


def _swap(array: np.ndarray) -> np.ndarray:
    return np.swapaxes(array, -1, -2)


def _read_order(g_idx: np.ndarray | None, groups: int) -> np.ndarray | None:
    """Returns the place of each input if inputs are sorted by their group; `None` if they are sorted already."""
    if g_idx is None or (np.diff(g_idx) >= 0).all():
        return None
    order = np.empty(g_idx.shape, INT32)
    order[np.argsort(g_idx, kind="stable")] = np.arange(g_idx.size, dtype=INT32)
    return order


def _sort_inputs(values: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    return values if order is None else values[..., np.argsort(order), :]


def _unsort_inputs(matrix: Matrix) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values in the order of inputs, and the group of each input."""
    inputs, groups = matrix.values.shape[-2], matrix.scale.shape[-2]
    places = np.arange(inputs, dtype=INT32) if matrix.order is None else matrix.order
    return matrix.values[..., places, :], (places // (inputs // groups)).astype(INT32)


# GPTQ: qweight (inputs / 8, outputs), qzeros (groups, outputs / 8), scales (groups, outputs), g_idx (inputs,).
# Version 1 subtracts one from each zero point after packing, so that a 0 borrows from its neighbor; "gptq_v2" does not.
# Source: GPTQModel's `pack_original` and `convert_gptq_v2_to_v1_format_module`.

_ONES = 0x11111111  # in each of eight zero points


def _measure_gptq(headers: Headers, read: ReadTensor) -> Facts:
    _require_axes(headers[".qweight"], ".qweight", 2)
    _require_axes(headers[".scales"], ".scales", 2)
    words, outputs = headers[".qweight"].shape
    inputs, groups = words * PER_WORD, headers[".scales"].shape[0]
    _require_tensor(headers[".qweight"], [INT32], (words, outputs), ".qweight")
    _require_tensor(headers[".scales"], FLOATS, (_count_groups(inputs, groups), outputs), ".scales")
    _require_tensor(headers[".qzeros"], [INT32], (groups, outputs // PER_WORD), ".qzeros")
    if ".g_idx" in headers:
        _require_tensor(headers[".g_idx"], [INT32], (inputs,), ".g_idx")
        _check_order(read(".g_idx"), inputs, groups)
    return Facts("int4", (inputs, outputs), groups)


def _read_gptq(tensors: Tensors, shift: int) -> Matrix:
    scale = tensors[".scales"].astype(np.float32)
    order = _read_order(tensors.get(".g_idx"), len(scale))
    values = _sort_inputs(_swap(_unpack_words(_swap(tensors[".qweight"]))), order)
    return Matrix(values, scale, _unpack_words(_add_to_words(tensors[".qzeros"], shift)), order)


def _write_gptq(matrix: Matrix, dtype: np.dtype, shift: int) -> dict[str, np.ndarray]:
    assert matrix.zero_point is not None
    _check_words(matrix, -2, -1)
    _check_zero_point(matrix.zero_point)
    values, g_idx = _unsort_inputs(matrix)
    qweight, qzeros = _swap(_pack_words(_swap(values))), _add_to_words(_pack_words(matrix.zero_point), -shift)
    return {".qweight": qweight, ".qzeros": qzeros, ".scales": matrix.scale.astype(dtype), ".g_idx": g_idx}


def _add_to_words(words: np.ndarray, number: int) -> np.ndarray:
    return (words.view(np.uint32) + np.uint32(number % 2**32)).view(INT32)


def _check_words(matrix: Matrix, *axes: int) -> None:
    for axis in axes:
        length = matrix.values.shape[axis]
        if length % PER_WORD:
            raise Unreadable(f"its {length} {'outputs' if axis == -1 else 'inputs'} are not a multiple of 8")
    if matrix.values.ndim != 2:
        raise Unreadable(f"it is a stack of {matrix.values.ndim - 2} axes; write each by a '*' in its name")


# AWQ: qweight (inputs, outputs / 8), qzeros (groups, outputs / 8), scales (groups, outputs).


def _measure_awq(headers: Headers, read: ReadTensor) -> Facts:
    _require_axes(headers[".qweight"], ".qweight", 2)
    _require_axes(headers[".scales"], ".scales", 2)
    inputs, words = headers[".qweight"].shape
    groups, outputs = headers[".scales"].shape[0], words * PER_WORD
    _require_tensor(headers[".qweight"], [INT32], (inputs, words), ".qweight")
    _require_tensor(headers[".scales"], FLOATS, (_count_groups(inputs, groups), outputs), ".scales")
    _require_tensor(headers[".qzeros"], [INT32], (groups, words), ".qzeros")
    return Facts("int4", (inputs, outputs), groups)


def _permute_words(numbers: np.ndarray, places: Sequence[int]) -> np.ndarray:
    return numbers.reshape(-1, PER_WORD)[:, places].reshape(numbers.shape)


def _read_awq(tensors: Tensors) -> Matrix:
    values, zero_point = (_permute_words(_unpack_words(tensors[name]), _AWQ_PLACES) for name in (".qweight", ".qzeros"))
    return Matrix(values, tensors[".scales"].astype(np.float32), zero_point)


def _write_awq(matrix: Matrix, dtype: np.dtype) -> dict[str, np.ndarray]:
    assert matrix.zero_point is not None
    _check_words(matrix, -1)
    _reject_order(matrix)
    _check_zero_point(matrix.zero_point)
    qweight, qzeros = (_pack_words(_permute_words(x, _AWQ_ORDER)) for x in (matrix.values, matrix.zero_point))
    return {".qweight": qweight, ".qzeros": qzeros, ".scales": matrix.scale.astype(dtype)}


def _check_zero_point(zero_point: np.ndarray) -> None:
    if zero_point.max() > 15:
        raise Unreadable(f"it has a zero point of {zero_point.max()}, and 4 bits store 0 to 15")


def _reject_order(matrix: Matrix) -> None:
    if matrix.order is not None:
        raise Unreadable("it has an input_order, which this layout cannot store; format='gptq' can")


# compressed-tensors: weights (outputs, inputs). Integers of 4 bits are packed along inputs with an offset of 8, their
# zero points along outputs. Source: compressed-tensors 0.20, `compressors/pack_quantized`.


def _measure_packed(headers: Headers, read: ReadTensor) -> Facts:
    packed, scale = headers["_packed"], headers["_scale"]
    _require_axes(packed, "weight_packed", 2, more=True)
    *stack, outputs, words = packed.shape
    _require_tensor(packed, [INT32], packed.shape, "weight_packed")
    _require_tensor(headers["_shape"], [INT32, np.dtype(np.int64)], (len(packed.shape),), "weight_shape")
    shape = tuple(map(int, read("_shape")))
    inputs, groups = shape[-1], scale.shape[-1] if scale.shape else 0
    if shape[:-1] != packed.shape[:-1] or -(-inputs // PER_WORD) != words:
        raise Unreadable(f"its weight_packed is {packed}, which does not store 4 bits for each of {list(shape)} values")
    _require_tensor(scale, FLOATS, (*stack, outputs, _count_groups(inputs, groups)), "weight_scale")
    if "_zero_point" in headers:
        zeros = (*stack, -(-outputs // PER_WORD), groups)
        _require_tensor(headers["_zero_point"], [INT32], zeros, "weight_zero_point")
    if "_g_idx" in headers:
        _require_tensor(headers["_g_idx"], [INT32], (inputs,), "weight_g_idx")
        _check_order(read("_g_idx"), inputs, groups)
    return Facts("int4", (*stack, inputs, outputs), groups)


def _read_packed(tensors: Tensors) -> Matrix:
    scale = _swap(tensors["_scale"]).astype(np.float32)
    order = _read_order(tensors.get("_g_idx"), scale.shape[-2])
    values = _swap(_unpack_words(tensors["_packed"])[..., : int(tensors["_shape"][-1])])
    if "_zero_point" in tensors:
        zero_point = _unpack_words(_swap(tensors["_zero_point"]))[..., : scale.shape[-1]]
    else:
        zero_point = np.full(scale.shape, _SYMMETRIC, np.uint8)
    return Matrix(_sort_inputs(values, order), scale, zero_point, order)


def _write_packed(matrix: Matrix, dtype: np.dtype) -> dict[str, np.ndarray]:
    assert matrix.zero_point is not None
    _check_zero_point(matrix.zero_point)
    values, g_idx = _unsort_inputs(matrix)
    made = {
        "_packed": _pack_words(_swap(values)),
        "_scale": _swap(matrix.scale).astype(dtype),
        "_shape": np.array(_swap(values).shape, np.int64),
    }
    if not is_symmetric(matrix):
        made["_zero_point"] = _swap(_pack_words(matrix.zero_point))
    return made | ({} if matrix.order is None else {"_g_idx": g_idx})


def is_symmetric(matrix: Matrix) -> bool:
    """True if zero points belong to signed integers, and need not be stored."""
    return matrix.zero_point is None or bool((matrix.zero_point == _SYMMETRIC).all())


def _measure_int8(headers: Headers, read: ReadTensor) -> Facts:
    weight = headers[""]
    _require_axes(weight, "weight", 2, more=True)
    *stack, outputs, inputs = weight.shape
    _require_tensor(headers["_scale"], FLOATS, (*stack, outputs, 1), "weight_scale")
    if "_zero_point" in headers and np.any(read("_zero_point")):
        raise Unreadable("its weight_zero_point is not zero, and int8 weights have no zero points here")
    return Facts("int8", (*stack, inputs, outputs), 1)


def _read_int8(tensors: Tensors) -> Matrix:
    return Matrix(_swap(tensors[""]), _swap(tensors["_scale"]).astype(np.float32))


def _write_int8(matrix: Matrix, dtype: np.dtype) -> dict[str, np.ndarray]:
    return {"": _swap(matrix.values), "_scale": _swap(matrix.scale).astype(dtype)}


# MXFP4 of gpt-oss: blocks (*stack, outputs, groups, 16) with two neighbors to a byte, the first in its low half, and
# scales (*stack, outputs, groups), e8m0. Source: `convert_moe_packed_tensors` of Transformers.


def _measure_mxfp4(headers: Headers, read: ReadTensor) -> Facts:
    blocks = headers["_blocks"]
    _require_axes(blocks, "_blocks", 3, more=True)
    *stack, outputs, groups, size = blocks.shape
    _require_tensor(blocks, [UINT8], blocks.shape, "_blocks")
    _require_tensor(headers["_scales"], [UINT8], (*stack, outputs, groups), "_scales")
    return Facts("mxfp4", (*stack, 2 * groups * size, outputs), groups)


def _read_mxfp4(tensors: Tensors) -> Matrix:
    blocks = tensors["_blocks"]
    pairs = np.stack([blocks & 15, blocks >> 4], -1)
    return Matrix(_swap(pairs.reshape(*blocks.shape[:-2], -1)), _swap(tensors["_scales"]).view(_E8M0))


def _write_mxfp4(matrix: Matrix, dtype: np.dtype) -> dict[str, np.ndarray]:
    values, scales = _swap(matrix.values), _swap(matrix.scale).view(UINT8)
    values = values.reshape(*scales.shape, -1)
    return {"_blocks": values[..., ::2] | values[..., 1::2] << 4, "_scales": scales}


# FP8 of DeepSeek and Qwen: weight (outputs, inputs) in float8_e4m3fn, and a factor for each square of 128 x 128. In
# compressed-tensors, for each output. Source: `weight_dequant` of DeepSeek-V3's inference code.

_SQUARE = 128


def _measure_squares(headers: Headers, read: ReadTensor) -> Facts:
    *stack, outputs, inputs = _check_float8(headers)
    wanted = (*stack, -(-outputs // _SQUARE), -(-inputs // _SQUARE))
    _require_tensor(headers["_scale_inv"], FLOATS, wanted, "weight_scale_inv")
    return Facts("e4m3", (*stack, inputs, outputs), wanted[-1], _SQUARE)


def _measure_float8(headers: Headers, read: ReadTensor) -> Facts:
    *stack, outputs, inputs = _check_float8(headers)
    _require_tensor(headers["_scale"], FLOATS, (*stack, outputs, 1), "weight_scale")
    return Facts("e4m3", (*stack, inputs, outputs), 1, -1)


def _check_float8(headers: Headers) -> tuple[int, ...]:
    _require_axes(headers[""], "weight", 2, more=True)
    return headers[""].shape


def _read_float8(tensors: Tensors) -> Matrix:
    scale = tensors["_scale_inv"] if "_scale_inv" in tensors else tensors["_scale"]
    return Matrix(_swap(tensors[""]), _swap(scale).astype(np.float32))


def _write_float8(matrix: Matrix, dtype: np.dtype, suffix: str) -> dict[str, np.ndarray]:
    # Factors of squares are published as float32 or bfloat16, which the dtype of all scales tells.
    return {"": _swap(matrix.values), suffix: _swap(matrix.scale).astype(dtype)}


def _make_float8(name: str, suffix: str, measure: Callable[[Headers, ReadTensor], Facts]) -> TensorLayout:
    return TensorLayout(
        name=name,
        suffixes=("", suffix),
        optional=(),
        ending="",
        outputs={},
        measure=measure,
        read=_read_float8,
        write=lambda matrix, dtype: _write_float8(matrix, dtype, suffix),
    )


SQUARES = _make_float8("fp8", "_scale_inv", _measure_squares)
PLAIN_FLOAT8 = _make_float8("compressed-tensors", "_scale", _measure_float8)


# nf4 of bitsandbytes: two values to a byte, the first in its high half, in blocks along the inputs of all outputs, one
# after another. Their scales may be quantized themselves. Source: bitsandbytes 0.50, `functional.QuantState`.

_STATE = ".quant_state.bitsandbytes__nf4"
_TABLE = np.array(NORMAL_FLOAT, np.float32)


def _read_state(tensor: np.ndarray) -> dict[str, Any]:
    try:
        return dict(json.loads(tensor.tobytes()))
    except ValueError as error:
        raise Unreadable(f"its quant_state is not JSON: {error}") from None


def _measure_nf4(headers: Headers, read: ReadTensor) -> Facts:
    state = _read_state(read(_STATE))
    shape, block = state.get("shape", ()), state.get("blocksize", 0)
    if len(shape) != 2 or not block or shape[1] % block:
        raise Unreadable(f"its shape is {shape}, and blocks of {block} do not lie along its inputs")
    outputs, inputs = shape
    count = outputs * inputs // block
    _require_tensor(headers[""], [UINT8], (outputs * inputs // 2, 1), "weight")
    _require_tensor(headers[".quant_map"], [_TABLE.dtype], (16,), "quant_map")
    if (read(".quant_map") != _TABLE).any():
        raise Unreadable("its quant_map has other values than nf4")
    if ".nested_absmax" not in headers:
        _require_tensor(headers[".absmax"], [_TABLE.dtype], (count,), "absmax")
        return Facts("nf4", (inputs, outputs), inputs // block)
    _require_tensor(headers[".absmax"], [UINT8], (count,), "absmax")
    _require_tensor(
        headers[".nested_absmax"], [_TABLE.dtype], (-(-count // state["nested_blocksize"]),), "nested_absmax"
    )
    _require_tensor(headers[".nested_quant_map"], [_TABLE.dtype], (256,), "nested_quant_map")
    return Facts("nf4", (inputs, outputs), inputs // block)


def _read_nf4(tensors: Tensors) -> Matrix:
    state, packed, scale = _read_state(tensors[_STATE]), tensors[""], tensors[".absmax"]
    outputs, inputs = state["shape"]
    values = np.stack([packed >> 4, packed & 15], -1).reshape(outputs, inputs)
    if ".nested_absmax" in tensors:
        outer = np.repeat(tensors[".nested_absmax"], state["nested_blocksize"])[: scale.size]
        scale = tensors[".nested_quant_map"][scale] * outer + np.float32(state["nested_offset"])
    return Matrix(_swap(values), _swap(scale.reshape(outputs, -1)))


def _write_nf4(matrix: Matrix, dtype: np.dtype) -> dict[str, np.ndarray]:
    values = _swap(matrix.values)
    if values.ndim != 2 or values.size % 2:
        raise Unreadable(f"its shape is {values.shape}; write each matrix of a stack by a '*' in its name")
    pairs = values.reshape(-1, 2)
    block = values.shape[1] // matrix.scale.shape[-2]
    state = {"quant_type": "nf4", "blocksize": block, "dtype": matrix.dtype.name, "shape": [*values.shape]}
    return {
        "": (pairs[:, :1] << 4) | pairs[:, 1:],
        ".absmax": _swap(matrix.scale).reshape(-1),
        ".quant_map": _TABLE,
        _STATE: np.frombuffer(json.dumps(state).encode(), UINT8),
    }


NORMAL = TensorLayout(
    name="bitsandbytes",
    suffixes=("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _STATE),
    optional=(".nested_absmax", ".nested_quant_map"),
    ending="",
    outputs={},
    measure=_measure_nf4,
    read=_read_nf4,
    write=_write_nf4,
)


def _make_gptq(name: str, shift: int) -> TensorLayout:
    return TensorLayout(
        name=name,
        suffixes=(".qweight", ".qzeros", ".scales", ".g_idx"),
        optional=(".g_idx",),
        ending=".weight",
        outputs={".qweight": (-1, 1), ".qzeros": (-1, PER_WORD), ".scales": (-1, 1)},
        measure=_measure_gptq,
        read=lambda tensors: _read_gptq(tensors, shift),
        write=lambda matrix, dtype: _write_gptq(matrix, dtype, shift),
    )


GPTQ, GPTQ_V2 = _make_gptq("gptq", _ONES), _make_gptq("gptq_v2", 0)
AWQ = TensorLayout(
    name="awq",
    suffixes=(".qweight", ".qzeros", ".scales"),
    optional=(),
    ending=".weight",
    outputs={".qweight": (-1, PER_WORD), ".qzeros": (-1, PER_WORD), ".scales": (-1, 1)},
    measure=_measure_awq,
    read=_read_awq,
    write=_write_awq,
)
PACKED = TensorLayout(
    name="compressed-tensors",
    suffixes=("_packed", "_scale", "_shape", "_zero_point", "_g_idx"),
    optional=("_zero_point", "_g_idx"),
    ending="",
    outputs={"_packed": (-2, 1), "_scale": (-2, 1), "_zero_point": (-2, PER_WORD)},
    measure=_measure_packed,
    read=_read_packed,
    write=_write_packed,
)
PLAIN_INT8 = TensorLayout(
    name="compressed-tensors",
    suffixes=("", "_scale", "_zero_point"),
    optional=("_zero_point",),
    ending="",
    outputs={"": (-2, 1), "_scale": (-2, 1), "_zero_point": (-2, 1)},
    measure=_measure_int8,
    read=_read_int8,
    write=_write_int8,
)
BLOCKS = TensorLayout(
    name="mxfp4",
    suffixes=("_blocks", "_scales"),
    optional=(),
    ending="",
    outputs={"_blocks": (-3, 1), "_scales": (-2, 1)},
    measure=_measure_mxfp4,
    read=_read_mxfp4,
    write=_write_mxfp4,
)


def find_layout(name: str, headers: Headers, is_v2: bool) -> tuple[str, TensorLayout] | None:
    """Returns the stem and the layout of a tensor with the values of a quantized weight, or None for other tensors."""
    if f"{name}{_STATE}" in headers:
        return name, NORMAL
    if name.endswith(".qweight"):
        stem = name.removesuffix(".qweight")
        words, scales = headers[name].shape, headers.get(f"{stem}.scales")
        is_awq = scales is not None and words[-1:] != scales.shape[-1:]
        return stem, AWQ if is_awq and f"{stem}.g_idx" not in headers else GPTQ_V2 if is_v2 else GPTQ
    if name.endswith("weight_packed") or (name.endswith("_packed") and headers[name].dtype == INT32):
        return name.removesuffix("_packed"), PACKED
    if name.endswith("_blocks") and headers[name].dtype == UINT8:
        return name.removesuffix("_blocks"), BLOCKS
    if headers[name].dtype == _FLOAT8:
        kinds = {f"{name}_scale_inv": SQUARES, f"{name}_scale": PLAIN_FLOAT8}
        return next(((name, layout) for scale, layout in kinds.items() if scale in headers), None)
    return (name, PLAIN_INT8) if headers[name].dtype == INT8 and f"{name}_scale" in headers else None
