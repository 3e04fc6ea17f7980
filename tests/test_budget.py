"""The budget of the default tests, and which cases they run."""

import pathlib

import budget
import pytest
import sampling


def test_each_limit_that_a_run_exceeds_is_named():
    seconds = {"tests/a.py::test_b[1]": 8.1, "tests/a.py::test_c": 7.9, "tests/quant/a.py::test_d": 12.0}
    both = budget.find_excess(970.0, seconds)
    assert [line.partition(" took ")[0] for line in both] == [
        "Over the budget: all tests",
        "Over the budget: tests/a.py::test_b[1]",
    ]
    assert budget.find_excess(950.0, {"tests/a.py::test_c": 7.9}) == []


def test_what_may_take_longer_exists():
    root = pathlib.Path(__file__).parent.parent
    assert [path for path in budget.EXPENSIVE if not (root / path).exists()] == []


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("letter", "abcd")
def test_a_product_runs_each_value_by_default(request, number, letter):
    """Of the twelve cases only the diagonal is neither slow nor exhaustive."""
    kept = not any(request.node.iter_markers("slow")) and not any(request.node.iter_markers("exhaustive"))
    assert kept == (number == "abcd".index(letter) % 3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(10))
def test_a_sample_is_spread_over_the_cases(request, number):
    kept = not any(request.node.iter_markers("slow")) and not any(request.node.iter_markers("exhaustive"))
    assert kept == (number in (0, 5))
    assert any(request.node.iter_markers("slow")) == (number in (1, 3, 6, 8))


def test_a_few_cases_are_spread_over_all():
    assert sampling.spread(4, 3) == {0, 1, 2}
    assert sampling.spread(0, 3) == set()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_of_a_slow_test_four_cases_are_slow(request, number):
    assert any(request.node.iter_markers("exhaustive")) == (number % 2 == 1)
