"""The norm of the gradients of parameters, among which float8 state does not count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from float8_problem import STATE, variables_of
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp

VARIABLES = variables_of()
NORM = np.sqrt(sum(np.sum(np.asarray(w, np.float64) ** 2) for w in VARIABLES["params"].values()))
PLACES = {
    "in a collection": VARIABLES,
    "bare": {"w": VARIABLES["params"], "fp8": VARIABLES[STATE]},
    "in nnx": nnx.State({n: {"w": nnx.Param(w), STATE: VARIABLES[STATE][n]} for n, w in VARIABLES["params"].items()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_float8_state_does_not_count(place):
    of_all = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(PLACES[place])))
    assert of_all > 1.01 * NORM
    # 512 squares and their sum are rounded in float32; 2^-20 is 16 roundings.
    np.testing.assert_allclose(jax.jit(jmp.optim.global_norm)(PLACES[place]), NORM, rtol=2**-20)
    bad = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), PLACES[place])
    assert not jnp.isfinite(jmp.optim.global_norm(bad))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64"])
def test_the_norm_is_that_of_float64_in_every_dtype(dtype):
    numbers = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        turn = 1 + 2j if dtype == "complex64" else 1.0
        x = jnp.asarray(numbers.normal(scale=300, size=(3, 50)) * turn, dtype)
        norm = jmp.optim.global_norm({"a": x, "b": [jnp.ones(2, jnp.float32)]})
        wide = np.asarray(x).astype(np.complex128)
    expected = np.sqrt((np.abs(wide) ** 2).sum() + 2)
    np.testing.assert_allclose(float(norm), expected, rtol=2**-20)
    assert norm.dtype == ("float64" if dtype == "float64" else "float32")


def test_integers_and_empty_trees_count_as_zero():
    grads = jax.grad(lambda p: p["w"] * 3.0, allow_int=True)({"w": 2.0, "n": jnp.arange(2)})
    assert float(jmp.optim.global_norm(grads)) == 3.0
    assert float(jmp.optim.global_norm({"n": jnp.arange(3), "none": None})) == 0.0


AXES = ("data", "fsdp")
SPLIT = {"split": P("fsdp"), "on both": P(AXES), "whole": P()}
GRADS = {
    "split": jnp.linspace(-3, 3, 8, dtype=jnp.float32),
    "on both": jnp.linspace(1, 2, 8, dtype=jnp.bfloat16),
    "whole": jnp.full(3, 2.0),
}


def clip_on_shards(specs, clip, **options):
    mesh = make_mesh((2, 2), AXES, axis_types=(AxisType.Auto,) * 2)
    update = lambda grads: clip.update(grads, clip.init(grads))[0]
    return jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=specs, **options))


@pytest.mark.parametrize("max_norm", [2.0, pytest.param(100.0, marks=pytest.mark.slow)])
def test_parts_are_clipped_as_the_whole_is_with_one_psum(max_norm):
    clip = clip_on_shards(SPLIT, jmp.optim.clip_by_global_norm(max_norm, axis_name=AXES))
    whole, _ = jmp.optim.clip_by_global_norm(max_norm).update(GRADS, ())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-7), *jax.device_get((clip(GRADS), whole)))
    wide = jax.tree.map(lambda grad: np.asarray(grad, np.float64), GRADS)
    norm = np.sqrt(sum((grad**2).sum() for grad in wide.values()))
    np.testing.assert_allclose(clip(GRADS)["split"], wide["split"] * min(1, max_norm / norm), rtol=2**-20)
    rows = jmp.numerics.collectives(clip, compiled=False)(GRADS).rows
    (row,) = rows
    assert (row.kind, row.dtype, row.shape, row.axes, row.count) == ("all-reduce", "float32", (), AXES, 1)
    # Where JAX does not tell which arrays are whole, each is a part.
    parts = {"a": jnp.full(4, 3.0)}
    unchecked = clip_on_shards(P(AXES), jmp.optim.clip_by_global_norm(max_norm / 2, AXES), check_vma=False)
    np.testing.assert_allclose(unchecked(parts)["a"], min(3.0, max_norm / 4), rtol=2**-20)


def test_float8_state_is_not_clipped_and_half_gradients_do_not_overflow():
    grads = {**VARIABLES, "half": jnp.full(3, 60000, jnp.float16), "n": jnp.arange(2)}
    clipped, state = jmp.optim.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    assert state == optax.EmptyState()
    jax.tree.map(np.testing.assert_array_equal, clipped[STATE], grads[STATE])
    np.testing.assert_array_equal(clipped["n"], grads["n"])
    np.testing.assert_allclose(clipped["half"].astype(np.float32), 3**-0.5, rtol=2**-9)
    np.testing.assert_allclose(jmp.optim.global_norm(clipped), 1.0, rtol=2**-9)


def test_a_norm_that_nothing_can_have_is_refused():
    with pytest.raises(
        ValueError, match=r"^max_norm must be positive, got 0\. For example: clip_by_global_norm\(1\.0\)\.$"
    ):
        jmp.optim.clip_by_global_norm(0)
