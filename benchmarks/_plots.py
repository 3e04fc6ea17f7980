"""The pictures of the page of results, drawn from the tables alone."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
"""Of the palette of Okabe and Ito, which the colour-blind tell apart."""

Rows = list[dict[str, str]]
"""The rows of a table, by the names of its columns."""


@dataclasses.dataclass(frozen=True)
class Plot:
    """A picture of a table.

    Attributes:
      file: its name.
      description: the text for readers who do not see the plot.
      draw: draws the rows on axes.
      size: in inches.
    """

    file: str
    description: str
    draw: Callable[[Any, Rows], None]
    size: tuple[float, float]


def draw_plots(suites: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws the measurements at real sizes, and returns the files."""
    drawn = []
    for (suite, name), plot in PLOTS.items():
        measured = suites.get(suite, {"tables": [], "quick": False})
        for kept in measured["tables"]:
            if kept["name"] == name and not measured["quick"]:
                rows = [dict(zip(kept["header"], row, strict=True)) for row in kept["rows"]]
                drawn.append(_draw(plot, rows, folder))
    return drawn


def _draw(plot: Plot, rows: Rows, folder: pathlib.Path) -> pathlib.Path:
    from matplotlib.figure import Figure  # of the extra `bench`; the page without pictures needs it not

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=plot.size, facecolor="white", layout="constrained")
    plot.draw(figure.add_subplot(), rows)
    path = folder / plot.file
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path


def _clean(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)


def _put_legend(axes: Any, **options: Any) -> None:
    """A legend beside the axes, where it hides nothing."""
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), **options)


def _list_rows(axes: Any, names: Sequence[str]) -> None:
    """The names of rows, the first at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _draw_bars(axes: Any, names: Sequence[str], values: Sequence[float], colors: Sequence[str]) -> None:
    """Bars that lie, the first at the top, each with its number."""
    places = range(len(names))
    axes.barh(places, values, color=colors, height=0.7)
    _list_rows(axes, names)
    axes.margins(x=0.1)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f"{value:.2f}", (value, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    _clean(axes)


def _draw_loss_scaling(axes: Any, rows: Rows) -> None:
    rows = [row for row in rows if row["step"].startswith("float16: ") and _is_number(row["accessed, 100 M"])]
    rows.sort(key=lambda row: float(row["accessed, 100 M"]))
    names = [row["step"].removeprefix("float16: ").replace("`", "") for row in rows]
    colors = [
        BLUE if "loss_scaled" in name else GREY if "hand" in name or "check" in name else ORANGE for name in names
    ]
    _draw_bars(axes, names, [float(row["accessed, 100 M"]) for row in rows], colors)
    for color, label in ((BLUE, "jmp_policy"), (ORANGE, "other libraries"), (GREY, "by hand")):
        axes.barh([0], [0], color=color, label=label)
    _put_legend(axes)
    axes.figure.supxlabel("bytes accessed, in multiples of those of 100 M float32 parameters")
    axes.figure.suptitle("A whole float16 step of AdamW on a CPU, by library")


def _draw_errors(axes: Any, rows: Rows) -> None:
    formats = [column for column in rows[0] if column != "model"]
    for row, marker, color in zip(rows, ("o", "s", "^"), (BLUE, ORANGE, GREEN), strict=False):
        errors = [float(row[name]) for name in formats]
        axes.scatter(errors, range(len(formats)), marker=marker, color=color, s=42, label=row["model"], zorder=3)
    axes.set_xscale("log")
    _list_rows(axes, formats)
    axes.figure.supxlabel("error of gradients against float64, over their norm")
    axes.figure.suptitle("What formats of 8 and 4 bits lose")
    _put_legend(axes)
    _clean(axes)


def _is_number(cell: str) -> bool:
    """True if a cell was measured."""
    return cell.replace(".", "", 1).isdigit()


PLOTS: dict[tuple[str, str], Plot] = {
    ("optimizer", "whole"): Plot(
        "loss_scaling.png", "Bytes of a whole float16 step, by library", _draw_loss_scaling, (10.5, 4)
    ),
    ("float8", "errors"): Plot("float8_errors.png", "Errors of gradients by format", _draw_errors, (9, 4.2)),
}
"""By suite and table."""
