"""Trees of arrays, casts of their floating leaves, and the names of floating dtypes."""

import difflib
import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Protocol, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from ._float8_state import map_rest, split_state
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
