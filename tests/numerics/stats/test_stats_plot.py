"""Plots of statistics are read at a glance: nothing collides or is cut, and what they show is what was measured."""

import itertools
import math
import pickle
import sys

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from records import SHAPE, make_layout, make_record, make_site

from jmp_policy.numerics import Stats, StatsHistory
from jmp_policy.report import BEFORE

FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
LONG = "model/encoder/transformer/layers_{}/self_attention/query_key_value/DenseGeneral_0"


def make_stats(count=3, path="blocks/{}/mlp", formats=FLOATS, seed=0, directions=("forward", "backward")):
    """Normal numbers: gradients smaller by 2**-18, and by 2**-2 more from layer to layer."""
    rng = np.random.default_rng(seed)
    keys = [*itertools.product(range(count), directions)]
    sites = [make_site(path.format(layer), direction=direction) for layer, direction in keys]
    scales = [2.0 ** (-18 - 2 * min(layer, 3) if direction == "backward" else 3) for layer, direction in keys]
    tensors = [scale * rng.normal(size=SHAPE) for scale in scales]
    return Stats(make_record(tensors, formats), make_layout(*sites, formats=formats))


def make_history(steps, **kwargs):
    history = StatsHistory()
    for index in range(steps):
        history.append(50 * index, make_stats(seed=index, **kwargs))
    return history


FIGURES = {
    "both passes": lambda: make_stats().plot(),
    "no format": lambda: make_stats(formats=()).plot(),
    "one row": lambda: make_stats(1, LONG, directions=("backward",)).plot(),
    "many formats": lambda: make_stats(formats=(*FLOATS, "float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn")).plot(),
    "nothing": lambda: make_stats().empty().plot(),
    "heat of many steps": lambda: make_history(70, count=1).plot_underflow("float8_e5m2"),
    "heat of many rows": lambda: make_history(2, count=100, path=LONG).plot_underflow("float8_e4m3fn"),
    "heat of nothing": lambda: StatsHistory().plot_underflow(),
    "amax of many rows": lambda: make_history(3, count=50, path=LONG).plot_amax(),
}


def draw(figure):
    FigureCanvasAgg(figure).draw()
    return figure


def list_texts(figure):
    """Everything that is written in a figure, with its box in pixels."""
    texts = [*figure.texts]
    for axes in figure.axes:
        texts += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis, (start, stop) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            ticks = [tick for tick in axis.get_major_ticks() if start <= tick.get_loc() <= stop]
            texts += [label for tick in ticks for label in (tick.label1, tick.label2)]
        texts += axes.get_legend().get_texts() if axes.get_legend() else []
    shown = [text for text in texts if text.get_text() and text.get_visible()]
    return [(text.get_text(), text.get_window_extent()) for text in shown]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_texts_do_not_collide_and_are_not_cut(name):
    figure = draw(FIGURES[name]())
    texts = list_texts(figure)
    assert texts
    assert [(one, other) for (one, a), (other, b) in itertools.combinations(texts, 2) if a.overlaps(b)] == []
    frame = figure.bbox
    for text, box in texts:
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1, text
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1, text


@pytest.mark.slow
def test_bars_are_the_shares_of_numbers():
    tensors = np.random.default_rng(0).normal(size=(3, *SHAPE)) * 2.0**-22
    tensors[0, 0, :4] = 0
    sites = [make_site(name, direction="forward" if name == "c" else "backward") for name in "abc"]
    stats = Stats(make_record(tensors), make_layout(*sites))
    above, below = draw(stats.plot(direction="backward")).axes
    total = sum(row.histogram for row in stats.rows()[:2])
    shown = {round(bar.get_x()): bar.get_height() for bar in above.patches}
    assert shown == {index - 47: pytest.approx(100 * count / 64) for index, count in enumerate(total)}
    assert above.get_title(loc="left") == "backward, 2 rows; 6.2% zeros"
    lost = np.mean([row.formats["float16"].underflow for row in stats.rows()[:2]])
    assert lost > 0
    assert below.texts[0].get_text() == f"{100 * lost:.1f}% become zero"


def test_titles_say_what_is_in_no_bin():
    tensor = np.ones(SHAPE)
    tensor[0, :4], tensor[1, 0] = 0, np.inf
    stats = Stats(make_record([tensor]), make_layout(make_site("head")))
    assert stats.plot().axes[0].get_title(loc="left") == "head, forward; 12% zeros; 3.1% nan or infinite"


