"""The rows that `python -m benchmarks.architectures` prints."""

import numpy as np
import pytest

from benchmarks.architectures.__main__ import figures
from benchmarks.architectures._training import LAST, Run


def run(*finals: float, skipped: int = 0) -> Run:
    losses = np.array([[5.0] + [final] * LAST for final in finals])
    return Run(losses, np.full(len(finals), skipped), params=None)


def test_a_distance_is_in_deviations_of_the_seeds_of_float32():
    reference = run(1.0, 2.0, 3.0)
    assert reference.final.tolist() == [1.0, 2.0, 3.0]
    assert run(3.0, 3.0, 4.5).distance(reference) == pytest.approx(1.5)


def test_rows_say_where_losses_began_and_ended():
    reference = run(1.0, 2.0, 3.0)
    assert figures(reference, reference) == ["5.000", "2.0000 ± 1.0000", "", "0.0"]
    assert figures(run(1.5, 1.5, 1.5, skipped=6), reference) == ["5.000", "1.5000 ± 0.0000", "-0.50", "6.0"]
