"""State whose gradient is its next value: the scales and histories of float8 layers, among parameters.

In any tree, of variables, gradients or optimizer states, it is known by its names. Flax keeps it under a name of its
own, in a collection of linen's or an attribute of nnx's. Elsewhere, the names of all that one product has tell.
"""

import contextlib
import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any

OVERWRITE = "_overwrite_with_gradient"
"""The key of float8 state in a mapping, as `flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT`; no cast may touch it."""

STATE_NAMES = frozenset(
    f"{operand}_{kind}" for operand in ("input", "kernel", "output_grad") for kind in ("scale", "amax_history")
)
"""The names of the state of one product in float8: a mapping with all of them holds state, wherever it stands."""

_OUTPUT_GRAD = "output_grad_"
"""What the names of leaves begin with that tell of gradients, and so grow with the loss scale."""
_HISTORY = "amax_history"


def has_state(tree: PyTree) -> bool:
    """Whether a tree holds such state."""
    return any(name_state(tree))


def name_state(tree: PyTree) -> list[str]:
    """Of each leaf the name that it has as state, or `""`."""
    texts = [_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    if not any(OVERWRITE in text or _HISTORY in text for text in texts):  # as in most trees, and this is quick
        return [""] * len(texts)
    paths, siblings = [_words(text) for text in texts], defaultdict(set)
    for *place, name in paths:
        siblings[*place].add(name)
    is_product = {place: names >= STATE_NAMES for place, names in siblings.items()}
    is_state = [OVERWRITE in path or (path[-1] in STATE_NAMES and is_product[*path[:-1]]) for path in paths]
    return [path[-1] if state else "" for path, state in zip(paths, is_state, strict=True)]


def map_state(fun: Callable[..., Any], tree: PyTree, *rest: PyTree, otherwise: Callable[..., Any]) -> PyTree:
    """`jax.tree.map` of `fun` for leaves of such state, and of `otherwise` for all others."""
    return _map_named(lambda name, *leaves: (fun if name else otherwise)(*leaves), tree, *rest)


def _map_named(fun: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` of a function that is also given the name of a leaf of state, and of any other leaf `""`."""
    leaves, structure = jax.tree.flatten(tree)
    rows = zip(name_state(tree), leaves, *map(structure.flatten_up_to, rest), strict=True)
    return structure.unflatten([fun(*row) for row in rows])


def prepare_state(tree: PyTree, loss_scale: Any) -> PyTree:
    """What to differentiate instead of a tree: its state is scaled as gradients are, and autodiff combines it by max.

    Where state is used more than once, by a layer that is called again or in the steps of a scan, autodiff would sum
    its cotangents. It takes their maximum, if they are of this dtype of Flax's from here on.

    Args:
      tree: a tree of arrays, in which state is float32.
      loss_scale: what the loss is multiplied by, a scalar. What a float8 layer sees in its backward pass is
        multiplied by it too.

    Raises:
      ValueError: a leaf is an amax history by its name, and without the other state of its product.
    """
    _check_complete(tree)
    return _map_named(lambda name, leaf: prepare_leaf(name, leaf, loss_scale) if name else leaf, tree)


def _check_complete(tree: PyTree) -> None:
    for name, (path, _) in zip(name_state(tree), jax.tree_util.tree_leaves_with_path(tree), strict=True):
        text = _text(path)
        if not name and _HISTORY in text and _words(text)[-1] in STATE_NAMES:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} is the amax history of a float8 layer by its name, and would be "
                "differentiated as a parameter: it stands without the rest of its layer's state. Keep that together, "
                "for example: params = {'w': w, 'state': jmp.quant.float8_state('float8')}."
            )


def prepare_leaf(name: str, leaf: Any, loss_scale: Any) -> jax.Array:
    """One leaf of state, of this name, as `prepare_state` makes it."""
    if is_prepared(leaf):
        return leaf
    is_one = isinstance(loss_scale, float) and loss_scale == 1.0  # that of a `NoOpLossScale` costs no operation
    scaled = _scaled(leaf, loss_scale) if name.startswith(_OUTPUT_GRAD) and not is_one else leaf
    return lax.convert_element_type(scaled, _max_dtype())


def is_prepared(leaf: Any) -> bool:
    """Whether autodiff combines the cotangents of an array by max."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def read_leaf(leaf: jax.Array) -> jax.Array:
    """A leaf of state as numbers to compute with."""
    return lax.convert_element_type(leaf, jnp.float32)


def write_leaf(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """Numbers as the cotangent of a leaf of state."""
    return lax.convert_element_type(values, leaf.dtype)


def next_state(old: PyTree, new: PyTree, is_first: Any = True) -> PyTree:
    """The next state.

    A layer that did not run has no gradient, which is to say zeros, where a scale is positive: it keeps its state. So
    does one whose gradient is not finite: operations of Flax's own clip an infinity, and remember it.

    Args:
      old: a tree of float32 arrays; leaves that are no state are passed on.
      new: its gradients.
      is_first: false in the second and later microbatches of one step, whose largest magnitudes are put beside those
        of the first.
    """

    def next_leaf(name: str, old: Any, new: Any) -> Any:
        if not name:
            return old
        later = old if name.endswith("scale") else _with_newest(old, jnp.maximum(old, new))
        is_finite, is_used = jnp.isfinite(new), new > 0
        ran = is_finite.all(-1, keepdims=True) & is_used.any(-1, keepdims=True)
        return jnp.where(ran, new if is_first is True else jnp.where(is_first, new, later), old)

    return _map_named(next_leaf, old, new)


def zero_unused(state: jax.Array) -> jax.Array:
    """The gradient of state, in which zero, and not the least number, stands for what did not run."""
    return jnp.maximum(state, 0.0)


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


def _with_newest(history: jax.Array, other: jax.Array) -> jax.Array:
    return history.at[..., 0].set(other[..., 0])


def _words(text: str) -> list[str]:
    """The names along a path, those within a key too, as a flattened tree has them; `[""]` of a leaf alone."""
    return re.findall(r"\w+", text) or [""]


def _text(path: Any) -> str:
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
    return "/".join(names).removesuffix("/value")  # of an nnx Variable, which comes after its name


def _max_dtype() -> Any:
    # By name and here, because the core does without Flax, of which who has such state has imported more than this.
    return importlib.import_module("flax.linen.fp8_ops").fp32_max_grad


@jax.custom_vjp
def _scaled(state: jax.Array, loss_scale: jax.Array) -> jax.Array:
    """State of true gradients as state of scaled ones; its cotangent, the next state, is of true ones again."""
    return state * loss_scale


def _scaled_backward(loss_scale: jax.Array, new: jax.Array) -> tuple[jax.Array, None]:
    return new / loss_scale, None


_scaled.defvjp(lambda state, loss_scale: (_scaled(state, loss_scale), loss_scale), _scaled_backward)
