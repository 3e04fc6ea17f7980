"""State whose gradient is its next value: the scales and histories of float8 layers, among parameters.

A function that trains takes state out of its trees once, with `split_state`, and puts the next state in again, with
`join_state`. In between it knows nothing of it. State is known by its names in any tree, of variables, gradients or
optimizer states. Flax keeps it under a name of its own, in a collection of linen or in an attribute of nnx. Anywhere
else, the six names that one product has together tell.
"""

import contextlib
import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

T = TypeVar("T")
KeyPath = tuple[Any, ...]  # the keys of JAX along the way to a leaf

OVERWRITE = "_overwrite_with_gradient"
"""The key of float8 state in a mapping, as `flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT`; no cast may touch it."""

STATE_NAMES = frozenset(
    f"{operand}_{kind}" for operand in ("input", "kernel", "output_grad") for kind in ("scale", "amax_history")
)
"""The names of the state of one product in float8: what has all of them holds state, wherever it stands."""

_OUTPUT_GRAD = "output_grad_"
"""How the names begin of leaves that describe gradients, and so grow with the loss scale."""
_HISTORY = "amax_history"


def has_state(tree: object) -> bool:
    """Whether a tree holds float8 state."""
    return any(name_state(tree))


def split_state(tree: T, hole: object = None, *, is_leaf: Callable[[Any], bool] | None = None) -> tuple[T, T | None]:
    """Takes the float8 state out of a tree.

    Args:
      tree: a pytree.
      hole: what stands for state in the first result; a tree without leaves, which `jax.tree.map` passes over.
      is_leaf: what else counts as one leaf, as in `jax.tree.map`.

    Returns:
      The tree with holes for its state, and a tree of the same structure that has the state and `None` for all else.
      A tree without state is the first result itself, and `None` is the second.

    >>> split_state({"w": 1.0, "_overwrite_with_gradient": {"input_scale": 2.0}})
    ({'_overwrite_with_gradient': {'input_scale': None}, 'w': 1.0},
     {'_overwrite_with_gradient': {'input_scale': 2.0}, 'w': None})
    """
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    names = _name_leaves([path for path, _ in keyed])
    if not any(names):
        return tree, None
    rest = [hole if name else leaf for name, (_, leaf) in zip(names, keyed, strict=True)]
    state = [leaf if name else None for name, (_, leaf) in zip(names, keyed, strict=True)]
    return structure.unflatten(rest), structure.unflatten(state)


def join_state(tree: T, state: T | None) -> T:
    """Puts state into a tree, the inverse of `split_state`; it replaces whatever stands in its places.

    >>> join_state(*split_state({"w": 1.0, "_overwrite_with_gradient": {"input_scale": 2.0}}))
    {'_overwrite_with_gradient': {'input_scale': 2.0}, 'w': 1.0}
    """
    if state is None:
        return tree
    return jax.tree.map(lambda leaf, other: other if leaf is None else leaf, state, tree, is_leaf=lambda x: x is None)


