"""The formulas of quantization once more, in NumPy's float64 and integers, and the arrays that try them."""

import numpy as np

TINY = float(np.finfo(np.float32).tiny)
HALF = 0.5 + 1e-5
"""Half a step, and what float32 loses of it: a quotient of up to 127 is off by at most 127 · 2^-23 < 2e-5 / 2."""


def int8(x: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Integers as floats, before rounding, and their scale."""
    x = np.asarray(x, np.float64)
    scale = np.maximum(np.abs(x).max(axis=axes, keepdims=True) / 127, TINY)
    return x / scale, scale


def uint4(x: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers as floats, before rounding and without the zero point; their scale; the zero point before rounding."""
    x = np.asarray(x, np.float64)
    low = np.minimum(x.min(axis=axes, keepdims=True), 0)
    scale = np.maximum((np.maximum(x.max(axis=axes, keepdims=True), 0) - low) / 15, TINY)
    return x / scale, scale, -low / scale


def rounded_rows(x: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The integers of dynamic int8, computed in float32 with IEEE's division, and their scale.

    XLA divides otherwise on some machines, so that an integer may be one off where `find_ties` says so.
    """
    x = np.asarray(x, np.float32)
    peak = np.abs(x).max(axis=axes, keepdims=True)
    scale = np.maximum(peak * np.float32(1 / 127), np.float32(TINY))
    return np.clip(np.rint(x / scale), -127, 127).astype(np.int64), scale


def find_ties(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """How far off each integer may be: 1 where a number is halfway between two, but for errors of division, else 0.

    XLA may multiply by the reciprocal, which is off by a few units of float32 where the quotient is up to 127.
    """
    quotient = np.abs(np.asarray(x, np.float64) / scale)
    return (np.abs(quotient % 1 - 0.5) < 2.0**-14).astype(np.float64)


def edge_columns(length: int) -> dict[str, np.ndarray]:
    """Columns of finite numbers at the edges of float32; the other dtypes round them to their own edges."""
    random = np.random.default_rng(length)
    ramp = np.linspace(0.01, 1, length)
    return {
        "normal": random.normal(size=length),
        "all zero": np.zeros(length),
        "negative zero": -np.zeros(length),
        "positive": ramp,
        "negative": -ramp,
        "constant": np.full(length, 0.3),
        "one of them": np.eye(length)[length // 2] * -7,
        "subnormal": ramp * TINY / 4,
        "tiny": ramp * TINY * 20,
        "largest": random.uniform(-6e4, 6e4, length),
        "outlier": np.where(np.arange(length) == 1, 1e4, ramp),
    }


def fresh(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Numbers that no run of the tests has seen before, each channel of another size."""
    random = np.random.default_rng()
    return random.normal(size=shape) * scale * np.exp(random.normal(size=shape[-1]))
