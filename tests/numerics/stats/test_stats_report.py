"""How statistics are read: what stands first, what is grouped, and what a narrow terminal leaves out."""

import dataclasses
import re

import numpy as np
import pytest
from records import SHAPE, make_layout, make_record, make_site

from jmp_policy.numerics import Stats


def make_stats(sites, tensors, formats=("float16", "bfloat16")):
    return Stats(make_record(tensors, formats), make_layout(*sites, formats=formats))


def fill(share, value, rest=1.0):
    """A tensor of which a share is a value."""
    tensor = np.full(SHAPE, rest, np.float32)
    tensor.flat[: round(share * tensor.size)] = value
    return tensor


LOSSES = {
    "fine": fill(0, 0),
    "tiny": fill(0.25, 2.0**-26),
    "huge": fill(0.125, 70_000.0),
    "smaller": fill(0.5, 2.0**-26),
    "bad": fill(0.125, np.nan),
    "worse": fill(0.5, np.inf),
}


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def read_table(stats):
    """The lines of the table that is printed, cell by cell."""
    _, _, *lines = str(stats).split("\n\n")[0].splitlines()
    return [line.split() for line in lines]


def test_worst_comes_first():
    table = read_table(make_stats(list(map(make_site, LOSSES)), list(LOSSES.values())))
    assert [cells[0] for cells in table] == ["worse", "bad", "huge", "smaller", "tiny", "fine"]
    assert table[0][-1] == "50%"
    assert table[2][-1] == "↑12%"
    assert table[3][-1] == "↓50%"


def test_integers_are_ranked_by_their_error():
    record = make_record(np.ones((2, *SHAPE)), ("float16",))
    record.counts[0, 0, 4] = 8  # int8 makes zeros of a quarter, and is hardly wrong
    record.sums[1, 1, 0] = record.sums[1, 0, 0] / 4
    stats = Stats(record, make_layout(make_site("zeros"), make_site("wrong"), formats=("int8",)))
    assert [(cells[0], cells[-1]) for cells in read_table(stats)] == [("wrong", "±50%"), ("zeros", "1")]
    assert "± relative error; worst first" in str(stats)


def test_turns_of_a_loop_share_a_line_that_shows_the_worst():
    sites = [make_site("a", turn=turn) for turn in range(3)] + [make_site("a"), make_site("a")]
    tensors = [LOSSES[name] for name in ("fine", "smaller", "tiny", "fine", "fine")]
    turns = [cells[4:7] for cells in read_table(make_stats(sites, tensors))]
    assert turns == [["1", "of", "3"], ["1", "1"], ["1", "1"]]
    note = "Of a loop, the worst turn is shown, counted from 0: `.rows()` has all of them."
    assert note in str(make_stats(sites, tensors))


def test_two_operations_of_a_loop_have_a_line_each():
    sites = [make_site("a", turn=turn) for turn in (0, 1, 0, 1)]
    stats = make_stats(sites, [LOSSES[name] for name in ("smaller", "fine", "fine", "tiny")])
    assert [cells[4:7] for cells in read_table(stats)] == [["0", "of", "2"], ["1", "of", "2"]]
    sites = [make_site("a", turn=(outer, inner)) for outer in range(2) for inner in range(2)]
    [cells] = read_table(make_stats(sites, [LOSSES[name] for name in ("fine", "fine", "tiny", "fine")]))
    assert cells[4:7] == ["1,0", "of", "4"]


def test_a_terminal_shows_the_worst_of_many_rows():
    sites = [make_site(f"layer{index}", line=index) for index in range(Stats._MOST_ROWS + 5)]
    stats = make_stats(sites, [fill((index % 32) / 32, 2.0**-26) for index in range(len(sites))])
    assert len(read_table(stats)) == Stats._MOST_ROWS
    assert "\n5 lines of less loss are left out: `.rows()` has them." in str(stats)


@pytest.mark.parametrize(
    ("width", "left_out"), [(84, set()), (80, {"rms"}), (66, {"rms", "operation"}), (54, {"rms", "operation", "line"})]
)
def test_a_narrow_terminal_leaves_out_what_says_least(width, left_out, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(make_stats([make_site("blocks/0/attention")], [LOSSES["tiny"]]))
    headers = {"tensor", "operation", "line", "pass", "amax", "rms", "float16", "bfloat16"}
    assert set(text.splitlines()[0].split()) == headers - left_out
    assert max(map(len, text.splitlines())) <= width


def test_lines_that_would_look_alike_keep_what_tells_them_apart(monkeypatch):
    monkeypatch.setenv("COLUMNS", "62")
    sites = [make_site("blocks/0/attention", line=line) for line in (88, 91)]
    text = str(make_stats(sites, [LOSSES["tiny"], LOSSES["fine"]]))
    assert "train.py:88" in text
    assert "train.py:91" in text


def test_dtypes_are_shown_where_they_differ():
    float16 = dataclasses.replace(make_site("b"), dtype="float16")
    both = make_stats([make_site("a"), float16], [LOSSES["fine"]] * 2)
    assert "dtype" in str(both)
    assert "dtype" not in str(both["a"])


def test_statistics_without_formats_are_in_the_order_of_the_program():
    stats = make_stats(list(map(make_site, "abc")), [LOSSES[name] for name in ("huge", "fine", "bad")], formats=())
    assert [cells[0] for cells in read_table(stats)] == ["c", "a", "b"]
    assert str(stats).endswith("\n\nnan and infinities first; no format was asked for")


def test_an_empty_program_says_so():
    nothing = make_stats([make_site("a")], [LOSSES["fine"]]).select(lambda site: False)
    assert str(nothing) == "Nothing was observed: the program has no tensor of the kind that was asked for."
    assert nothing._repr_html_().startswith("<p>Nothing was observed")


def test_rows_that_were_not_measured_are_counted():
    stats = make_stats([make_site("a"), make_site("b")], [LOSSES["fine"], LOSSES["tiny"]])
    assert str(stats.empty()).startswith("No row was measured: a branch that was not taken")
    stats.record.counts[0, 0, 0] = 0
    assert "1 of 2 rows was not measured" in str(stats)
    assert [cells[0] for cells in read_table(stats)] == ["b"]


def test_a_page_leaves_out_columns_without_a_cell():
    fine = make_stats([make_site("a")], [LOSSES["fine"]])._repr_html_()
    lost = make_stats([make_site("a")], [LOSSES["worse"]])._repr_html_()
    assert ">nan/inf</th>" in lost
    assert ">nan/inf</th>" not in fine
    assert ">turn</th>" not in fine


def test_a_page_has_the_errors_of_each_format():
    page = make_stats([make_site("a")], [fill(0.25, 2.0**-26)])._repr_html_()
    headers = re.findall(r">([^<>]+)</th>", page)
    assert headers[:4] == ["tensor", "operation", "line", "pass"]
    assert {"float16", "float16 error", "smallest", "numbers", "shape"} <= {*headers}
    assert ">↓25%<" in page
