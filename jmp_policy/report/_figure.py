"""Figures of matplotlib without pyplot: no display is looked for, and no global state is left behind."""

import functools
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches, whose layout leaves room for all texts.

    A notebook shows it, whether or not pyplot was asked to draw there before.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A plot needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    figure._repr_png_ = functools.partial(_draw_png, figure)  # pyright: ignore  # a partial survives pickling
    return figure


def make_note(text: str) -> "Figure":
    """A figure that only says why there is nothing to see."""
    figure = make_figure(6, 1)
    figure.text(0.5, 0.5, text, ha="center", va="center")
    return figure


def _draw_png(figure: "Figure") -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
