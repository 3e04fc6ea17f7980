"""Where the arrays of a run lie on its mesh: parameters and optimizer by name, batches and activations by rows.

The functions that run inside `jit` look at the mesh that `jax.set_mesh` has set. Where none is, they return what they
are given, and the program is that of one device.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jmp_policy._base import PyTree

from ._mesh import AXES

ROWS = "data", "fsdp"
"""The axes along which a batch is split."""

# Megatron's: what a layer widens is split along tensor by its outputs, what narrows it again by its inputs, and so each
# pair of them costs one sum of activations. The other dimension is split along fsdp. What is not here is copied.
_RULES = (
    (re.compile(r"\bembed\.embedding$"), P("tensor", "fsdp")),
    (re.compile(r"\bpositions\.embedding$"), P(None, "fsdp")),
    (re.compile(r"\b(qkv|expand)\.kernel$"), P("fsdp", "tensor")),
    (re.compile(r"\b(project|contract)\.kernel$"), P("tensor", "fsdp")),
    (re.compile(r"\bexpand\.bias$"), P("tensor")),
)


def find_spec(path: jax.tree_util.KeyPath) -> P:
    """How an array of the state is split: a parameter, its gradient, or what the optimizer keeps of it.

    >>> find_spec(tuple(map(jax.tree_util.DictKey, ("mu", "blocks_0", "attention", "qkv", "kernel"))))
    P('fsdp', 'tensor')
    """
    name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")  # an nnx.Variable's
    return next((spec for pattern, spec in _RULES if pattern.search(name)), P())


def shard_state(tree: PyTree) -> PyTree:
    """Has the arrays of a state lie as `find_spec` says, inside `jit`.

    Without it XLA decides how the new state lies, and compiles the next step anew where that is not as it was.
    """
    if not _has_mesh():
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.lax.with_sharding_constraint(leaf, find_spec(path)), tree
    )


def shard_rows(x: jax.Array, *others: str | None) -> jax.Array:
    """Has activations lie as the rows of a batch, inside `jit`: copied along the other axes, but for those named.

    Without it XLA may split the channels of activations as it finds parameters split, and move both.

    Args:
      x: `(batch, ...)`.
      others: the axis along which each further dimension is split, or `None`.
    """
    if not _has_mesh():
        return x
    return jax.lax.with_sharding_constraint(x, P(ROWS, *others))


def shard_channels(x: jax.Array) -> jax.Array:
    """Has embeddings `(batch, length, channels)` lie as a lookup makes them of a split table, inside `jit`.

    Each device looks the tokens of others up, too, in its channels of the table. To change to `shard_rows` then moves
    each activation once, where XLA would give every device all activations of the batch.
    """
    if not _has_mesh():
        return x
    return jax.lax.with_sharding_constraint(x, P("data", None, "fsdp"))


def _has_mesh() -> bool:
    return set(AXES) <= set(jax.sharding.get_abstract_mesh().axis_names)


def place_state(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts a state, which every process has whole, onto a mesh."""

    def place(path: jax.tree_util.KeyPath, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf  # of a checkpoint, which is read to where it belongs
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(
            whole.shape, NamedSharding(mesh, find_spec(path)), lambda index: whole[index]
        )

    return jax.tree_util.tree_map_with_path(place, tree)


def make_batch(draw: Callable[[slice], np.ndarray], shape: tuple[int, ...], mesh: Mesh) -> jax.Array:
    """Makes a batch that is split along its rows, of which each process draws its own alone.

    Args:
      draw: returns some rows of the batch; the same whichever process asks.
      shape: that of the whole batch.
      mesh: where it lies.
    """

    # Not `make_array_from_process_local_data`: it asks which rows are whose, and along tensor processes share some.
    def draw_part(index: Any) -> np.ndarray:
        rows, _ = index
        return draw(rows)

    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(ROWS)), draw_part)


def place_batches(batches: np.ndarray, mesh: Mesh) -> list[jax.Array]:
    """Puts batches, which every process has, onto a mesh."""
    return [make_batch(batch.__getitem__, batch.shape, mesh) for batch in batches]
