"""The search alone, over oracles that are plain functions."""

import math
import random
import statistics

import pytest

from jmp_policy.numerics._tune_search import find_smallest_set


def plant(culprits):
    return lambda kept: 0.0 if culprits <= kept else 1.0


def draw_plantings(count, rng):
    """Sizes and culprits: 1 to 4 among 12 to 96 items."""
    for _ in range(count):
        size, number = rng.randint(12, 96), rng.randint(1, 4)
        yield size, number


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


@pytest.mark.sample(1)
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


def test_nothing_needed_is_one_trial():
    found = find_smallest_set(plant(set()), 96, 0.5)
    assert (found.kept, found.is_minimal, found.trials) == (frozenset(), True, 1)


def test_everything_needed_is_found():
    found = find_smallest_set(plant(set(range(12))), 12, 0.5)
    assert found.kept == set(range(12))
    assert found.trials <= 24


def test_no_items_are_no_trials():
    assert find_smallest_set(plant(set()), 0, 0.5).trials == 0


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


def test_nan_is_too_large():
    assert find_smallest_set(lambda kept: 0.0 if 5 in kept else math.nan, 8, 0.5).kept == {5}


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
