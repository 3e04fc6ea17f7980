"""Texts of reports: no name is cut into two lines, whatever the terminal, and the width is what the terminal says."""

import builtins
import io
import os
import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from hypothesis import given, strategies as st
from reports import NAMES, REPORTS
from rich.cells import cell_len

import jmp_policy as jmp
from jmp_policy.numerics._tune import Tuning
from jmp_policy.report import Column, Report, Table
from jmp_policy.report._terminal import draw_table, is_fitting, measure_width, wrap_note

WIDTHS = (60, 80, 200)
HUGE = 10**4


def count_words(text):
    """The words of a text, without the punctuation that stands between two cells."""
    return Counter(stripped for word in text.split() if (stripped := word.strip(",:─")))


def find_overlong_lines(text, width):
    return [line for line in text.splitlines() if cell_len(line) > width]


@pytest.fixture
def columns(monkeypatch):
    return lambda count: monkeypatch.setenv("COLUMNS", str(count))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_every_name_stands_whole_in_a_line(name, width, columns):
    columns(width)
    lines = str(REPORTS[name]).splitlines()
    for part in NAMES[name]:
        whole = re.compile(rf"(?<![\w/]){re.escape(part)}(?![\w/])")
        assert any(whole.search(line) for line in lines), part


@pytest.mark.parametrize("width", [1, 20, 40, *WIDTHS])
@pytest.mark.parametrize("name", REPORTS)
def test_no_word_is_cut_and_none_is_lost(name, width, columns):
    columns(width)
    report = REPORTS[name]
    tables = report._list_tables(width)
    cells = [cell for table in tables for row in table.rows for cell in row[1:]]
    wanted = count_words(" ".join([*cells, *report._list_notes()]))
    names = {name for table in tables for heading in table.headings or () for name in heading.split()}
    firsts = {word for table in tables for row in table.rows for word in row[0].split()}
    headers = {word for table in tables for column in table.columns for word in column.header.split()}
    found = count_words(str(report))
    assert not wanted - found
    assert set(found) <= {*count_words(" ".join([*wanted, *names, *firsts, *headers]))}


@pytest.mark.parametrize("width", [40, *WIDTHS])
@pytest.mark.parametrize("name", REPORTS)
def test_only_a_name_that_is_longer_than_a_line_runs_past_the_width(name, width, columns):
    columns(width)
    for line in find_overlong_lines(str(REPORTS[name]), width):
        assert len(line.split()) == 1


@pytest.mark.parametrize("name", REPORTS)
def test_a_wide_terminal_has_a_line_for_each_row_and_note(name, columns):
    columns(HUGE)
    report = REPORTS[name]
    tables, notes = report._list_tables(HUGE), report._list_notes()
    assert len(str(report).splitlines()) == sum(3 + len(table.rows) for table in tables) + len(notes)


words = st.text("ab/_=é漢", min_size=1, max_size=30)
phrases = st.lists(words, max_size=5).map(" ".join)


@st.composite
def tables(draw):
    count = draw(st.integers(1, 5))
    columns = [Column(draw(words), draw(st.booleans()), wraps=draw(st.booleans())) for _ in range(count)]
    rows = draw(st.lists(st.tuples(*[phrases if column.wraps else words for column in columns]), max_size=6))
    return Table(columns, rows, gap=draw(st.integers(1, 3)))


@given(tables(), st.integers(1, 120))
def test_a_table_of_any_words_cuts_none_at_any_width(table, width):
    text = draw_table(table, width)
    cells = count_words(" ".join(cell for row in table.rows for cell in row[1:]))
    firsts, headers = (set(" ".join(parts).split()) for parts in (
        [row[0] for row in table.rows], [column.header for column in table.columns]
    ))  # fmt: skip
    found = count_words(text)
    assert not cells - found
    assert firsts <= found.keys() <= {*cells, *firsts, *headers}
    for line in find_overlong_lines(text, width):
        assert len(line.split()) == 1


@given(tables(), st.integers(1, 120))
def test_a_table_that_fits_has_a_line_for_each_row(table, width):
    lines = draw_table(table, width).split("\n")
    if is_fitting(table, width):
        assert len(lines) == 2 + len(table.rows)


@given(phrases, st.integers(1, 80))
def test_a_note_has_its_words_in_order(note, width):
    wrapped = wrap_note(note, width)
    assert wrapped.split() == note.split()
    assert wrap_note(note, None) == note
    for line in find_overlong_lines(wrapped, width):
        assert len(line.split()) == 1


# Where a report is printed.


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def unset(monkeypatch):
    """An environment that says nothing of any width."""
    for name in (
        "COLUMNS",
        "JUPYTER_COLUMNS",
        "FORCE_COLOR",
        "TTY_COMPATIBLE",
        "NO_COLOR",
        "DATABRICKS_RUNTIME_VERSION",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((66, 24)))
    return monkeypatch


