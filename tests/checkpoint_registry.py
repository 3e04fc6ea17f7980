"""The policies that checkpoints are saved under and restored into, and numbers that tell how they were cast."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmp_policy as jmp


class Stored(NamedTuple):
    """A policy, and the dtypes that it stores the parameters of a model in: of its `head`, and of the rest."""

    policy: jmp.Policy | jmp.PolicyMap
    body: str
    head: str


STORED = {
    "float32": Stored(jmp.get_policy("float32"), "float32", "float32"),
    "mixed_bfloat16": Stored(jmp.get_policy("mixed_bfloat16"), "float32", "float32"),
    "bfloat16": Stored(jmp.get_policy("bfloat16"), "bfloat16", "bfloat16"),
    "float16": Stored(jmp.get_policy("float16"), "float16", "float16"),
    "map": Stored(jmp.PolicyMap({"head": "float32"}, "bfloat16"), "bfloat16", "float32"),
}
PAIRS = list(itertools.product(STORED, STORED))


def filled(abstract: Any) -> Any:
    """Arrays of the shapes and dtypes of a tree: floats that half precision rounds, flushes or lets overflow."""
    random = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(7)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.ones(leaf.shape, leaf.dtype)
        numbers = random.normal(size=leaf.shape) * 2.0 ** random.integers(-26, 20, size=leaf.shape)
        return jnp.asarray(numbers, jnp.float32).astype(leaf.dtype)

    return jax.tree.map(fill, abstract)


def assert_cast(restored: Any, saved: Any) -> None:
    """Every array of `restored` is the one of `saved`, cast as JAX casts to the dtype that it has."""

    def check(new: jax.Array, old: jax.Array) -> None:
        if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            new, old = jax.random.key_data(new), jax.random.key_data(old)
        np.testing.assert_array_equal(new, old.astype(new.dtype), strict=True)

    jax.tree.map(check, restored, saved)
