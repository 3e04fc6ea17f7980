"""Trees of arrays, and casts of their floating leaves."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeGuard, TypeVar

import jax
import numpy as np
from jax import lax

from ._dtypes import DTypeLike, half_dtype, is_floating_dtype, parse_dtype
from ._float8_state import map_rest, split_state

P = ParamSpec("P")
R = TypeVar("R")
Loss = TypeVar("Loss")
Aux = TypeVar("Aux")
T = TypeVar("T")
PyTree = Any
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Uncast:
    """Base of pytrees whose arrays no cast may touch: loss scales, quantized storage, and statistics."""


def cast_floating(tree: T, dtype: DTypeLike | None, *, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """Casts the real floating arrays of a tree, and leaves everything else as it is.

    Integers, bools, complex numbers, PRNG keys, Python scalars, loss scales, the state of float8 layers and any other
    object pass through by identity, and so does an array that has the dtype already. Numpy arrays stay numpy arrays.

    Args:
      tree: a pytree of any leaves; `jax.Array`, tracers, numpy arrays and scalars and `jax.ShapeDtypeStruct` are cast.
      dtype: the floating dtype to cast to, in any spelling; `None` casts nothing.
      is_leaf: what else to pass through whole, as in `jax.tree.map`.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: `dtype` names no floating dtype.

    >>> import numpy as np, jmp_policy as jmp
    >>> jmp.cast_floating([np.ones(2, np.float32), 3], "bfloat16")
    [array([1, 1], dtype=bfloat16), 3]
    """
    if dtype is None:
        return tree
    target = parse_dtype(dtype)
    if isinstance(tree, jax.Array):  # the most frequent tree needs no walk
        return _cast_leaf(tree, target)  # type: ignore[return-value]

    return map_rest(lambda leaf: _cast_leaf(leaf, target), tree, is_leaf=_add_uncast(is_leaf))


def cast_to_half(tree: T) -> T:
    """Casts floating arrays to the backend's half precision: bfloat16 on TPU, float16 elsewhere.

    >>> import numpy as np, jmp_policy as jmp
    >>> jmp.cast_to_half(np.float32(1)).dtype == jmp.half_dtype()
    True
    """
    return cast_floating(tree, half_dtype())


def cast_to_full(tree: T) -> T:
    """Casts floating arrays to float32.

    >>> import numpy as np, jmp_policy as jmp
    >>> jmp.cast_to_full(np.float16(1)).dtype
    dtype('float32')
    """
    return cast_floating(tree, np.float32)


def is_array(leaf: object) -> TypeGuard[jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct]:
    """Whether a leaf is an array, or stands for one.

    >>> is_array(jax.ShapeDtypeStruct((2,), "int32")), is_array(2)
    (True, False)
    """
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_floating(leaf: object) -> bool:
    """Whether a leaf is one that `cast_floating` casts.

    >>> import jax.numpy as jnp
    >>> is_floating(np.float32(1)), is_floating(1.0), is_floating(jnp.arange(3))
    (True, False, False)
    """
    return is_array(leaf) and is_floating_dtype(leaf.dtype)


def first_floating_dtype(tree: PyTree) -> np.dtype | None:
    """The dtype JAX gives the first floating array of a tree, or `None` if it holds none.

    >>> import jax.numpy as jnp
    >>> first_floating_dtype((3, jnp.arange(2), jnp.ones(2, jnp.float16)))
    dtype('float16')
    """
    first = next(iter(floating_leaves(tree)), None)
    return None if first is None else np.dtype(jax.dtypes.canonicalize_dtype(first.dtype))


def floating_leaves(tree: PyTree, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of a tree that `cast_floating` casts, given the same `is_leaf`: not the numbers of a loss scale.

    >>> import jmp_policy as jmp
    >>> floating_leaves([1.0, np.float32(2), jmp.DynamicLossScale()])
    [np.float32(2.0)]
    """

    is_whole = _add_uncast(is_leaf)
    rest, _ = split_state(tree, is_leaf=is_whole)
    return [leaf for leaf in jax.tree.leaves(rest, is_leaf=is_whole) if is_floating(leaf)]


def _add_uncast(is_leaf: Callable[[Any], bool] | None) -> Callable[[Any], bool]:
    """Tells what a cast passes through whole: `Uncast`, and what the caller names."""
    return _is_uncast if is_leaf is None else lambda node: _is_uncast(node) or is_leaf(node)


def _is_uncast(node: object) -> bool:
    return isinstance(node, Uncast)


def _cast_leaf(leaf: Any, dtype: np.dtype) -> Any:
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.Array):
        return lax.convert_element_type(leaf, dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # as JAX, which overflows to infinity without a word
        return leaf.astype(dtype)


def list_paths_to(path: str) -> list[str]:
    """The paths of the modules around a path, the root first, and at the end the path itself.

    >>> list_paths_to("blocks/0"), list_paths_to("")
    (['', 'blocks', 'blocks/0'], [''])
    """
    names = path.split("/") if path else []
    return ["/".join(names[:n]) for n in range(len(names) + 1)]
