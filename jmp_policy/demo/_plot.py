"""Plots of the loss, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .._policy import Policy
from ..report import FORMAT_STYLES, OTHER_STYLES, REFERENCE_LINE, UNSCALED, find_style, shorten_policy

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


def plot_comparison(path: Path, losses: Mapping[str, Sequence[float]]) -> None:
    """Draws the training loss of several runs, by name, and beside it their differences to the first.

    Args:
      path: the PNG file to write.
      losses: for each run the loss of every step in bits per byte; nan where it was not finite.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    _label(curves, "Training loss", "bits per byte")
    (reference, expected), *_ = losses.items()
    for index, (name, values) in enumerate(losses.items()):
        # Widths shrink, so that curves that coincide all show.
        style = {"color": f"C{index}", "linewidth": 4.5 - index, "alpha": 0.8, "label": name}
        curves.plot(range(1, len(values) + 1), _smooth(values), **style)
        if name != reference:
            gap = np.asarray(values) - np.asarray(expected)
            differences.plot(range(1, len(values) + 1), gap, **style | {"linewidth": 1.5})
    differences.axhline(0.0, color="0.4", linewidth=1.0)
    _label(differences, f"Difference to {reference}", "bits per byte")
    differences.legend()
    _save(figure, curves, path)


def _label(axes: Axes, title: str, ylabel: str) -> None:
    axes.set(title=title, xlabel="step", ylabel=ylabel)
    axes.grid(alpha=0.25)


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.legend()
    # The canvas of the figure itself, not pyplot: no display is looked for, and no global state is left behind.
    FigureCanvasAgg(figure).print_png(str(path))


def _smooth(values: Sequence[float], horizon: int = 20) -> list[float]:
    """The mean over the last `horizon` steps; not by running sums, in which one nan would stay for ever."""
    return [float(np.mean(values[max(0, end - horizon) : end])) for end in range(1, len(values) + 1)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    finite = np.asarray([value for value in values if np.isfinite(value)])
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    margin = 0.05 * (high - low) + 1e-3
    return low - margin, high + margin
