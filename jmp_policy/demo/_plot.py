"""Plots of the loss, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Curve = tuple[Sequence[float], Sequence[float]]


def plot_run(path: Path, train: Curve, validation: Curve, baselines: Mapping[str, float]) -> None:
    """Draws the training and validation loss of a run over the baselines.

    Args:
      path: the PNG file to write.
      train: the steps, and the training loss of each in bits per byte.
      validation: the steps of the evaluations, and the validation loss of each.
      baselines: bits per byte by name, drawn as horizontal lines.
    """
    figure, axes = _figure("Byte-level GPT")
    steps, losses = train
    axes.plot(steps, losses, color="C0", alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smooth(losses), color="C0", label="training")
    axes.plot(*validation, color="C1", marker="o", markersize=4, label="validation")
    for style, (name, bits) in zip((":", "--"), baselines.items(), strict=False):
        axes.axhline(bits, color="0.4", linestyle=style, linewidth=1.2, label=f"{name} baseline")
    axes.set_ylim(*_limits([*losses, *validation[1], *baselines.values()]))
    _save(figure, axes, path)


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


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    _label(axes, title, "bits per byte")
    return figure, axes


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
