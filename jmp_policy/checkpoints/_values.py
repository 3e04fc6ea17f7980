"""Converts one saved value to its target: casts, quantizes, reshapes, and places it on devices."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh

from .._base import describe, is_array, is_floating
from ..optim import CODES, MomentBlocks, Shape, dequantize_moment, find_role, list_roles, quantize_moment
from ..policy import E4M3, MXFP4, MXFP8, NF4, NVFP4, PER_CHANNEL, Int4, Int8, StoredFormat
from ..quant import ARRAYS, Layout, QuantizedArray, describe_arrays, is_quantized, list_arrays, quantize_array
from ._entries import Entry, Pair, Path


@dataclasses.dataclass(frozen=True)
class Moment(Pair):
    """A moment of an optimizer and the scales that `quantize_state` has for it, with its role."""

    role: str

    @property
    def is_quantized(self) -> bool:
        return self.entry.value.dtype == jnp.uint8

    def decode(self) -> Any:
        if not self.is_quantized:
            return self.entry.value
        blocks = MomentBlocks(jnp.asarray(self.entry.value), jnp.asarray(self.other.value))
        return dequantize_moment(blocks, CODES[self.role], self._sides)

    def encode(self, found: Entry, saved: Any) -> tuple[Any, Any]:
        value, shape = found.value if saved is None else saved.decode(), self.entry.value.shape
        if not self.is_quantized:
            return value, jnp.ones(self.other.value.shape, jnp.float32)
        if isinstance(saved, Moment) and saved.is_quantized and saved.other.value.shape == self.other.value.shape:
            return saved.entry.value, saved.other.value
        if found.value.shape != shape:
            raise Misfit(f"was saved in the shape {found.value.shape}, the target has {shape}")
        return quantize_moment(jnp.asarray(value, jnp.float32), CODES[self.role], self._sides)

    @property
    def _sides(self) -> Shape:
        lengths = zip(self.entry.value.shape, self.other.value.shape, strict=True)
        return tuple(length // max(count, 1) for length, count in lengths)


def find_moment_roles(target: Any, entries: Iterable[Entry]) -> dict[Path, str]:
    """Returns the roles of moments by path, from their classes, or from names if `nnx.state` dropped the classes."""
    roles = list_roles(target, is_leaf=is_quantized)
    found = {entry.path: roles[entry.index] or find_role(entry.path) for entry in entries if not entry.part}
    return {path: role for path, role in found.items() if role is not None}


def pair_scales(entries: Iterable[Entry], roles: Mapping[Path, str]) -> dict[Path, Moment]:
    """Finds the moments that have scales, by their paths."""
    # Scales are `scales/0/w`, `scales/1/w`, ... beside the state of the optimizer, numbered by its fields of moments.
    by_path = {entry.path: entry for entry in entries}
    of_state: dict[Path, dict[Path, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in by_path.values():
        if entry.part == "scales" and entry.path[entry.inside] == "scales":
            of_state[entry.path[: entry.inside]][entry.path[entry.inside + 2 :]].append(entry)
    found = {}
    for state, scales in of_state.items():
        moments: dict[Path | None, list[Path]] = defaultdict(list)
        for path in roles:
            if path[: len(state)] == state:  # the longest end that is a parameter's
                end = next((path[n:] for n in range(len(state), len(path) + 1) if path[n:] in scales), None)
                moments[end].append(path)
        for end, own in scales.items():
            own = sorted(own, key=lambda entry: int(entry.path[entry.inside + 1]))
            if len(own) == len(moments[end]):
                pairs = zip(moments[end], own, strict=True)
                found |= {path: Moment(by_path[path], scale, roles[path]) for path, scale in pairs if path in by_path}
    return found


class Misfit(Exception):
    """Raised if a saved value cannot be converted to the target; the message describes both."""


def convert_value(saved: Any, like: Any) -> Any:
    """Converts a saved value, or dict of arrays of a weight, to the type, shape, dtype and sharding of `like`."""
    if isinstance(saved, QuantizedArray | Mapping):
        _check_stored_scales(saved)
    if isinstance(like, QuantizedArray):
        new = _requantize(saved, like)
        if like.input_clip is None:  # the range of a calibrated model is restored with its weights
            like = dataclasses.replace(like, input_clip=new.input_clip)
        # These belong to the saved values.
        like = dataclasses.replace(like, input_scale=new.input_scale, input_order=new.input_order)
        sizes, wanted = (describe_arrays(list_arrays(weight)) for weight in (new, like))
        if sizes != wanted:
            raise Misfit(f"was saved as {sizes}, the target has {wanted}")
        return jax.tree.map(_place, new, like)
    if isinstance(saved, QuantizedArray | Mapping):
        saved = _dequantize_saved(saved, like)
    if not is_array(like):
        return _convert_number(saved, like)
    return _place(_convert_array(saved, like), like)


def fit_history(saved: Any, like: Any) -> Any:
    """Fits a float8 history to the length of `like`: keeps the newest values, with zeros before the oldest."""
    length = like.shape[-1]  # in the order newest, oldest, ..., second newest
    newest, others = saved[..., :1], saved[..., 1:]
    others = others[..., max(others.shape[-1] - (length - 1), 0) :]
    unknown = np.zeros((*saved.shape[:-1], length - 1 - others.shape[-1]), saved.dtype)
    return jnp.concatenate([newest, unknown, others], -1)


def check_saved_scale(saved: Any) -> None:
    """Raises a `Misfit` if a saved scale is nan, zero, negative or infinite."""
    numbers = _read_elements(saved)
    bad = numbers[~((numbers > 0) & (numbers < np.inf))]
    if bad.size:
        raise Misfit(f"was saved as {bad[0]}, but a scale is a positive finite number, such as 1024.0")


def is_abstract(like: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like))


def _check_stored_scales(saved: Any) -> None:
    """Raises a `Misfit` if a scale of a quantized weight is nan, negative or infinite; a block of zeros has 0."""
    for name in ("scale", "tensor_scale", "input_clip", "input_scale"):
        array = saved.get(name) if isinstance(saved, Mapping) else getattr(saved, name)
        numbers = _read_elements(array)
        bad = numbers[~((numbers >= 0) & (numbers < np.inf))]
        if bad.size:
            article = "an" if name.startswith("i") else "a"
            raise Misfit(f"was saved with {article} {name} of {bad[0]}, which a weight with finite values cannot have")


def _read_elements(saved: Any) -> np.ndarray:
    """Returns the elements of a saved array; none if it is None or this process cannot read them all."""
    is_readable = not isinstance(saved, jax.Array) or (not isinstance(saved, Tracer) and saved.is_fully_addressable)
    is_given = saved is not None and is_readable and not isinstance(saved, jax.ShapeDtypeStruct)
    return np.asarray(saved).astype(np.float32).reshape(-1) if is_given else np.zeros(0, np.float32)


def _requantize(saved: Any, like: QuantizedArray) -> QuantizedArray:
    """Returns a weight in the format of `like`, from saved arrays or quantized from floats."""
    if isinstance(saved, QuantizedArray):
        if (type(saved.format), saved.layout) != (type(like.format), like.layout):
            raise Misfit(f"was saved as {_describe_value(saved)}, the target has {_describe_value(like)}")
        saved = list_arrays(saved)
    if isinstance(saved, Mapping):
        arrays = dict.fromkeys(ARRAYS) | {name: jnp.asarray(array) for name, array in saved.items()}
        return dataclasses.replace(like, **arrays | {"input_clip": _choose_clip(arrays["input_clip"], like)})
    if not is_floating(saved) or saved.shape != like.shape:
        raise Misfit(f"was saved as {_describe_value(saved)}, the target has {_describe_value(like)}")
    clip = _choose_clip(None, like)
    made = quantize_array(jnp.asarray(saved).astype(like.dtype), like.format, like.layout, input_clip=clip)
    return dataclasses.replace(made, input_clip=clip)


def _choose_clip(saved: Any, like: QuantizedArray) -> Any:
    """Returns the input range of a layer: the saved one, or else the target's."""
    if saved is None and is_abstract(like.input_clip):
        raise Misfit("was saved without the range of its inputs, and an abstract target has no value for it")
    return like.input_clip if saved is None else saved


