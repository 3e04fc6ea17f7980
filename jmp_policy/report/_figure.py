"""Figures of matplotlib without pyplot: no display is looked for, and no global state is left behind."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches, whose layout leaves room for all texts.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A plot needs matplotlib, which is not installed: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def make_note(text: str) -> "Figure":
    """A figure that only says why there is nothing to see."""
    figure = make_figure(6, 1)
    figure.text(0.5, 0.5, text, ha="center", va="center")
    return figure
