"""Whether the numbers of a tree are finite, and the choice between two trees that follows from it."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import PyTree

T = TypeVar("T")

_WORDS = {8: jnp.uint8, 16: jnp.uint16}
"""The integers of as many bits as a narrow float."""


def all_finite(tree: PyTree) -> jax.Array:
    """Whether every number in a tree is finite, as a boolean scalar array.

    Integers, bools, keys and other leaves that cannot be infinite count as finite. Each array is read once. GPUs and
    TPUs write nothing of its size; on CPUs XLA writes one byte for each number before it reduces them. Of sharded
    arrays under `jit` all devices get one answer, and XLA exchanges it at once for all arrays that are split over the
    same axes; in `jax.shard_map` each device answers for its parts.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> bool(jmp.all_finite({"a": jnp.ones(3), "b": None})), bool(jmp.all_finite([jnp.array([1.0, jnp.nan])]))
    (True, False)
    """
    inexact = [x for x in jax.tree.leaves(tree) if _may_be_infinite(x)]
    return _are_finite(inexact) if inexact else jnp.array(True)


def select_tree(pred: jax.Array, a: T, b: T) -> T:
    """Selects the tree `a` where `pred` is true and `b` where it is false, leaf by leaf.

    Args:
      pred: a boolean scalar: a Python bool, or an array of shape `()`.
      a: a tree of arrays.
      b: a tree of the same structure, shapes and dtypes.

    Returns:
      A tree of that structure.

    Raises:
      AssertionError: `pred` is not a boolean scalar; an AssertionError because DeepMind's `jmp` raises one.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.select_tree(jnp.array(False), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})["w"].tolist()
    [0.0, 0.0]
    """
    is_array = isinstance(pred, bool | np.generic | np.ndarray | jax.Array)
    if not is_array or jnp.ndim(pred) != 0 or jnp.result_type(pred) != jnp.bool_:
        got = jax.typeof(jnp.asarray(pred)) if is_array else repr(pred)
        raise AssertionError(f"expected boolean scalar, got {got}; for example: all_finite(grads)")
    pred = jnp.asarray(pred)
    return jax.tree.map(lambda x, y: _select(pred, jnp.asarray(x), jnp.asarray(y)), a, b)


def _select(pred: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits in _WORDS
    return _select_bits(pred, x, y) if is_narrow and x.dtype == y.dtype else lax.select(pred, x, y)


@jax.custom_jvp
def _select_bits(pred: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """A select of narrow floats: where XLA selects these as float32, a nan does not keep its payload."""
    word = _WORDS[jnp.finfo(x.dtype).bits]
    x_bits, y_bits = lax.bitcast_convert_type(x, word), lax.bitcast_convert_type(y, word)
    return lax.bitcast_convert_type(lax.select(pred, x_bits, y_bits), x.dtype)


@_select_bits.defjvp
def _select_tangents(primals: Any, tangents: Any) -> Any:
    return _select_bits(*primals), lax.select(primals[0], *tangents[1:])


def _may_be_infinite(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, float | complex)
    if not jnp.issubdtype(dtype, jnp.inexact) or np.size(leaf) == 0:
        return False
    # Below 8 bits a format has neither nan nor infinity, and XLA cannot compute in all of them.
    return jnp.issubdtype(dtype, jnp.complexfloating) or jnp.finfo(dtype).bits >= 8


@jax.jit  # one dispatch where it is called eagerly, and one function where a program asks about the same tree twice
def _are_finite(arrays: list[Any]) -> jax.Array:
    # A reduction of bools, because on CPUs XLA loses a nan in a float32 reduction of some thousand numbers: in `max`,
    # and in `sum(x - x)` where it fuses a maximum, such as a relu, into the sum. It also folds `sum(2 * x * 0)` to
    # `sum(x * 0)`, which hides that `2 * x` overflows. These read 1.0 times the bytes on a CPU, and this 1.5 times.
    return functools.reduce(lax.bitwise_and, [jnp.isfinite(x).all() for x in arrays])