def _dequantize_saved(saved: Any, like: Any) -> Any:
    """Dequantizes a saved weight. The dtypes and shapes of a dict of arrays tell its format."""
    if isinstance(saved, QuantizedArray):
        return saved.dequantize(like.dtype if is_floating(like) else None)
    if not is_array(like):
        raise Misfit(f"was saved as {_describe_value(saved)}, the target has {_describe_value(like)}")
    arrays: dict[str, Any] = dict.fromkeys(ARRAYS)
    arrays |= {name: jnp.asarray(array) for name, array in saved.items()}
    format, layout = _read_layout(arrays, like.shape)
    weight = QuantizedArray(**arrays, format=format, layout=layout, dtype=np.dtype(np.float32))
    if weight.shape != like.shape:
        raise Misfit(f"was saved as {_describe_value(weight)}, the target has {_describe_value(like)}")
    return weight.dequantize()


def _read_layout(arrays: dict[str, Any], shape: tuple[int, ...]) -> tuple[StoredFormat, Layout]:
    values, scale = arrays["values"], arrays["scale"]
    if values.dtype == np.int8:
        return Int8(), Layout(shape, 0)  # the product of values and scales does not depend on the layout
    if values.dtype == jnp.float8_e4m3fn and scale.dtype == np.float32:
        return _read_squares(values, scale)
    # The shape is (*stack, blocks, bytes of a block, *channels); scales have 1 in place of the bytes.
    fits = lambda n: scale.shape[n] == 1 and shape[len(shape) - values.ndim + n + 1 :] == values.shape[n + 1 :]
    fitting = [n for n in range(1, values.ndim) if fits(n)]
    # If blocks have one byte, scales have the shape of the values.
    packed = next((n for n in fitting if values.shape[n] != 1), fitting[0] if fitting else values.ndim - 1)
    channels = values.ndim - 1 - packed
    contracted = shape[packed - 1 : len(shape) - channels]
    blocks, length = values.shape[packed - 1], int(np.prod(contracted))
    is_packed = values.dtype != jnp.float8_e4m3fn
    is_odd = is_packed and scale.dtype == np.float32  # integers and nf4 may have blocks of an odd length
    sizes = [values.shape[packed] * (1 + is_packed) - n for n in range(1 + is_odd)]
    whole = [size for size in sizes if size * blocks == length]
    fitting = whole or [size for size in sizes if -(-length // size) == blocks]
    if len(fitting) == 2:  # the last byte of an odd block has zeros in its high half
        last = _read_elements(lax.index_in_dim(values, values.shape[packed] - 1, packed))
        fitting = fitting[-1:] if last.size and last.max() < 16 else fitting[:1]
    if not fitting:
        raise Misfit(f"was saved in {blocks} blocks of {sizes[0]}, which do not fit the target's {shape}")
    block = fitting[0]
    if is_odd:
        return (NF4 if arrays["zero_point"] is None else Int4)(block_size=block), Layout(contracted, channels)
    kind = MXFP8 if values.dtype == jnp.float8_e4m3fn else MXFP4 if arrays["tensor_scale"] is None else NVFP4
    return kind(block_size=block), Layout(contracted, channels)


def _read_squares(values: jax.Array, scale: jax.Array) -> tuple[StoredFormat, Layout]:
    """Finds the size of squares, a power of two, and the axes of inputs and outputs."""
    shape, stack = values.shape, scale.ndim - 2
    if scale.ndim == values.ndim and all(n in (1, length) for n, length in zip(scale.shape, shape, strict=True)):
        return E4M3(block_size=PER_CHANNEL), Layout(shape, 0)
    for block in [128, *(2**n for n in range(17))]:
        for end in range(stack + 1, len(shape)):
            sizes = math.prod(shape[stack:end]), math.prod(shape[end:])
            if scale.shape[-2:] == tuple(-(-size // block) for size in sizes):
                return E4M3(block_size=block), Layout(shape[stack:end], len(shape) - end)
    raise Misfit(f"was saved with scales of shape {scale.shape}, which fit no squares of {shape}")


def _convert_number(saved: Any, like: Any) -> Any:
    if isinstance(like, bool | int | float | complex) and np.ndim(saved) == 0:
        if _is_same_kind(np.asarray(saved).dtype, np.asarray(like).dtype):
            return type(like)(saved)
    elif type(saved) is type(like):
        return saved
    raise Misfit(f"was saved as {_describe_value(saved)}, the target has {_describe_value(like)}")


def _convert_array(saved: Any, like: Any) -> Any:
    if _is_key(like) or _is_key(saved):
        return _convert_key(saved, like)
    dtype = np.dtype(like.dtype)
    given: Any = saved if is_array(saved) else np.asarray(saved)
    if given.shape != like.shape or not _is_same_kind(given.dtype, dtype):
        raise Misfit(f"was saved as {_describe_value(saved)}, the target has {_describe_value(like)}")
    if given.dtype == dtype:
        return given
    with np.errstate(over="ignore", invalid="ignore"):
        return given.astype(dtype)


def _convert_key(saved: Any, like: Any) -> Any:
    """Converts a random key, which some checkpoint formats store as its data."""
    if _is_key(like) and is_array(saved) and saved.dtype == np.uint32:
        implementation: list[Any] = []
        jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), like)  # `like` may be abstract
        saved = jax.random.wrap_key_data(jnp.asarray(saved), impl=implementation[0])
    elif is_array(like) and like.dtype == np.uint32 and _is_key(saved):
        saved = jax.random.key_data(saved)  # pyright: ignore[reportArgumentType]
    if not is_array(saved) or saved.shape != like.shape or saved.dtype != like.dtype:
        raise Misfit(f"was saved as {_describe_value(saved)}, the target has {_describe_value(like)}")
    return saved


def _is_key(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_same_kind(one: Any, other: Any) -> bool:
    return any(jnp.issubdtype(one, kind) and jnp.issubdtype(other, kind) for kind in _KINDS)


_KINDS = (jnp.floating, jnp.integer, jnp.bool_, jnp.complexfloating)


def _place(array: Any, like: Any) -> Any:
    """Puts an array where `like` is. If `like` is uncommitted, JAX chooses the device."""
    if isinstance(like, np.ndarray | np.generic):
        return np.asarray(array)
    sharding = getattr(like, "sharding", None)
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):  # a shape has no devices
        sharding = None
    if sharding is None or (isinstance(like, jax.Array) and not like.committed):
        return jnp.asarray(array)
    return array if getattr(array, "sharding", None) == sharding else jax.device_put(array, sharding)


def _describe_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a quantized weight"
    if not isinstance(value, QuantizedArray) and is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    return describe(value)
