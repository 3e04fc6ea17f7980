"""Trees of arrays, and casts of their floating leaves."""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

import jax
import numpy as np
from jax import lax

from ._dtypes import DTypeLike, half_dtype, is_floating_dtype, parse_dtype
from ._float8_state import OVERWRITE, STATE_NAMES
from ._memory import remember_weakly

T = TypeVar("T")
PyTree = Any
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Uncast:
    """Base of pytrees whose arrays no cast may touch: loss scales, and quantized storage."""


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

    >>> cast_floating([np.ones(2, np.float32), 3], "bfloat16")
    [array([1, 1], dtype=bfloat16), 3]
    """
    if dtype is None:
        return tree
    target = parse_dtype(dtype)
    if isinstance(tree, jax.Array):  # the most frequent tree, and the dearest way to walk it
        return _cast_leaf(tree, target)  # type: ignore[return-value]

    def cast(node: Any) -> Any:
        if not (_is_mapping(type(node)) and _is_holder(node, is_leaf)):
            return _cast_leaf(node, target)
        children, structure = _children(node)
        return structure.unflatten(
            child if is_state else cast_floating(child, target, is_leaf=is_leaf) for is_state, child in children
        )

    return jax.tree.map(cast, tree, is_leaf=_whole(is_leaf))


def cast_to_half(tree: T) -> T:
    """Casts floating arrays to the backend's half precision: bfloat16 on TPU, float16 elsewhere.

    >>> cast_to_half(np.float32(1)).dtype == half_dtype()
    True
    """
    return cast_floating(tree, half_dtype())


def cast_to_full(tree: T) -> T:
    """Casts floating arrays to float32.

    >>> cast_to_full(np.float16(1)).dtype
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

    >>> is_floating(np.float32(1)), is_floating(1.0), is_floating(jnp.arange(3))
    (True, False, False)
    """
    return is_array(leaf) and is_floating_dtype(leaf.dtype)


def first_floating_dtype(tree: PyTree) -> np.dtype | None:
    """The dtype JAX gives the first floating array of a tree, or `None` if it holds none.

    >>> first_floating_dtype((3, jnp.arange(2), jnp.ones(2, jnp.float16)))
    dtype('float16')
    """
    first = next(iter(floating_leaves(tree)), None)
    return None if first is None else np.dtype(jax.dtypes.canonicalize_dtype(first.dtype))


def floating_leaves(tree: PyTree, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of a tree that `cast_floating` casts, given the same `is_leaf`; those of loss scales it does not.

    >>> floating_leaves([1.0, np.float32(2), jmp.DynamicLossScale()])
    [np.float32(2.0)]
    """

    def floating(node: Any) -> list[Any]:
        if not (_is_mapping(type(node)) and _is_holder(node, is_leaf)):
            return [node] if is_floating(node) else []
        children, _ = _children(node)
        others = [child for is_state, child in children if not is_state]
        return floating_leaves(others, is_leaf=is_leaf)

    return [leaf for node in jax.tree.leaves(tree, is_leaf=_whole(is_leaf)) for leaf in floating(node)]


def _whole(is_leaf: Callable[[Any], bool] | None) -> Callable[[Any], bool]:
    """What a cast passes through whole: `Uncast`, and what the caller names."""
    return _is_uncast if is_leaf is None else lambda node: _is_uncast(node) or is_leaf(node)


def _is_uncast(node: object) -> bool:
    return isinstance(node, Uncast) or (_is_mapping(type(node)) and _holds_state(node))


@remember_weakly
def _is_mapping(kind: type) -> bool:
    return issubclass(kind, Mapping)


def _holds_state(mapping: Any) -> bool:
    return OVERWRITE in mapping or ("input_scale" in mapping and _holds_product(mapping))


def _holds_product(mapping: Any) -> bool:
    return all(name in mapping for name in STATE_NAMES)


def _is_holder(node: Any, is_leaf: Callable[[Any], bool] | None) -> bool:
    """Whether a mapping that a cast takes as a whole is one only for the float8 state in it."""
    return _holds_state(node) and not (is_leaf is not None and is_leaf(node))


def _children(node: Any) -> tuple[list[tuple[bool, Any]], Any]:
    """The values of a mapping, each with whether it is float8 state, and the structure that they come back in."""
    children, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    names = {OVERWRITE, *STATE_NAMES} if _holds_product(node) else {OVERWRITE}
    return [(getattr(key, "key", None) in names, child) for (key,), child in children], structure


def _cast_leaf(leaf: Any, dtype: np.dtype) -> Any:
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.Array):
        return lax.convert_element_type(leaf, dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # as JAX, which overflows to infinity without a word
        return leaf.astype(dtype)
