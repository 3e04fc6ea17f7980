"""The rows of steps, together again: what they say of all steps is what the arrays of all steps say."""

import numpy as np
import pytest
from records import FORMATS, SHAPE, make_layout, make_record, make_site

from jmp_policy.numerics import Stats, StatsHistory

SITES = make_site("a"), make_site("a"), make_site("b", direction="backward", turn=(0, 1))  # two share a site
SUMS = {"rms": 1e-14, "error": 1e-14, "scaled_error": 1e-14}  # float64; all else comes back as it was


def make_stats(seed, sites=SITES, histogram=True, formats=FORMATS):
    rng = np.random.default_rng(seed)
    tensors = [rng.normal(size=SHAPE) * 2.0 ** rng.uniform(-40, 20, SHAPE) for _ in sites]
    tensors[0][0, :3] = 0, np.nan, np.inf
    tensors[-1][:] = 0
    return Stats(make_record(tensors, formats, histogram), make_layout(*sites, formats=formats, histogram=histogram))


def make_history(*all_stats):
    history = StatsHistory()
    for step, stats in enumerate(all_stats):
        history.append(step, stats)
    return history


def check_same(rows, expected):
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        found, known = row.to_dict(), wanted.to_dict()
        for plain in (found, known):  # numbers of formats beside the others
            for name, shares in plain.pop("formats").items():
                plain |= {f"{name} {key}": value for key, value in shares.items()}
        assert found.keys() == known.keys()
        for key, value in known.items():
            bound = SUMS.get(key.rpartition(" ")[2])
            assert found[key] == (value if bound is None else pytest.approx(value, rel=bound)), key


@pytest.mark.parametrize("histogram", [True, False])
def test_one_step_is_what_it_was(histogram):
    stats = make_stats(0, histogram=histogram)
    merged = make_history(stats).merge()
    check_same(merged.rows(), stats.rows())
    assert merged.layout.sites == stats.layout.sites


@pytest.mark.slow
def test_all_steps_are_what_their_arrays_are_when_merged():
    parts = [make_stats(seed) for seed in range(3)]
    expected = parts[0].merge(parts[1]).merge(parts[2])
    check_same(make_history(*parts).merge().rows(), expected.rows())


def test_large_counts_come_back_exactly():
    stats = make_stats(0)
    for _ in range(50):  # 2**50 times as many numbers: more than a word holds
        stats = stats.merge(stats)
    check_same(make_history(stats).merge().rows(), stats.rows())


def test_steps_read_from_a_file_merge_as_well():
    history = make_history(make_stats(0), make_stats(1))
    again = StatsHistory.from_json_lines(history.to_json_lines().splitlines())
    check_same(again.merge().rows(), history.merge().rows())
    assert str(again.merge()) == str(history.merge())


def test_a_row_that_a_step_lacks_is_of_the_others():
    first, second = make_stats(0), make_stats(1, SITES[:2], formats=FORMATS[1:])
    merged = make_history(first, second).merge()
    assert [row.times for row in merged] == [2, 2, 1]
    assert merged.layout.meter.formats == FORMATS[1:]  # those that all have
    assert merged.rows()[0].amax == max(first.rows()[0].amax, second.rows()[0].amax)
    assert merged.rows()[2].zeros == 1


def test_no_steps_are_no_rows():
    assert StatsHistory().merge().rows() == ()