def map_rest(fun: Callable[[Any], Any], tree: T, *, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """Maps a function over what `split_state` leaves of a tree, and joins the state again, in one walk.

    >>> map_rest(lambda x: 2 * x, {"w": 1.0, "_overwrite_with_gradient": {"input_scale": 2.0}})
    {'_overwrite_with_gradient': {'input_scale': 2.0}, 'w': 2.0}
    """
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    names = _name_leaves([path for path, _ in keyed])
    return structure.unflatten([leaf if name else fun(leaf) for name, (_, leaf) in zip(names, keyed, strict=True)])


def map_parts(map_rest: Callable[[T], T], map_state: Callable[[list[Any]], list[Any]], tree: T) -> T:
    """Maps the state of a tree, a list of leaves, by one function, and the list of all other leaves by another.

    The tree is rebuilt once, of leaves: a class of the user's may refuse to be made of `None`, as `split_state` makes
    it. A tree without state is given to `map_rest` itself.

    >>> tree = {"w": 1.0, "_overwrite_with_gradient": {"input_scale": 2.0}}
    >>> map_parts(lambda leaves: [-x for x in leaves], lambda leaves: leaves, tree)
    {'_overwrite_with_gradient': {'input_scale': 2.0}, 'w': -1.0}
    """
    leaves, structure = jax.tree.flatten(tree)
    names = name_state(tree)
    if not any(names):
        return map_rest(tree)
    pairs = list(zip(names, leaves, strict=True))
    rest: Any = map_rest([leaf for name, leaf in pairs if not name])  # type: ignore[arg-type]
    mapped = iter(rest), iter(map_state([leaf for name, leaf in pairs if name]))
    return structure.unflatten([next(mapped[bool(name)]) for name in names])


def name_state(tree: object) -> list[str]:
    """Lists for each leaf the name that it has as state, and `""` for any other leaf."""
    return _name_leaves([path for path, _ in jax.tree_util.tree_leaves_with_path(tree)])


def prepare_state(tree: T, loss_scale: ArrayLike) -> T:
    """Makes of a tree what is to be differentiated: its state is scaled as gradients are, and combined by max.

    Where state is used more than once, by a layer that is called again or in the steps of a scan, autodiff would sum
    its cotangents. It takes their maximum, if they are of this dtype of Flax's from here on.

    Args:
      tree: a tree of arrays, in which state is float32.
      loss_scale: what the loss is multiplied by, a scalar. What a float8 layer sees in its backward pass is
        multiplied by it too.

    Raises:
      ValueError: a leaf is named as an amax history, and the other state of its product is missing.
    """
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = _name_leaves([path for path, _ in keyed])
    _check_complete([path for name, (path, _) in zip(names, keyed, strict=True) if not name])
    if not any(names):
        return tree
    prepare = lambda name, leaf: prepare_leaf(name, leaf, loss_scale) if name else leaf
    return structure.unflatten([prepare(name, leaf) for name, (_, leaf) in zip(names, keyed, strict=True)])


def prepare_leaf(name: str, leaf: jax.Array, loss_scale: ArrayLike) -> jax.Array:
    """Makes of one leaf of state, which has this name, what is to be differentiated."""
    if is_prepared(leaf):
        return leaf
    is_one = isinstance(loss_scale, float) and loss_scale == 1.0  # a `NoOpLossScale` costs no operation
    scaled = _scale(leaf, loss_scale) if name.startswith(_OUTPUT_GRAD) and not is_one else leaf
    return lax.convert_element_type(scaled, _max_dtype())


def is_prepared(leaf: jax.Array) -> bool:
    """Whether autodiff combines the cotangents of an array by max."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def read_leaf(leaf: jax.Array) -> jax.Array:
    """Reads a leaf of state as float32 numbers, to compute with."""
    return lax.convert_element_type(leaf, jnp.float32) if is_prepared(leaf) else leaf


def write_leaf(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """Makes numbers the cotangent of a leaf of state."""
    return lax.convert_element_type(values, leaf.dtype)


def read_state(tree: T) -> T:
    """Makes the prepared state in a tree float32 numbers again, to be stored."""
    rest, state = split_state(tree)
    # What is stored has no derivative. The derivative of the conversion fails in JAX 0.10.
    read = lambda leaf: lax.stop_gradient(read_leaf(leaf)) if is_prepared(leaf) else leaf
    return join_state(rest, jax.tree.map(read, state))


def next_state(old: T, new: T, is_first: bool | jax.Array = True) -> T:
    """Makes the next state from the state of a step and its gradient.

    The gradient is the next state, but a layer that did not run has a gradient of zeros, where a scale is positive: it
    keeps its state. So does a layer whose gradient is not finite: operations of Flax's own clip an infinity, and
    remember it.

    Args:
      old: a tree of float32 state and nothing else.
      new: its gradient.
      is_first: false in the second and later microbatches of one step; their largest magnitudes join what the first
        recorded.
    """

    def next_leaf(path: KeyPath, old: jax.Array, new: jax.Array) -> jax.Array:
        later = old if _last_word(path).endswith("scale") else _replace_newest(old, jnp.maximum(old, new))
        is_finite, is_used = jnp.isfinite(new), new > 0
        ran = is_finite.all(-1, keepdims=True) & is_used.any(-1, keepdims=True)
        return jnp.where(ran, new if is_first is True else jnp.where(is_first, new, later), old)

    return jax.tree_util.tree_map_with_path(next_leaf, old, new)


def zero_unused(gradient: T) -> T:
    """Puts zero for the least float, which the maximum over no use gives the state of a layer that did not run."""
    return jax.tree.map(lambda leaf: jnp.maximum(leaf, 0.0), gradient)


@contextlib.contextmanager
def explain_reuse() -> Iterator[None]:
    """Says what to do where JAX cannot add arrays of the dtype that is combined by max.

    Raises:
      ValueError: a layer with state was used twice, outside of `jax.jit`; or `jax.vmap` selects whether it is used.
    """
    try:
        yield
    except KeyError as error:
        if "EArray" not in str(error):
            raise
        raise ValueError(
            "A float8 layer with state was used twice outside of jax.jit, where JAX cannot take the maximum of what "
            "both uses saw. For example: loss, grads = jax.jit(jmp.value_and_grad(loss_fn, loss_scale=scale))(params)."
        ) from error
    except TypeError as error:
        if "reduce_sum does not accept dtype fp8" not in str(error):
            raise
        raise ValueError(
            "A float8 layer with state is in a branch for each example of jax.vmap, over which JAX cannot take the "
            "maximum of what the layer saw. Loop over the examples. For example: jax.lax.map(of_example, examples)."
        ) from error


def _name_leaves(paths: Sequence[KeyPath]) -> list[str]:
    if not _is_suspect(paths):  # as most trees
        return [""] * len(paths)
    # State has the six names beside each other, or Flax's name anywhere above.
    places, siblings = [_words(path) for path in paths], defaultdict(set)
    for *place, name in places:
        siblings[*place].add(name)
    is_product = {place: names >= STATE_NAMES for place, names in siblings.items()}
    is_state = [OVERWRITE in words or (words[-1] in STATE_NAMES and is_product[*words[:-1]]) for words in places]
    return [words[-1] if state else "" for words, state in zip(places, is_state, strict=True)]


def _is_suspect(paths: Sequence[KeyPath]) -> bool:
    """Whether some key may be the name of state; one call of C, where a look at each key would take many."""
    text = repr(paths)
    return OVERWRITE in text or _HISTORY in text


def _check_complete(paths: Sequence[KeyPath]) -> None:
    """Checks that of the leaves that are no state, at these paths, none has a name of state."""
    for path in paths if _is_suspect(paths) else []:
        name = _last_word(path)
        if _HISTORY in name and name in STATE_NAMES:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} is the amax history of a float8 layer by its name, and would be "
                "differentiated as a parameter: it stands without the rest of its layer's state. Keep that together, "
                "for example: params = {'w': w, 'state': jmp.quant.float8_state('float8')}."
            )


def _last_word(path: KeyPath) -> str:
    return _words(path[-2:])[-1]


def _words(path: KeyPath) -> list[str]:
    """The names along a path, those within a key too, as a flattened tree has them; `[""]` for a leaf alone."""
    text = "/".join(map(_text, path)).removesuffix("/value")  # which an nnx Variable puts after its name
    return re.findall(r"\w+", text) or [""]


def _text(key: object) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))))


def _replace_newest(history: jax.Array, other: jax.Array) -> jax.Array:
    return history.at[..., 0].set(other[..., 0])


def _max_dtype() -> Any:
    # By name and here, because the core does without Flax. Whoever has such state has imported more of it than this.
    return importlib.import_module("flax.linen.fp8_ops").fp32_max_grad


@jax.custom_vjp
def _scale(state: jax.Array, loss_scale: jax.Array) -> jax.Array:
    """Turns state of true gradients into state of scaled ones; its cotangent, the next state, is of true ones again."""
    return state * loss_scale


def _scale_backward(loss_scale: jax.Array, new: jax.Array) -> tuple[jax.Array, None]:
    return new / loss_scale, None


_scale.defvjp(lambda state, loss_scale: (_scale(state, loss_scale), loss_scale), _scale_backward)
