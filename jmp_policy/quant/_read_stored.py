"""Reads of stored weights that the rewriter of a model's program recognizes, to multiply by the stored numbers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._base import REWRITING, DTypeLike, parse_dtype
from ._array import QuantizedArray

_READ = "read_stored_weight_"
_STRUCTURES: dict[str, Any] = {}  # of the weights, by the names of the functions that read them


def read_stored(weight: QuantizedArray, dtype: DTypeLike | None = None) -> jax.Array:
    """Dequantizes a weight for code that knows no stored ones; a rewritten program knows the read by its name."""
    dtype = weight.dtype if dtype is None else parse_dtype(dtype)
    if not REWRITING.value:
        return weight.dequantize(dtype)
    leaves, structure = jax.tree.flatten(weight)
    with jax.disable_jit(False):
        return _make_reader(structure, dtype)(*leaves)


def find_structure(name: str) -> Any:
    """Returns the tree structure of the weight that a jitted function of this name reads, or None."""
    return _STRUCTURES.get(name)


def trace_read(name: str, dtype: np.dtype, arrays: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """Returns the equation of the same read, of weights with other arrays."""
    return jax.make_jaxpr(_make_reader(_STRUCTURES[name], dtype))(*arrays).jaxpr.eqns[0]


@functools.cache
def _make_reader(structure: Any, dtype: np.dtype) -> Callable[..., jax.Array]:
    def read(*leaves: Any) -> jax.Array:
        return jax.tree.unflatten(structure, leaves).dequantize(dtype)

    read.__name__ = f"{_READ}{len(_STRUCTURES)}"
    _STRUCTURES[read.__name__] = structure
    return jax.jit(read)
