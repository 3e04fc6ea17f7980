"""The plots are written, whatever the losses are."""

import math

import pytest
from matplotlib.image import imread

import jmp_policy as jmp
from examples.gpt import _plot
from examples.gpt._plot import plot_comparison, plot_run
from jmp_policy.report import find_style


def draw(path, losses, scales, skipped=(), policy="mixed_float16"):
    steps = list(range(1, len(losses) + 1))
    plot_run(
        path,
        jmp.get_policy(policy),
        losses=(steps, losses),
        validation=(steps[-1:], losses[-1:]),
        baselines={"unigram": 4.8, "bigram": 3.5},
        scales=([0, *steps], scales),
        skipped=skipped,
    )


@pytest.mark.slow
@pytest.mark.parametrize("losses", [[3.0, 2.5, 2.0], [3.0, math.nan, 2.0], [math.nan], []])
def test_a_run_of_any_losses_has_a_plot(tmp_path, losses):
    draw(tmp_path / "loss.png", losses, [2.0**15] * (len(losses) + 1))
    assert imread(tmp_path / "loss.png").std() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "float8(min_size=0)_from_mixed_bfloat16"])
def test_a_run_without_a_loss_scale_has_a_plot(tmp_path, policy):
    draw(tmp_path / "loss.png", [3.0, 2.0], [1.0] * 3, skipped=[2], policy=policy)
    assert imread(tmp_path / "loss.png").std() > 0.01


def test_every_curve_has_a_label_and_every_axis_a_unit(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(_plot, "_save", lambda figure, axes, path: drawn.append(figure))
    draw(tmp_path / "loss.png", [3.0, 2.5, 2.0], [8.0, 4.0, 4.0, 8.0], skipped=[1])
    above, below = drawn[0].axes
    labels = ["training, each step", "training, mean of the last 20 steps", "validation"]
    assert above.get_legend_handles_labels()[1] == [*labels, "unigram baseline", "bigram baseline"]
    assert (above.get_ylabel(), below.get_ylabel(), below.get_xlabel()) == (
        "loss in bits per byte",
        "loss scale (a factor)",
        "step",
    )
    assert len({(line.get_linestyle(), line.get_linewidth()) for line in above.lines}) == 5
    scale, skips = below.lines
    assert (list(scale.get_xdata()), list(scale.get_ydata())) == ([0, 1, 2, 3], [8.0, 4.0, 4.0, 8.0])
    assert (list(skips.get_xdata()), list(skips.get_ydata())) == ([1], [8.0])  # the scale that overflowed
    assert skips.get_label() == "skipped step (1)"
    assert below.get_yscale() == "log"


@pytest.mark.sample(1)
@pytest.mark.parametrize("broken", [[3.0, math.inf], [math.nan, math.nan]])
def test_a_comparison_of_any_losses_has_a_plot(tmp_path, broken):
    losses = {"float32": [3.0, 2.0], "bfloat16": [3.0, 2.1], "float16": broken}
    styles = {name: find_style(name) for name in losses}
    plot_comparison(tmp_path / "loss.png", losses, styles, bytes_per_step=1024)
    assert imread(tmp_path / "loss.png").std() > 0.01