def test_a_selection_is_drawn_alone():
    stats = make_stats(3)
    first = stats.select(lambda site: site.path == "blocks/1/mlp" and site.direction == "backward")
    assert [axes.get_title(loc="left") for axes in first.plot().axes] == ["blocks/1/mlp, backward", ""]
    assert first.rows() == stats.rows()[3:4]
    assert len(stats.select(lambda site: False)) == 0


@pytest.mark.slow
def test_a_heat_map_has_the_shares_of_each_step():
    history = make_history(2, count=5, directions=("backward",))
    axes = draw(history.plot_underflow("fp16")).axes[0]
    shown = np.asarray(axes.images[0].get_array())
    wanted = [[history[step][row].formats["float16"].underflow for step in (0, 50)] for row in range(5)]
    kept = [row for row in wanted if any(row)]
    np.testing.assert_allclose(shown, kept)
    assert 0 < len(kept) < 5
    assert axes.get_title(loc="left") == f"backward; {5 - len(kept)} of 5 rows lose nothing"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "50"]
    assert (axes.images[0].norm.vmin, axes.images[0].norm.vmax) == (0, 1)


def test_a_step_that_lacks_a_row_is_blank():
    history = make_history(1, count=3, directions=("backward",))
    history.append(50, make_stats(2, directions=("backward",)))
    image = history.plot_underflow("float8_e4m3fn").axes[0].images[0]
    assert to_hex(image.cmap(np.nan)).upper() == BEFORE
    shown = np.ma.masked_invalid(image.get_array())
    assert shown.mask.tolist() == [[False, False], [False, False], [False, True]]


def test_amax_curves_are_exponents_with_the_maxima_of_formats():
    history = make_history(3, count=6, directions=("forward",))
    (axes,) = draw(history.plot_amax()).axes
    lines = {line.get_label(): line for line in axes.lines}
    wanted = [math.log2(history[step][0].amax) for step in (0, 50, 100)]
    assert any(np.allclose(line.get_ydata(), wanted) for line in axes.lines if len(line.get_ydata()) == 3)
    assert lines["largest float16"].get_ydata()[0] == math.log2(65504)
    assert lines["largest e4m3fn"].get_ydata()[0] == math.log2(448)
    assert "largest bfloat16" not in lines
    assert "2 others" in lines
    highest = max(history[step][row].amax for step in (0, 50, 100) for row in range(6))
    named = [line for name, line in lines.items() if name.startswith("blocks")]
    assert len(named) == 4
    assert max(np.max(line.get_ydata()) for line in named) == math.log2(highest)
    history = StatsHistory()
    for step in (1, 2):
        history.append(step, Stats(make_record([np.full(SHAPE, step - 1.0)]), make_layout()))
    assert np.isnan(history.plot_amax().axes[0].lines[0].get_ydata()).tolist() == [True, False]  # an amax of zero


def test_a_notebook_shows_a_plot_without_pyplot_and_it_survives_pickling():
    figure = pickle.loads(pickle.dumps(make_stats(1).plot()))
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_what_loses_nothing_is_said_above_the_map():
    figure = make_history(1).plot_underflow()
    assert figure.get_suptitle() == "float16: what becomes zero (nothing in: forward)"
    assert len(figure.axes) == 2  # one panel, and the colors
    text = make_history(2).plot_underflow("bfloat16").texts[0].get_text()
    assert text == "bfloat16 makes none of the 6 rows lose a number to zero."


ERRORS = {
    "format": (lambda: make_stats().plot(["flaot16"]), r"Unknown format 'flaot16'. Did you mean 'float16'\?"),
    "another": (lambda: make_history(1).plot_amax(["float9"]), "Unknown format 'float9'"),
    "not measured": (
        lambda: make_history(1).plot_underflow("float8_e4m3"),
        r"The format 'float8_e4m3' was not measured. Did you mean 'float8_e4m3fn'\?",
    ),
    "direction": (lambda: make_stats().plot(direction="backwards"), r"Unknown direction 'backwards'. Did you mean"),
    "of a heat map": (lambda: make_history(1).plot_underflow(direction="backwards"), r"Did you mean 'backward'\? For"),
    "of amax": (lambda: make_history(1).plot_amax(direction="backwards"), r"Did you mean 'backward'\? For example"),
    "no histogram": (
        lambda: Stats(make_record([np.ones(SHAPE)], histogram=False), make_layout(histogram=False)).plot(),
        r"collected without histograms. .* numerics.collect\(fun, histogram=True\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_drawn_is_an_error(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="A plot needs matplotlib, which is not installed: pip install matplotlib"):
        make_stats().plot()
