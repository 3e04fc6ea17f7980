"""Floating dtypes: their names, which of two is wider, and arrays of them."""

import functools
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ._messages import did_you_mean, quote


class SupportsDType(Protocol):
    """Scalar type of JAX, such as `jnp.bfloat16`."""

    @property
    def dtype(self) -> np.dtype: ...


DTypeLike = str | np.dtype[Any] | type[np.generic] | SupportsDType
"""A dtype name, an `np.dtype`, or a scalar type of numpy, jax or ml_dtypes."""

_ALIASES = {"full": "float32", **{f"{f}{bits}": f"float{bits}" for bits in (16, 32, 64) for f in ("f", "fp")}}
_ALIASES["bf16"] = "bfloat16"


def parse_dtype(spec: DTypeLike, *, where: str = "", example: str = "'bfloat16'") -> np.dtype:
    """Reads a floating dtype; `where` and `example` complete the error. Equal dtypes are returned as one object."""
    if isinstance(spec, np.dtype) and spec in _CANONICAL:  # the fast path: every cast comes here
        return _CANONICAL[spec]
    found = find_dtype(spec)
    if found is None:
        is_policy = isinstance(spec, str) and find_dtype(spec.strip().lower().removeprefix("mixed_")) is not None
        known = f"It is a policy: get_policy({spec!r})." if is_policy else did_you_mean(spec, dtype_names())
        raise ValueError(f"Unknown dtype {quote(spec)}{where}. {known} For example: {example}.")
    return found


def find_dtype(spec: object) -> np.dtype | None:
    """Returns the floating dtype that `parse_dtype` reads, or None."""
    if isinstance(spec, str):
        name = spec.strip().lower()
        return np.dtype(half_dtype()) if name == "half" else _BY_NAME.get(_ALIASES.get(name, name))
    return _BY_NAME.get(_find_name(spec) or "")


def half_dtype() -> Any:
    """Returns the half-precision dtype of the default backend: `jnp.bfloat16` on TPU, `jnp.float16` elsewhere.

    The result is the scalar type, so that `half_dtype()(2**15)` makes an array, as in DeepMind's `jmp`.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.half_dtype()(2.0**15).dtype in (jnp.float16, jnp.bfloat16)
    True
    """
    return jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float16


@functools.cache  # `issubdtype` is slow
def is_floating_dtype(dtype: DTypeLike) -> bool:
    """True for real floating dtypes, but not for extended dtypes such as PRNG keys."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def at_least_float32(dtype: np.dtype) -> np.dtype:
    """Returns float64 for 8-byte dtypes, else float32: the dtype to scale, sum or check values in."""
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def check_x64(dtype: np.dtype, what: str, example: str) -> None:
    """Raises a `ValueError` for float64 if JAX would make float32 of it. `what` and `example` are part of the error."""
    if dtype.itemsize == 8 and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{what} needs jax.config.update('jax_enable_x64', True): without it, JAX computes in float32. "
            f"For example: {example}."
        )


def is_wider(dtype: np.dtype, other: np.dtype) -> bool:
    """True if `dtype` has more bits, or as many and a longer mantissa."""
    info, other_info = jnp.finfo(dtype), jnp.finfo(other)
    return (info.bits, info.nmant) > (other_info.bits, other_info.nmant)


def dtype_names() -> list[str]:
    """Returns all names that `parse_dtype` reads, canonical names first."""
    return [*_BY_NAME, *_ALIASES, "half"]


def is_array(leaf: object) -> TypeGuard[jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct]:
    """True for arrays and `jax.ShapeDtypeStruct`."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_floating(leaf: object) -> bool:
    """True if `cast_floating` casts this leaf."""
    return is_array(leaf) and is_floating_dtype(leaf.dtype)


def is_half(leaf: Any) -> bool:
    """True for arrays of 16-bit floats."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and is_floating_dtype(dtype) and np.dtype(dtype).itemsize == 2


def _list_floating_dtypes() -> dict[str, np.dtype]:
    """Lists the floating dtypes of JAX and ml_dtypes, including ones that they add later."""
    common = {name: np.dtype(name) for name in ("bfloat16", "float16", "float32", "float64")}
    scalar_types = (getattr(ml_dtypes, name) for name in sorted(dir(ml_dtypes)))
    exotic = {t.__name__: np.dtype(t) for t in scalar_types if isinstance(t, type) and is_floating_dtype(t)}
    return common | exotic


def _find_name(spec: Any) -> str | None:
    # `np.dtype` accepts too much: Python's `float` as float64, and any object with a `dtype`, such as a Flax layer.
    is_scalar_type = isinstance(spec, _JAX_SCALAR_TYPE) or (isinstance(spec, type) and issubclass(spec, np.generic))
    if not isinstance(spec, np.dtype) and not is_scalar_type:
        return None
    try:
        return np.dtype(spec).name
    except TypeError:  # np.floating, say
        return None


_JAX_SCALAR_TYPE = type(jnp.float32)
_BY_NAME = _list_floating_dtypes()
_CANONICAL = {dtype: dtype for dtype in _BY_NAME.values()}
