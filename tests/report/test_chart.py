"""Charts are read at a glance: nothing collides or is cut, and formats look the same in every one of them."""

import itertools
import math
import sys

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from reports import PATHS

import jmp_policy as jmp
from jmp_policy.policy import KINDS
from jmp_policy.quant import Comparison, LayerComparison
from jmp_policy.report import BEFORE, FORMAT_STYLES, KEPT, OTHER_STYLES, UNSCALED, find_style

FORMATS = ("int8(activations=false,min_size=0)", "int4/128", "left: no quantization in its policy")


def compare(count, path="blocks_{}/mlp", size=4_194_304, errors=(0.01,)):
    rows = [
        LayerComparison(path.format(index), "Dense", format, size, size // 4, 0.01, error)
        for index, format, error in zip(range(count), itertools.cycle(FORMATS), itertools.cycle(errors))
    ]
    return Comparison(tuple(rows), 0.05)


FIGURES = {
    "one row": lambda: compare(1).plot(),
    "many rows": lambda: compare(60).plot(),
    "long names": lambda: compare(10, PATHS[2] + "_{}").plot(),
    "gigabytes": lambda: compare(3, size=28 * 10**10).plot(),
    "errors that are no numbers": lambda: compare(4, errors=(0.02, None, math.inf, math.nan)).plot(),
    "nothing": lambda: compare(2, size=0, errors=(0.0,)).plot(),
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


OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#000000"}
GREY = "#B0B0B0"


def test_colors_are_those_of_okabe_and_ito_and_no_two_styles_look_alike():
    for styles in ([*FORMAT_STYLES.values()], OTHER_STYLES):
        assert {style.color for style in styles} <= {*OKABE_ITO, GREY}
        for one, other in itertools.combinations(styles, 2):
            assert one.width != other.width
            assert one.dash != other.dash or one.dash == "solid"
            wide, narrow = sorted([one, other], key=lambda style: -style.width)
            assert wide.line["zorder"] < narrow.line["zorder"]
    colors = [find_style(kind).color for kind in KINDS]  # bar charts have colors alone
    assert len({*colors}) == len(KINDS)


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("float32", "float32"),
        ("half", None),
        ("mixed_bfloat16", "bfloat16"),
        ("float8_from_mixed_bfloat16", "float8"),
        ("int8(activations=false)_from_float32", "int8"),
        ("int4/64(min_size=0)_from_mixed_float16", "int4"),
        ("mxfp8(min_size=0)_from_mixed_bfloat16", "mxfp8"),
        ("nvfp4(hadamard=true)_from_mixed_bfloat16", "nvfp4"),
        (jmp.Policy("float32", "float16", "float16"), "float16"),
    ],
)
def test_a_policy_looks_as_what_it_computes_in(policy, name):
    expected = jmp.get_policy(policy).compute_dtype.name if name is None else name
    assert find_style(policy) == FORMAT_STYLES[expected]


def test_float16_without_a_scale_has_a_look_of_its_own():
    assert find_style("mixed_float16", is_scaled=False) == FORMAT_STYLES[UNSCALED] != find_style("mixed_float16")
    assert find_style("mixed_bfloat16", is_scaled=False) == find_style("mixed_bfloat16")


def test_a_dtype_without_a_style_is_named():
    with pytest.raises(ValueError, match=r"No style for 'float64'\. There is one for 'float32', 'bfloat16', "):
        find_style("float64")
