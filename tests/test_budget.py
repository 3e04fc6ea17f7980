"""The budget of the default tests, and which cases they run."""

import pathlib

import budget
import pytest
import sampling


def test_each_test_that_exceeds_its_part_of_a_run_is_named():
    seconds = {f"tests/a.py::test_{i}": 1.0 for i in range(64)} | {"tests/quant/a.py::test_d": 9.0}
    (line,) = budget.find_excess({**seconds, "tests/a.py::test_b[1]": 1.3})
    assert line.startswith("Over the budget: tests/a.py::test_b[1] took 1.3 of 74 CPU seconds, limit 1.2.")
    assert budget.find_excess(seconds) == []


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
    assert any(request.node.iter_markers("slow")) == (number in (1, 6))


def test_a_few_cases_are_spread_over_all():
    assert sampling.spread(4, 3) == {0, 1, 2}
    assert sampling.spread(0, 3) == set()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_of_a_slow_test_two_cases_are_slow(request, number):
    assert any(request.node.iter_markers("exhaustive")) == (number not in (0, 4))