@pytest.fixture(params=["ipykernel", "colab", "databricks"])
def kernel(request, unset):
    """What rich takes for a notebook: it would print by itself whatever a console of its own is given."""
    module = {"ipykernel": "ipykernel.zmqshell", "colab": "google.colab._shell", "databricks": "shells"}[request.param]
    name = {"ipykernel": "ZMQInteractiveShell", "colab": "Shell", "databricks": "DatabricksShell"}[request.param]
    if request.param == "databricks":
        unset.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")
    shell = type(name, (), {"__module__": module})()
    unset.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    return unset


def test_a_terminal_says_its_width(unset):
    unset.setattr(sys, "stdout", Terminal())
    assert measure_width() == 66


def test_the_environment_says_it_before_the_terminal(unset):
    unset.setattr(sys, "stdout", Terminal())
    unset.setenv("COLUMNS", "100")
    unset.setenv("JUPYTER_COLUMNS", "110")  # of no notebook
    assert measure_width() == 100
    unset.setenv("TERM", "dumb")  # whose width rich takes to be 80 whatever is said
    assert measure_width() == 100


@pytest.mark.parametrize("nonsense", ["", "0", "wide", "-5"])
def test_a_width_that_is_none_is_not_taken(unset, nonsense):
    unset.setattr(sys, "stdout", Terminal())
    unset.setenv("COLUMNS", nonsense)
    assert measure_width() in (66, 80)


def test_a_file_has_no_width(unset):
    unset.setattr(sys, "stdout", io.StringIO())
    assert measure_width() is None


def test_a_file_has_notes_of_one_line_each(unset):
    unset.setattr(sys, "stdout", io.StringIO())
    report = REPORTS["audit"]
    assert set(report._list_notes()) <= set(str(report).splitlines())


def test_a_notebook_is_as_wide_as_is_asked_for(kernel):
    assert measure_width() > 80
    kernel.setenv("COLUMNS", "70")
    assert measure_width() == 70
    kernel.setenv("JUPYTER_COLUMNS", "90")
    assert measure_width() == 90


@pytest.mark.parametrize("name", REPORTS)
def test_a_text_in_a_notebook_is_a_text_and_prints_nothing(name, kernel, capsys):
    kernel.setenv("COLUMNS", "80")
    text = str(REPORTS[name])
    kernel.undo()
    kernel.setenv("COLUMNS", "80")
    assert text == str(REPORTS[name])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("FORCE_COLOR", "1"), ("TTY_COMPATIBLE", "1")])
@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_a_text_has_no_codes_and_the_same_lines_in_every_terminal(variable, value, term, columns, monkeypatch):
    columns(60)
    plain = str(REPORTS["explanation"])
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("TERM", term)
    assert str(REPORTS["explanation"]) == plain
    assert "\x1b" not in plain


def test_every_kind_of_report_is_looked_at():
    # A Tuning prints code below its table, whose lines stay as they are: tests/numerics/tuning looks at it.
    assert {*map(type, REPORTS.values()), Tuning} == {
        kind
        for kind in Report.__subclasses__()
        if kind.__module__.startswith("jmp_policy.") and "test" not in kind.__module__
    }


EVIL = "head\x1b[31m\x07\u202e"
SHOWN = r"head\x1b[31m\x07\u202e"


class Evil(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.log(nn.Dense(2, name=EVIL)(x) - 1e9)


def test_control_characters_of_a_name_never_reach_the_terminal():
    x, model = jnp.ones((2, 2)), jmp.with_policy(Evil(), "mixed_bfloat16")
    variables = jax.tree.map(jnp.ones_like, jax.eval_shape(model.init, jax.random.key(0), x))
    audit = jmp.numerics.audit(model.apply)(variables, x)
    _, stats = jmp.numerics.collect(model.apply)(variables, x)
    texts = [str(jmp.explain(model, x)), jmp.explain(model, x)._repr_html_(), str(stats), repr(stats), str(audit)]
    with pytest.raises(ValueError, match="does not fit the target") as unfit:
        jmp.convert_state({EVIL: x}, {})
    with pytest.raises(AssertionError, match="matmuls are not in float16") as matmuls:
        audit.assert_matmuls_in("float16")
    with pytest.warns(UserWarning, match="matches no module") as unused:
        jmp.with_policy(Evil(), jmp.PolicyMap({"x\x1by": "float32"}, "mixed_bfloat16")).apply(variables, x)
    texts += [str(unfit.value), str(matmuls.value), *(str(warning.message) for warning in unused)]
    assert all(SHOWN in text for text in (*texts[:3], str(unfit.value), str(matmuls.value)))
    assert all(text.replace("\n", "").isprintable() for text in texts)


def test_control_characters_of_an_argument_never_reach_the_terminal():
    _, origin = jmp.numerics.first_nonfinite(lambda tree: tree[EVIL] * 2)({EVIL: jnp.array([jnp.inf])})
    assert SHOWN in str(origin)
    assert str(origin).isprintable()
    assert origin.describe().isprintable()
