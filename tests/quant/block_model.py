"""The rules of numbers in blocks once more, in NumPy: float64, integers and tables, one block a row."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

E4M3, E5M2, E2M1 = (np.dtype(name) for name in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"))
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
EMAX = {E4M3: 8, E5M2: 15, E2M1: 2}
LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}
NAN = {E4M3: 0x7F, E5M2: 0x7E, E2M1: 0}
"""What stands for a number of a block that is not finite: e2m1 has zeros alone."""


class Model(NamedTuple):
    values: np.ndarray
    scale: np.ndarray
    tensor_scale: np.ndarray | None = None


def mx(x: Any, dtype: Any, axis: int, block_size: int = 32, rounding: str = "up") -> Model:
    rows, restore = _split(x, axis, block_size)
    dtype = np.dtype(dtype)
    is_finite = np.isfinite(rows).all(-1)
    amax = np.where(is_finite, np.abs(np.where(is_finite[..., None], rows, 0)).max(-1), 0)
    power = np.frexp(amax)[1] - 1 - EMAX[dtype]  # 2**(power + emax) <= amax < 2**(power + emax + 1)
    if rounding == "up":
        power = np.where(amax <= np.ldexp(LARGEST[dtype], power), power, power + 1)
    power = np.where(amax == 0, -127, np.clip(power, -127, 127))
    scaled = np.ldexp(np.where(is_finite[..., None], rows, 0), -power[..., None])
    codes = np.where(is_finite[..., None], nearest(scaled, dtype), np.uint8(NAN[dtype]))
    scale = np.where(is_finite, power + 127, 255).astype(np.uint8)
    return Model(restore(codes.view(dtype)), restore(scale[..., None].view(E8M0)))


def nv(
    x: Any, axis: int, block_size: int = 16, square_axis: int | None = None, tensor_axes: tuple[int, ...] | None = None
) -> Model:
    x = widen(x)
    axes = tuple(range(x.ndim)) if tensor_axes is None else tensor_axes
    rows, restore = _split(x, axis, block_size)
    of_block = np.where(np.isnan(rows), np.inf, np.abs(rows)).max(-1, keepdims=True)
    if square_axis is not None:
        of_block = restore(of_block)  # in the order of the axes of `x`
        for start in range(0, x.shape[square_axis], block_size):
            part = (slice(None),) * (square_axis % x.ndim) + (slice(start, start + block_size),)
            of_block[part] = of_block[part].max(square_axis, keepdims=True)
        of_block = _split(of_block, axis, 1)[0]
    is_finite = np.isfinite(of_block)
    amax = restore(np.where(is_finite, of_block, 0)).max(axes, keepdims=True, initial=0)
    usable = amax > 0
    with np.errstate(all="ignore"):
        s = np.where(usable, np.minimum(round24(2688 / amax), np.ldexp(2688, 114)), 1)
        tensor_scale = np.minimum(round24(1 / s), _largest_tensor_scale())
    s = np.broadcast_to(s, np.where(np.arange(x.ndim) == axis % x.ndim, 1, x.shape))  # one for each row of blocks
    s = np.moveaxis(s, axis, -1)[..., None]
    wanted = round24(np.where(is_finite, of_block, 0) * round24(s * np.float32(1 / 6).astype(np.float64)))
    scale = nearest(wanted, E4M3).view(E4M3).astype(np.float64)
    with np.errstate(all="ignore"):
        factor = np.where(scale > 0, round24(s / scale), 0)
    scaled = round24(np.where(is_finite, rows, 0) * factor)
    codes = np.where(is_finite, nearest(scaled, E2M1), np.uint8(0))
    scale = np.where(is_finite, scale, np.nan)
    return Model(restore(codes.view(E2M1)), restore(scale.astype(E4M3)), tensor_scale.astype(np.float32))


def numbers(blocks: Any, axis: int) -> np.ndarray:
    """What blocks stand for, in float64."""
    values, scale, tensor_scale = (None if part is None else np.asarray(part) for part in blocks)
    repeated = np.repeat(scale.astype(np.float64), values.shape[axis] // scale.shape[axis], axis)
    product = values.astype(np.float64) * repeated
    return product if tensor_scale is None else round24(product * tensor_scale.astype(np.float64))


def nearest(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The codes of the nearest numbers of a format; of two that are as near the one with an even code; clipped."""
    return np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(dtype).view(np.uint8)


def round24(x: np.ndarray) -> np.ndarray:
    """Rounds to the 24 bits of float32 with any exponent. Quotients of such numbers are rounded twice, without harm."""
    fraction, power = np.frexp(x)
    return np.ldexp(fraction.astype(np.float32).astype(np.float64), power)


def widen(x: Any) -> np.ndarray:
    """Rounds to float32, in float64."""
    with np.errstate(invalid="ignore"):  # which a nan sets that signals
        return np.asarray(np.asarray(x).astype(np.float32).astype(np.float64))


def _largest_tensor_scale() -> np.float64:
    """The next number below the greatest of float32 / 2688."""
    return np.nextafter(np.float32(np.finfo(np.float32).max / np.float32(2688)), np.float32(0)).astype(np.float64)


def _split(x: Any, axis: int, block_size: int) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Blocks as the last of two axes that come in place of one; and what joins such axes in its place again."""
    x = np.moveaxis(widen(x), axis, -1)
    rows = x.reshape(*x.shape[:-1], x.shape[-1] // block_size, block_size)

    def restore(blocks: np.ndarray) -> np.ndarray:
        *rest, count, size = blocks.shape
        return np.moveaxis(blocks.reshape(*rest, count * size), -1, axis)

    return rows, restore
