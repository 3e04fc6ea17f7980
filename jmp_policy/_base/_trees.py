"""Casts of pytrees, paths, and the arrays among the arguments and outputs of functions."""

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax import lax

from ._dtypes import DTypeLike, check_x64, half_dtype, is_array, is_floating, parse_dtype
from ._float8_state import map_rest, split_state

P = ParamSpec("P")
R = TypeVar("R")
Loss = TypeVar("Loss")
Aux = TypeVar("Aux")
T = TypeVar("T")
PyTree = Any
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
KeyPath = tuple[Any, ...]

NO_VALUE = (
    jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError
)  # fmt: skip
"""The errors of Python code that reads a traced array."""


class Uncast:
    """Base class of pytrees that are never cast: loss scales, quantized weights and statistics."""


def cast_floating(tree: T, dtype: DTypeLike | None, *, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """Casts the real floating arrays of a tree, and leaves everything else unchanged.

    Integers, bools, complex numbers, PRNG keys, Python scalars, loss scales, the state of float8 layers and all other
    objects pass through by identity, and so do arrays that already have the dtype. Numpy arrays stay numpy arrays.

    Args:
      tree: a pytree; `jax.Array`, tracers, numpy arrays and scalars and `jax.ShapeDtypeStruct` are cast.
      dtype: the floating dtype to cast to, in any spelling; `None` casts nothing.
      is_leaf: further nodes to pass through whole, as in `jax.tree.map`.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: `dtype` is not a floating dtype, or is float64 without `jax_enable_x64`.

    >>> import numpy as np, jmp_policy as jmp
    >>> jmp.cast_floating([np.ones(2, np.float32), 3], "bfloat16")
    [array([1, 1], dtype=bfloat16), 3]
    """
    if dtype is None:
        return tree
    target = parse_dtype(dtype)
    if isinstance(tree, jax.Array):  # fast path
        return _cast_leaf(tree, target)  # type: ignore[return-value]

    return map_rest(lambda leaf: _cast_leaf(leaf, target), tree, is_leaf=_add_uncast(is_leaf))


def cast_to_half(tree: T) -> T:
    """Casts floating arrays to the half precision of the backend: bfloat16 on TPU, float16 elsewhere.

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


def first_floating_dtype(tree: PyTree) -> np.dtype | None:
    """Returns the dtype that JAX gives the first floating array of a tree, or None if there is none."""
    first = next(iter(floating_leaves(tree)), None)
    return None if first is None else np.dtype(jax.dtypes.canonicalize_dtype(first.dtype))


def floating_leaves(tree: PyTree, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Returns the leaves that `cast_floating` casts; the values of a loss scale are not among them."""
    is_whole = _add_uncast(is_leaf)
    rest, _ = split_state(tree, is_leaf=is_whole)
    return [leaf for leaf in jax.tree.leaves(rest, is_leaf=is_whole) if is_floating(leaf)]


def _add_uncast(is_leaf: Callable[[Any], bool] | None) -> Callable[[Any], bool]:
    """Extends `is_leaf` by `Uncast`."""
    is_uncast = lambda node: isinstance(node, Uncast)
    return is_uncast if is_leaf is None else lambda node: is_uncast(node) or is_leaf(node)


def _cast_leaf(leaf: Any, dtype: np.dtype) -> Any:
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        with np.errstate(over="ignore", invalid="ignore"):  # as JAX does
            return leaf.astype(dtype)
    check_x64(dtype, f"A cast to {str(dtype)!r}", "cast_floating(tree, 'float32')")
    is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    return leaf.update(dtype=dtype) if is_abstract else lax.convert_element_type(leaf, dtype)


def list_paths_to(path: str) -> list[str]:
    """Returns the paths of the modules around a path, outermost first, and then the path itself."""
    names = path.split("/") if path else []
    return ["/".join(names[:n]) for n in range(len(names) + 1)]


def group_by_key(pairs: Iterable[tuple[T, R]]) -> dict[T, list[R]]:
    """Returns the values of each key, in order.

    >>> group_by_key([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[T, list[R]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def flatten_function(
    fun: Callable[..., Any], args: Args, kwargs: Kwargs
) -> tuple[Callable[..., list[Any]], list[Any], list[Any]]:
    """Returns a function of the array leaves, those leaves, and a list that gets the structure of each result."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [is_array(leaf) for leaf in leaves]
    out_trees: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        merged = [next(given) if array else leaf for leaf, array in zip(leaves, dynamic, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, merged)
        out, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        out_trees.append(out_tree)
        return out

    flat.__name__ = getattr(fun, "__name__", flat.__name__)
    return flat, [leaf for leaf, array in zip(leaves, dynamic, strict=True) if array], out_trees


class Results:
    """The outputs of a function, whose arrays can be computed elsewhere and put back."""

    def __init__(self) -> None:
        self._leaves: list[tuple[KeyPath, Any]] = []
        self._structure: Any = None

    def take_arrays(self, fun: Callable[..., Any]) -> Callable[..., list[Any]]:
        """Wraps a function so that it returns a list of its output arrays, without the float0 gradients of integers."""
        is_taken = lambda leaf: is_array(leaf) and leaf.dtype != jax.dtypes.float0

        def call_and_take(*args: Any, **kwargs: Any) -> list[Any]:
            leaves, self._structure = jax.tree_util.tree_flatten_with_path(fun(*args, **kwargs))
            self._leaves = [(path, _ARRAY if is_taken(leaf) else leaf) for path, leaf in leaves]
            return [leaf for _, leaf in leaves if is_taken(leaf)]

        return call_and_take

    def put_back(self, arrays: Iterable[Any]) -> PyTree:
        """Returns the outputs of the function with the given arrays."""
        given = iter(arrays)
        leaves = [next(given) if leaf is _ARRAY else leaf for _, leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)

    def list_others(self) -> dict[KeyPath, Any]:
        """Returns the outputs that are not arrays, such as Python numbers, by path."""
        return {path: leaf for path, leaf in self._leaves if leaf is not _ARRAY}

    def list_paths(self) -> list[KeyPath]:
        """Returns the paths of the arrays."""
        return [path for path, leaf in self._leaves if leaf is _ARRAY]


_ARRAY = object()


def drop_value_key(path: KeyPath) -> KeyPath:
    """Drops the last key of a path to the array of an nnx Variable."""
    is_value = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
    return path[:-1] if is_value else path
