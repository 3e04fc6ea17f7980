"""The pictures of the page of results, drawn from the tables alone."""

import dataclasses
import pathlib
from collections.abc import Callable
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
      description: what a reader who does not see it is told.
      draw: draws the rows on axes.
      size: in inches.
    """

    file: str
    description: str
    draw: Callable[[Any, Rows], None]
    size: tuple[float, float]


def draw_plots(suites: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws what was measured at real sizes, and hands back the files."""
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


def _draw_bars(axes: Any, names: list[str], values: list[float], colors: list[str], form: str) -> None:
    """Bars that lie, the first at the top, each with its number."""
    places = range(len(names))
    axes.barh(places, values, color=colors, height=0.7)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    for place, value in zip(places, values, strict=True):
        axes.annotate(form.format(value), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_zero_cost(axes: Any, rows: Rows) -> None:
    markers = {"by hand": ("o", GREY), "jmp": ("s", ORANGE), "DynamicScale": ("^", GREEN)}
    cases = list(dict.fromkeys(_name_case(row) for row in rows))
    for other, (marker, color) in markers.items():
        points = [(float(row["bytes"]), cases.index(_name_case(row))) for row in rows if row["ours over"] == other]
        axes.scatter(*zip(*points, strict=True), marker=marker, color=color, s=46, label=other, zorder=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("bytes accessed, ours over theirs (left of 1: ours is cheaper)")
    axes.set_title("A train step with a policy, a scale and a skip, on a CPU")
    axes.legend(title="over", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)


def _name_case(row: dict[str, str]) -> str:
    return f"{row['model']}, {row['API']}, {row['policy'].removeprefix('mixed_')}"


PLOTS: dict[tuple[str, str], Plot] = {
    ("zero_cost", "steps"): Plot(
        "zero_cost.png", "Bytes of a train step with a policy over those of other ways", _draw_zero_cost, (9, 4.6)
    ),
}  # fmt: skip
"""By suite and table."""
