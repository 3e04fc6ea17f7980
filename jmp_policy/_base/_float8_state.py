"""Float8 state among parameters: scales and amax histories, whose gradient is their next value.

`split_state` takes the state out of a tree, and `join_state` puts the next state back. State is recognized by name in
any tree: below Flax's key (a collection of linen, an attribute of nnx), or by the six names of one layer's state.
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
KeyPath = tuple[Any, ...]

OVERWRITE = "_overwrite_with_gradient"  # as flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT
STATE_NAMES = frozenset(
    f"{operand}_{kind}" for operand in ("input", "kernel", "output_grad") for kind in ("scale", "amax_history")
)
_OUTPUT_GRAD = "output_grad_"  # prefix of the leaves that grow with the loss scale
_HISTORY = "amax_history"


def split_state(
    tree: T, placeholder: object = None, *, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[T, T | None]:
    """Splits a tree into the tree without its float8 state, and its state (None if there is none).

    Both results have the structure of the tree. In the first, `placeholder` (a pytree without leaves) replaces state;
    in the second, None replaces the other leaves.
    """
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    names = _name_leaves([path for path, _ in keyed])
    if not any(names):
        return tree, None
    rest = [placeholder if name else leaf for name, (_, leaf) in zip(names, keyed, strict=True)]
    state = [leaf if name else None for name, (_, leaf) in zip(names, keyed, strict=True)]
    return structure.unflatten(rest), structure.unflatten(state)


def join_state(tree: T, state: T | None) -> T:
    """Inverse of `split_state`."""
    if state is None:
        return tree
    return jax.tree.map(lambda leaf, other: other if leaf is None else leaf, state, tree, is_leaf=lambda x: x is None)


def map_rest(fun: Callable[[Any], Any], tree: T, *, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """Maps a function over the leaves that are not float8 state, in one walk."""
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    names = _name_leaves([path for path, _ in keyed])
    return structure.unflatten([leaf if name else fun(leaf) for name, (_, leaf) in zip(names, keyed, strict=True)])


def map_parts(map_rest: Callable[[T], T], map_state: Callable[[list[Any]], list[Any]], tree: T) -> T:
    """Maps the list of state leaves by one function, and the list of other leaves by another.

    Unlike `split_state`, this rebuilds the tree from leaves only: user classes may reject `None`. A tree without state
    is passed to `map_rest` whole.
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
    """Returns the state name of each leaf, and an empty string for other leaves."""
    return _name_leaves([path for path, _ in jax.tree_util.tree_leaves_with_path(tree)])


def prepare_state(tree: T, loss_scale: ArrayLike) -> T:
    """Prepares a tree for differentiation: scales float8 state like gradients, and combines its cotangents by max."""
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = _name_leaves([path for path, _ in keyed])
    _check_complete([path for name, (path, _) in zip(names, keyed, strict=True) if not name])
    if not any(names):
        return tree
    prepare = lambda name, leaf: prepare_leaf(name, leaf, loss_scale) if name else leaf
    return structure.unflatten([prepare(name, leaf) for name, (_, leaf) in zip(names, keyed, strict=True)])


def prepare_leaf(name: str, leaf: jax.Array, loss_scale: ArrayLike) -> jax.Array:
    if is_prepared(leaf):
        return leaf
    is_one = isinstance(loss_scale, float) and loss_scale == 1.0  # no operation for a `NoOpLossScale`
    scaled = _scale(leaf, loss_scale) if name.startswith(_OUTPUT_GRAD) and not is_one else leaf
    # Autodiff sums the cotangents of several uses. In Flax's extended dtype it takes their maximum.
    # Imported here, because the core does not depend on Flax. Models with such state have loaded Flax already.
    return lax.convert_element_type(scaled, importlib.import_module("flax.linen.fp8_ops").fp32_max_grad)


