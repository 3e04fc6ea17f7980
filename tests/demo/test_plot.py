"""The plots are written, whatever the losses are."""

import math

import pytest
from matplotlib.image import imread

from jmp_policy.demo._plot import plot_comparison, plot_run
from jmp_policy.report import find_style


@pytest.mark.parametrize("losses", [[3.0, 2.5, 2.0], [3.0, math.nan, 2.0], [math.nan], []])
def test_a_run_of_any_losses_has_a_plot(tmp_path, losses):
    steps = list(range(1, len(losses) + 1))
    plot_run(tmp_path / "loss.png", (steps, losses), (steps[-1:], losses[-1:]), {"unigram": 4.8, "bigram": 3.5})
    assert imread(tmp_path / "loss.png").std() > 0.01


@pytest.mark.parametrize("broken", [[3.0, math.inf], [math.nan, math.nan]])
def test_a_comparison_of_any_losses_has_a_plot(tmp_path, broken):
    losses = {"float32": [3.0, 2.0], "bfloat16": [3.0, 2.1], "float16": broken}
    styles = {name: find_style(name) for name in losses}
    plot_comparison(tmp_path / "loss.png", losses, styles, bytes_per_step=1024)
    assert imread(tmp_path / "loss.png").std() > 0.01
