"""The check that the library uses misses nothing, and the benchmark sees what cheaper ones miss."""

import pytest

from benchmarks import finite_check

pytestmark = pytest.mark.cpu("the figures are those of XLA:CPU")


@pytest.mark.slow
def test_isfinite_misses_nothing_and_writes_a_byte_for_each_number():
    figures = finite_check.measure(finite_check.CHECKS["isfinite(x).all()"], "float32")
    assert figures["missed"] == 0
    assert figures["accessed"] <= 1.55
    assert figures["temporaries"] <= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["isfinite(max(abs(x)))", "sum(x * 0) == 0", "sum(x - x) == 0"])
def test_cheaper_checks_miss_something(name):
    """If one of them stops doing so, XLA has changed, and the choice can be made again."""
    assert finite_check.measure(finite_check.CHECKS[name], "float32")["missed"] > 0
