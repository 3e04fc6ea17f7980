"""The search alone, over oracles that are plain functions; and how far two results are apart, against float64."""

import math
import random
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# Hundreds of searches, of which `tune` would compile each trial, and errors that no trial has.
from jmp_policy.numerics._tune_search import find_smallest_set
from jmp_policy.numerics._tuning import FLOOR, measure_largest_error


def plant(culprits):
    return lambda kept: 0.0 if culprits <= kept else 1.0


def draw_plantings(count, rng):
    """Sizes and culprits: 1 to 4 among 12 to 96 items."""
    return [(rng.randint(12, 96), rng.randint(1, 4)) for _ in range(count)]


def bound(size, number):
    return 2 * math.log2(size) + 2 * number


def test_a_useful_ranking_needs_few_trials():
    """The culprits are among the first, with up to three others: what a prediction gives."""
    rng, shares = random.Random(0), []
    for size, number in draw_plantings(100, rng):
        culprits = set(rng.sample(range(min(size, number + rng.randint(0, 3))), number))
        found = find_smallest_set(plant(culprits), size, 0.5)
        assert found.kept == culprits
        assert found.is_minimal
        assert found.trials <= bound(size, number)
        shares.append(found.trials / bound(size, number))
    assert statistics.mean(shares) <= 0.55  # 0.45 and 0.48


@pytest.mark.parametrize("order", ["random", "reversed"])
def test_a_ranking_that_misleads_finds_all_the_same(order):
    rng, excess = random.Random(1), []
    for size, number in draw_plantings(100, rng):
        culprits = set(rng.sample(range(size), number)) if order == "random" else set(range(size - number, size))
        found = find_smallest_set(plant(culprits), size, 0.5)
        assert (found.kept, found.is_minimal) == (culprits, True)
        excess.append(found.trials - math.log2(math.comb(size, number)))
    assert statistics.mean(excess) <= 7  # above the information bound: 6.0 and 1.4
    assert max(excess) <= 16


def test_nothing_and_everything_needed_are_found():
    found = find_smallest_set(plant(set()), 96, 0.5)
    assert (found.kept, found.is_minimal, found.trials) == (frozenset(), True, 1)
    found = find_smallest_set(plant(set(range(12))), 12, 0.5)
    assert found.kept == set(range(12))
    assert found.trials <= 24
    assert find_smallest_set(plant(set()), 0, 0.5).trials == 0
    assert find_smallest_set(lambda kept: 0.5, 8, 0.5).kept == set()  # the tolerance itself is within it
    assert find_smallest_set(lambda kept: 0.0 if 5 in kept else math.nan, 8, 0.5).kept == {5}


@pytest.mark.parametrize("budget", range(1, 20))
def test_a_budget_is_kept_and_what_it_found_is_within_the_tolerance(budget):
    asked = []

    def oracle(kept):
        asked.append(kept)
        return plant({3, 30, 60})(kept)

    found = find_smallest_set(oracle, 64, 0.5, budget=budget)
    assert len(asked) == found.trials <= budget
    assert found.kept >= {3, 30, 60}
    assert len(found.kept) == 64 or found.kept in asked
    assert found.is_minimal == (found.kept == {3, 30, 60})


def test_no_set_is_asked_for_twice():
    rng = random.Random(2)
    for size, number in draw_plantings(30, rng):
        asked, oracle = [], plant(set(rng.sample(range(size), number)))
        find_smallest_set(lambda kept, asked=asked, oracle=oracle: asked.append(kept) or oracle(kept), size, 0.5)
        assert len(asked) == len(set(asked))


@pytest.mark.parametrize("tolerance", [0.5, 0.1, 0.03])
def test_errors_that_add_up_leave_a_set_of_which_nothing_can_be_left_out(tolerance):
    """As of rounding: each item has an error of its own, and their squares add up."""
    rng = random.Random(3)
    for _ in range(20):
        own = sorted((math.exp(rng.gauss(-5, 1.5)) for _ in range(48)), reverse=True)
        oracle = lambda kept, own=own: math.sqrt(sum(e * e for i, e in enumerate(own) if i not in kept))
        found = find_smallest_set(oracle, 48, tolerance)
        assert oracle(found.kept) <= tolerance
        assert all(oracle(found.kept - {item}) > tolerance for item in found.kept)
        best = next(n for n in range(49) if oracle(frozenset(range(n))) <= tolerance)
        assert len(found.kept) <= best + 1


def relative(got, wanted, least=0.0):
    difference = np.linalg.norm(np.float64(got).ravel() - np.float64(wanted).ravel())
    return difference / max(np.linalg.norm(np.float64(wanted).ravel()), least)


def measure(got, wanted):
    return float(jax.jit(measure_largest_error)({"gradients": got}, {"gradients": wanted}))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_error_is_that_of_the_worst_leaf(size):
    rng = np.random.default_rng(0)
    wanted = {"a": np.float32(size * rng.normal(size=(40, 30))), "b": np.float32(size * rng.normal(size=7))}
    got = {name: np.float32(leaf * (1 + 1e-2 * rng.normal(size=leaf.shape))) for name, leaf in wanted.items()}
    expected = max(relative(got[name], wanted[name]) for name in wanted)
    assert measure(got, wanted) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_leaf_that_cancels_is_held_against_the_others_of_its_tree():
    wanted = {"kernel": np.ones(100, np.float32), "bias": np.full(4, 1e-9, np.float32)}
    got = wanted | {"bias": np.full(4, 1e-2, np.float32)}
    least = FLOOR * np.sqrt(100 / 104) * 2  # the root of the mean square of all, times that of four numbers
    assert measure(got, wanted) == pytest.approx(relative(got["bias"], wanted["bias"], least), rel=1e-4)
    outputs = {"outputs": jnp.float32(1e6)}  # another tree
    trial, reference = (outputs | {"gradients": jnp.full(4, value)} for value in (1.5e-6, 1e-6))
    assert float(measure_largest_error(trial, reference)) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("bad", "shape"), [(jnp.nan, (5000,)), *[pytest.param(jnp.inf, s, marks=pytest.mark.slow) for s in ((), (5000,))]]
)
def test_what_is_not_finite_is_out_of_any_tolerance(bad, shape):
    reference = jnp.ones(shape)
    assert measure(reference.at[(..., -1) if shape else ...].set(bad), reference) == jnp.inf
    assert measure(reference, reference) == 0


@pytest.mark.slow
def test_zeros_half_complex_and_other_leaves():
    assert [measure(jnp.full(3, got), jnp.zeros(3)) for got in (0.0, 1e-3)] == [0.0, jnp.inf]
    leaves = {"half": jnp.ones(3, jnp.bfloat16), "complex": jnp.ones(2, complex), "step": 3, "empty": jnp.ones(0)}
    assert measure(leaves, leaves) == 0
    assert 0.05 < measure({**leaves, "complex": jnp.array([1.0, 1.0 + 0.1j]), "step": 4}, leaves) < 200
