"""Charts are read at a glance: nothing collides or is cut, every axis has its unit, and formats have their colors."""

import itertools
import math
import sys

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from reports import PATHS, REPORTS

from jmp_policy.quant import Comparison, LayerComparison
from jmp_policy.report import BEFORE, KEPT, Bars, Panel, find_style, plot_bars

FORMATS = ("int8(activations=false,min_size=0)", "int4/128", "left: no quantization in its policy")


def compare(count, path="blocks_{}/mlp", size=4_194_304, errors=(0.01,)):
    rows = [
        LayerComparison(path.format(index), "Dense", format, size, size // 4, 0.01, error)
        for index, format, error in zip(range(count), itertools.cycle(FORMATS), itertools.cycle(errors))
    ]
    return Comparison(tuple(rows), 0.05)


def chart(panels, count=3, colors=2):
    names = [f"layer {index}" for index in range(count)]
    measures = [Panel(f"Measure {index}", "kB", [Bars([1e6] * count, "C0")], line=3e5) for index in range(panels)]
    return plot_bars("layer", names, measures, {f"the color {index}": f"C{index}" for index in range(colors)}, "line")


FIGURES = {
    "one row": lambda: compare(1).plot(),
    "many rows": lambda: compare(60).plot(),
    "long names": lambda: compare(10, PATHS[2] + "_{}").plot(),
    "gigabytes": lambda: compare(3, size=28 * 10**10).plot(),
    "errors that are no numbers": lambda: compare(4, errors=(0.02, None, math.inf, math.nan)).plot(),
    "small errors": lambda: compare(3, errors=(1.23e-9, 4.56e-9)).plot(),
    "nothing": lambda: compare(2, size=0, errors=(0.0,)).plot(),
    "comparison": lambda: REPORTS["comparison"].plot(),
    "one panel": lambda: chart(1),
    "three panels": lambda: chart(3),
    "many colors": lambda: chart(1, colors=7),
}


def read_texts(figure):
    """Everything that is written in a figure, with its box in pixels."""
    texts = list(figure.legends[0].get_texts())
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, axes.xaxis.get_offset_text(), *axes.texts]
        left, right = axes.get_xlim()
        texts += [tick.label1 for tick in axes.xaxis.get_major_ticks() if left <= tick.get_loc() <= right]
        texts += [label for label in axes.get_yticklabels() if axes.get_subplotspec().is_first_col()]
    return [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "one row")) for name in FIGURES]
)
def test_no_two_texts_collide_or_are_cut_and_every_panel_has_labels_and_room(name):
    figure = FIGURES[name]()
    FigureCanvasAgg(figure).draw()
    boxes, frame = read_texts(figure), figure.bbox
    assert [(one, other) for (one, a), (other, b) in itertools.combinations(boxes, 2) if a.overlaps(b)] == []
    for text, box in boxes:
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1, text
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1, text
    for axes in figure.axes:
        box = axes.get_window_extent()  # long names push nothing together
        assert axes.get_title()
        assert axes.get_xlabel()
        assert box.width > 3.3 * figure.dpi
        assert box.height > 0.3 * figure.dpi
    assert figure.axes[0].get_ylabel() == "layer"


def test_formats_have_the_colors_of_every_plot():
    errors, weights = compare(3).plot().axes
    wanted = [find_style("int8").color, find_style("int4").color, KEPT]
    assert [to_hex(bar.get_facecolor()).upper() for bar in errors.patches] == wanted
    assert [to_hex(bar.get_facecolor()).upper() for bar in weights.patches] == [BEFORE] * 3 + wanted
    legend = compare(3).plot().legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [
        "the model itself", "before", "int8", "int4/128", "left as it was",
    ]  # fmt: skip


def test_weights_have_a_unit_that_fits_them_and_an_error_that_is_no_number_is_said_in_words():
    weights = compare(1, size=4_194_304).plot().axes[1]
    assert weights.get_xlabel() == "MB"
    assert [bar.get_width() for bar in weights.patches] == [4.194304, 1.048576]
    errors = compare(4, errors=(0.02, None, math.inf, math.nan)).plot().axes[0]
    assert [text.get_text().strip() for text in errors.texts] == ["not seen", "not finite", "not finite"]
    assert [bar.get_width() for bar in errors.patches] == [2.0, 0, 0, 0]
    empty = compare(2, size=0, errors=(0.0,))
    assert "weights: 0 B" in str(empty)
    assert empty.plot().axes[1].get_xlabel() == "B"


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="A plot needs matplotlib, which is not installed: pip install matplotlib"):
        compare(1).plot()