def is_prepared(leaf: jax.Array) -> bool:
    """True if autodiff combines the cotangents of this array by max."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def read_leaf(leaf: jax.Array) -> jax.Array:
    """Returns a leaf of state as float32."""
    return lax.convert_element_type(leaf, jnp.float32) if is_prepared(leaf) else leaf


def write_leaf(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """Returns values as the cotangent of a leaf of state."""
    return lax.convert_element_type(values, leaf.dtype)


def restore_state(tree: T) -> T:
    """Converts the prepared state of a tree back to float32, for storage."""
    rest, state = split_state(tree)
    # The derivative of the conversion fails in JAX 0.10, and stored state needs none.
    read = lambda leaf: lax.stop_gradient(read_leaf(leaf)) if is_prepared(leaf) else leaf
    return join_state(rest, jax.tree.map(read, state))


def next_state(old: T, new: T, is_first: bool | jax.Array = True) -> T:
    """Returns the state after gradient `new`, with magnitudes of earlier microbatches if `is_first` is False."""

    def next_leaf(path: KeyPath, old: jax.Array, new: jax.Array) -> jax.Array:
        later = old if _last_word(path).endswith("scale") else old.at[..., 0].set(jnp.maximum(old, new)[..., 0])
        is_finite, is_used = jnp.isfinite(new), new > 0
        # A layer that did not run has a gradient of zeros. Flax's own ops clip an infinity and would record it.
        ran = is_finite.all(-1, keepdims=True) & is_used.any(-1, keepdims=True)
        return jnp.where(ran, new if is_first is True else jnp.where(is_first, new, later), old)

    return jax.tree_util.tree_map_with_path(next_leaf, old, new)


def zero_unused(gradient: T) -> T:
    """Replaces the least float, the maximum over no uses, by zero: the layer did not run."""
    return jax.tree.map(lambda leaf: jnp.maximum(leaf, 0.0), gradient)


@contextlib.contextmanager
def explain_reuse() -> Iterator[None]:
    """Replaces JAX's errors about adding arrays of the extended dtype by an explanation."""
    try:
        yield
    except KeyError as error:
        if "EArray" not in str(error):
            raise
        raise ValueError(
            "A float8 layer with state was used twice outside of jax.jit, where JAX cannot combine its state by "
            "maximum. For example: loss, grads = jax.jit(jmp.value_and_grad(loss_fn, loss_scale=scale))(params)."
        ) from error
    except TypeError as error:
        if "reduce_sum does not accept dtype fp8" not in str(error):
            raise
        raise ValueError(
            "A float8 layer with state is in a branch that jax.vmap selects per example, where JAX cannot "
            "combine its state by maximum. Loop over the examples. For example: jax.lax.map(of_example, examples)."
        ) from error


def _name_leaves(paths: Sequence[KeyPath]) -> list[str]:
    if not _is_suspect(paths):
        return [""] * len(paths)
    # A leaf is state below Flax's key, or where all six names of a layer's state are siblings.
    places, siblings = [_words(path) for path in paths], defaultdict(set)
    for *place, name in places:
        siblings[*place].add(name)
    is_product = {place: names >= STATE_NAMES for place, names in siblings.items()}
    is_state = [OVERWRITE in words or (words[-1] in STATE_NAMES and is_product[*words[:-1]]) for words in places]
    return [words[-1] if state else "" for words, state in zip(places, is_state, strict=True)]


def _is_suspect(paths: Sequence[KeyPath]) -> bool:
    """True if a key may be a name of state. One C call is faster than a loop over keys."""
    text = repr(paths)
    return OVERWRITE in text or _HISTORY in text


def _check_complete(paths: Sequence[KeyPath]) -> None:
    """Raises if a leaf that is not state has the name of an amax history."""
    for path in paths if _is_suspect(paths) else []:
        name = _last_word(path)
        if _HISTORY in name and name in STATE_NAMES:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} has the name of a float8 layer's amax history, but the rest of "
                "that layer's state is missing, so it would be differentiated as a parameter. Keep the state together. "
                "For example: params = {'w': w, 'state': jmp.quant.float8_state('float8')}."
            )


def _last_word(path: KeyPath) -> str:
    return _words(path[-2:])[-1]


def _words(path: KeyPath) -> list[str]:
    """Splits a path into names, also those within the keys of a flattened tree. A bare leaf has the path `[""]`."""
    keys = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))) for key in path)
    text = "/".join(map(str, keys)).removesuffix("/value")  # the suffix of an nnx Variable
    return re.findall(r"\w+", text) or [""]


@jax.custom_vjp
def _scale(state: jax.Array, loss_scale: jax.Array) -> jax.Array:
    """Converts state of true gradients to state of scaled gradients; the cotangent is converted back."""
    return state * loss_scale


_scale.defvjp(
    lambda state, loss_scale: (_scale(state, loss_scale), loss_scale), lambda loss_scale, new: (new / loss_scale, None)
)
