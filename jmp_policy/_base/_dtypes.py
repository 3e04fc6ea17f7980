"""Floating dtypes: their names, and the one way to read any spelling of one."""

import difflib
import functools
from collections.abc import Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ._messages import quote


class SupportsDType(Protocol):
    """A scalar type of JAX, such as `jnp.bfloat16`."""

    @property
    def dtype(self) -> np.dtype: ...


DTypeLike = str | np.dtype[Any] | type[np.generic] | SupportsDType
"""A dtype name, an `np.dtype`, or a scalar type of numpy, jax or ml_dtypes."""

_LONGEST_WORD = 100  # which is compared with names that exist, in a time that grows with it

_ALIASES = {
    "full": "float32",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "f64": "float64",
    "fp64": "float64",
    "bf16": "bfloat16",
}


def parse_dtype(spec: DTypeLike, *, where: str = "", example: str = "'bfloat16'") -> np.dtype:
    """Reads a floating dtype in any spelling.

    Args:
      spec: a name (`"bfloat16"`, `"bf16"`, `"full"`, `"half"`; spaces and case are forgiven), an `np.dtype`, or a
        scalar type such as `jnp.bfloat16`.
      where: what the error message says of the place `spec` stands in, such as `" in 'compute=bflaot16'"`.
      example: a spelling that works in that place, for the error message.

    Returns:
      The `np.dtype`: one object for every spelling, so that equal dtypes are equal, and hash alike, everywhere.

    Raises:
      ValueError: `spec` names no floating dtype.

    >>> parse_dtype("bf16") == parse_dtype(jnp.bfloat16) == np.dtype("bfloat16")
    True
    """
    if isinstance(spec, np.dtype) and spec in _CANONICAL:  # the short way: every cast comes through here
        return _CANONICAL[spec]
    if isinstance(spec, str):
        name = spec.strip().lower()
        if name == "half":
            return np.dtype(half_dtype())
        found = _BY_NAME.get(_ALIASES.get(name, name))
    else:
        found = _BY_NAME.get(_find_name(spec) or "")
    if found is None:
        raise ValueError(_explain_unknown(spec, where, example))
    return found


def half_dtype() -> Any:
    """Returns the half precision of the default backend: `jnp.bfloat16` on TPU, `jnp.float16` elsewhere.

    The scalar type, not the `np.dtype`, so that `half_dtype()(2**15)` makes an array, as in DeepMind's `jmp`.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.half_dtype()(2.0**15).dtype in (jnp.float16, jnp.bfloat16)
    True
    """
    return jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float16


@functools.cache  # JAX looks through all kinds of dtypes each time
def is_floating_dtype(dtype: DTypeLike) -> bool:
    """Whether `dtype` is a real floating dtype; extended dtypes such as PRNG keys are not.

    >>> is_floating_dtype(jnp.bfloat16), is_floating_dtype(jnp.complex64), is_floating_dtype(jax.random.key(0).dtype)
    (True, False, False)
    """
    return bool(jnp.issubdtype(dtype, jnp.floating))


def at_least_float32(dtype: np.dtype) -> np.dtype:
    """The dtype in which a number of a floating dtype is safe to scale, sum or check.

    >>> at_least_float32(np.dtype("bfloat16")), at_least_float32(np.dtype("float64"))
    (dtype('float32'), dtype('float64'))
    """
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """The sentence of an error message that offers the nearest of `choices`, or all of them if none is near.

    >>> did_you_mean("bflaot16", ["bfloat16", "float16"])
    "Did you mean 'bfloat16'?"
    >>> did_you_mean("tahn", ["tan", "tanh"])
    "Did you mean 'tanh'?"
    """
    choices = list(choices)
    text = str(word).strip().lower()
    near = difflib.get_close_matches(text, choices) if len(text) <= _LONGEST_WORD else []
    near.sort(key=lambda choice: sorted(choice) != sorted(text))  # before the others what has letters swapped
    return f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(map(repr, choices))}."


def dtype_names() -> list[str]:
    """Every spelling that `parse_dtype` reads, canonical names first.

    >>> dtype_names()[:4]
    ['bfloat16', 'float16', 'float32', 'float64']
    """
    return [*_BY_NAME, *_ALIASES, "half"]


def _list_floating_dtypes() -> dict[str, np.dtype]:
    """All that JAX or ml_dtypes has, so that a format they add is known here at once."""
    common = {name: np.dtype(name) for name in ("bfloat16", "float16", "float32", "float64")}
    scalar_types = (getattr(ml_dtypes, name) for name in sorted(dir(ml_dtypes)))
    exotic = {t.__name__: np.dtype(t) for t in scalar_types if isinstance(t, type) and is_floating_dtype(t)}
    return common | exotic


def _find_name(spec: DTypeLike) -> str | None:
    # Not all that numpy reads: it takes Python's `float` for float64, where JAX takes it for float32, and any object
    # with an attribute `dtype`, a Flax layer among them, for that dtype.
    is_scalar_type = isinstance(spec, _JAX_SCALAR_TYPE) or (isinstance(spec, type) and issubclass(spec, np.generic))
    if not isinstance(spec, np.dtype) and not is_scalar_type:
        return None
    try:
        return np.dtype(spec).name
    except TypeError:  # an abstract type, such as np.floating
        return None


def _explain_unknown(spec: DTypeLike, where: str, example: str) -> str:
    return f"Unknown dtype {quote(spec)}{where}. {did_you_mean(spec, dtype_names())} For example: {example}."


_JAX_SCALAR_TYPE = type(jnp.float32)
_BY_NAME = _list_floating_dtypes()
_CANONICAL = {dtype: dtype for dtype in _BY_NAME.values()}
