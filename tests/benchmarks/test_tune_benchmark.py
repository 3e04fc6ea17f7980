"""The benchmark of `tune` runs, and what it must not exceed holds."""

import jax
import pytest

from benchmarks.tune import RANKINGS, search_plantings, tune_chains

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.mark.parametrize("ranking", RANKINGS)
def test_all_culprits_are_found_whatever_the_ranking(ranking):
    plantings = [*search_plantings(ranking, 100)]
    assert [planting for planting in plantings if planting.missed or planting.extra] == []
    if ranking in RANKINGS[:2]:
        assert all(planting.trials <= planting.bound for planting in plantings)


@pytest.mark.exhaustive
def test_chains_in_float16_are_tuned_in_few_trials():
    with jax.numpy_dtype_promotion("standard"):
        for _, planting in tune_chains(range(3)):
            assert planting.missed == 0
            assert planting.extra <= 1
            assert planting.trials <= planting.bound
