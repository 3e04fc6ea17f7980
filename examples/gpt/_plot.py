"""Plots of the loss, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jmp_policy.policy import Policy
from jmp_policy.report import FORMAT_STYLES, OTHER_STYLES, REFERENCE_LINE, UNSCALED, Style, find_style, shorten_policy

from ._verdict import SAME

HORIZON = 10  # steps of a moving mean

Curve = tuple[Sequence[float], Sequence[float]]


def plot_run(
    path: Path,
    policy: Policy,
    *,
    losses: Curve,
    validation: Curve,
    baselines: Mapping[str, float],
    scales: Curve,
    skipped: Sequence[int],
) -> None:
    """Draws the training and validation loss of a run over the baselines, and the loss scale below.

    Args:
      path: the PNG file to write.
      policy: the policy of the run.
      losses: the steps, and the training loss of each in bits per byte; nan where it was not finite.
      validation: the steps of the evaluations, and the validation loss of each.
      baselines: bits per byte by name, drawn as horizontal lines.
      scales: counts of steps from 0 on, and the loss scale after so many.
      skipped: the steps that overflowed.
    """
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    _draw_losses(above, find_style(policy).color, losses, validation)
    for dash, (name, bits) in zip(("dotted", "dashdot"), baselines.items(), strict=False):
        above.axhline(bits, **REFERENCE_LINE | {"linestyle": dash, "label": f"{name} baseline"})
    above.set_ylim(*_limits([*losses[1], *validation[1], *baselines.values()]))
    _label(above, f"Byte-level GPT under {shorten_policy(policy)}", "loss in bits per byte")
    above.set_xlabel("")  # the panel below has the steps
    _draw_scale(below, scales, skipped)
    _save(figure, above, path)


def _draw_losses(axes: Axes, color: str, losses: Curve, validation: Curve) -> None:
    steps, values = losses
    marker = "." if len(steps) < 3 else ""  # one step alone makes no line
    axes.plot(steps, values, color=color, alpha=0.4, linewidth=0.7, marker=marker, label="training, each step")
    axes.plot(steps, _smooth(values), color=color, linewidth=2.2, label="training, mean of the last 20 steps")
    style = OTHER_STYLES[2].line | {"marker": "o", "markersize": 5}
    axes.plot(*validation, **style, label="validation")


def _draw_scale(axes: Axes, scales: Curve, skipped: Sequence[int]) -> None:
    """Draws the scale on an axis of powers of two, and each skipped step where it began to fall."""
    axes.step(*scales, where="post", **OTHER_STYLES[0].line)
    _label(axes, "", "loss scale (a factor)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(scales[1]) / 2, max(scales[1]) * 2)
    if set(scales[1]) == {1.0}:
        axes.text(0.5, 0.7, "no loss scale: only float16 needs one", transform=axes.transAxes, ha="center")
    scale_after = dict(zip(*scales, strict=True))
    falls = [(step, scale_after[step - 1]) for step in skipped if step - 1 in scale_after]
    if falls:
        color = FORMAT_STYLES[UNSCALED].color  # what is lost without a scale
        axes.plot(*zip(*falls, strict=True), "x", color=color, label=f"skipped step ({len(falls)})")
        axes.legend()


def plot_comparison(
    path: Path, losses: Mapping[str, Sequence[float]], styles: Mapping[str, Style], *, bytes_per_step: int
) -> None:
    """Draws the training loss of several runs, by name, and beside it their differences to the first.

    Args:
      path: the PNG file to write.
      losses: for each run the loss of every step in bits per byte; nan where it was not finite.
      styles: how the curve of each run looks.
      bytes_per_step: of how many bytes the loss of a step is the mean.
    """
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    (reference, expected), *others = losses.items()
    for name, values in losses.items():
        _plot_raw_and_smooth(curves, values, styles[name], name)
    gaps = {name: np.asarray(values) - np.asarray(expected) for name, values in others}
    for name, gap in gaps.items():
        _plot_raw_and_smooth(differences, gap, styles[name])
    curves.plot([], [], color="0.4", linewidth=0.8, alpha=0.6, label="thin and pale: each step")
    curves.plot([], [], color="0.4", linewidth=2.0, label=f"otherwise: mean of the last {HORIZON} steps")
    differences.axhline(0.0, **styles[reference].line)
    differences.axhspan(-SAME, SAME, color="0.5", alpha=0.15, linewidth=0, label=f"within {SAME:g}")
    curves.set_ylim(*_limits([value for values in losses.values() for value in _skip_first(_smooth(values, HORIZON))]))
    smooth_gaps = [value for gap in gaps.values() for value in _smooth(gap, HORIZON)]
    differences.set_ylim(*_limits([-3 * SAME, 3 * SAME, *smooth_gaps]))
    _label(curves, "Training loss", "loss (bits per byte)")
    _label(differences, f"Difference to {reference}", f"loss - loss in {reference} (bits per byte)")
    for axes in (curves, differences):
        axes.set_xlabel(f"step (of {bytes_per_step:,} bytes)")
    differences.legend(loc="upper left")
    _save(figure, curves, path)


def _plot_raw_and_smooth(axes: Axes, values: Sequence[float] | np.ndarray, style: Style, label: str = "") -> None:
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, color=style.color, linewidth=0.8, alpha=0.35)
    axes.plot(steps, _smooth(values, HORIZON), **style.line, label=label or None)


def _skip_first(values: list[float]) -> list[float]:
    """Without the steep beginning, beside which nothing could be told apart."""
    return values[len(values) // 3 :]


def _label(axes: Axes, title: str, ylabel: str) -> None:
    axes.set(title=title, xlabel="step", ylabel=ylabel)
    axes.grid(alpha=0.25)


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.legend()
    # The canvas of the figure itself, not pyplot: no display is looked for, and no global state is left behind.
    FigureCanvasAgg(figure).print_png(str(path))


def _smooth(values: Sequence[float] | np.ndarray, horizon: int = 20) -> list[float]:
    """The mean over the last `horizon` steps; not by running sums, in which one nan would stay for ever."""
    return [float(np.mean(values[max(0, end - horizon) : end])) for end in range(1, len(values) + 1)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    finite = np.asarray([value for value in values if np.isfinite(value)])
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    margin = 0.05 * (high - low) + 1e-3
    return low - margin, high + margin
