"""How far two results are apart, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy.numerics._tuning import FLOOR, measure_largest_error


def relative(got, wanted, least=0.0):
    difference = np.linalg.norm(np.float64(got).ravel() - np.float64(wanted).ravel())
    return difference / max(np.linalg.norm(np.float64(wanted).ravel()), least)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_error_is_that_of_the_worst_leaf(size):
    rng = np.random.default_rng(0)
    wanted = {"a": np.float32(size * rng.normal(size=(40, 30))), "b": np.float32(size * rng.normal(size=7))}
    got = {name: np.float32(leaf * (1 + 1e-2 * rng.normal(size=leaf.shape))) for name, leaf in wanted.items()}
    expected = max(relative(got[name], wanted[name]) for name in wanted)
    assert float(measure_largest_error({"gradients": got}, {"gradients": wanted})) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_trees_have_measures_of_their_own():
    reference = {"outputs": jnp.float32(1e6), "gradients": jnp.full(4, 1e-6)}
    trial = {"outputs": jnp.float32(1e6), "gradients": jnp.full(4, 1.5e-6)}
    assert float(measure_largest_error(trial, reference)) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.slow
def test_a_leaf_that_cancels_is_held_against_the_others():
    wanted = {"kernel": np.ones(100, np.float32), "bias": np.full(4, 1e-9, np.float32)}
    got = {"kernel": np.ones(100, np.float32), "bias": np.full(4, 1e-2, np.float32)}
    least = FLOOR * np.sqrt(100 / 104) * 2  # the root of the mean square of all, times that of four numbers
    expected = relative(got["bias"], wanted["bias"], least)
    assert float(measure_largest_error({"g": got}, {"g": wanted})) == pytest.approx(expected, rel=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("shape", [(), (5000,)])
def test_what_is_not_finite_is_out_of_any_tolerance(bad, shape):
    reference = {"outputs": jnp.ones(shape)}
    trial = {"outputs": jnp.ones(shape).at[(..., -1) if shape else ...].set(bad)}
    assert float(jax.jit(measure_largest_error)(trial, reference)) == jnp.inf
    assert float(jax.jit(measure_largest_error)(reference, reference)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("got", "expected"), [(0.0, 0.0), (1e-3, jnp.inf)])
def test_against_nothing_but_zeros_any_difference_is_all_error(got, expected):
    assert float(measure_largest_error({"x": jnp.full(3, got)}, {"x": jnp.zeros(3)})) == expected


@pytest.mark.slow
def test_half_and_complex_and_other_leaves():
    leaves = {"half": jnp.ones(3, jnp.bfloat16), "complex": jnp.ones(2, complex), "step": 3, "empty": jnp.ones(0)}
    reference = {"x": leaves}
    trial = {"x": {**leaves, "complex": jnp.array([1.0, 1.0 + 0.1j]), "step": 4}}
    assert float(measure_largest_error(reference, reference)) == 0
    assert 0.05 < float(measure_largest_error(trial, reference)) < 200
