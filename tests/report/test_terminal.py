"""Texts of reports: no name is cut into two lines, whatever the terminal, and the width is what the terminal says."""

import io
import os
import re
import shutil
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from hypothesis import given, strategies as st
from reports import NAMES, REPORTS

import jmp_policy as jmp
from jmp_policy.numerics._tuning import Tuning
from jmp_policy.report import Column, Report, Table
from jmp_policy.report._report import draw_table, is_fitting, measure_width, wrap_note

WIDTHS = (60, 80, 200)
HUGE = 10**4


def count_words(text):
    """The words of a text, without the punctuation that stands between two cells."""
    return Counter(stripped for word in text.split() if (stripped := word.strip(",:─")))


def find_overlong_lines(text, width):
    return [line for line in text.splitlines() if len(line) > width]


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
    firsts = {word for table in tables for row in table.rows for word in row[0].split()}
    headers = {word for table in tables for column in table.columns for word in column.header.split()}
    found = count_words(str(report))
    assert not wanted - found
    assert set(found) <= {*count_words(" ".join([*wanted, *firsts, *headers]))}


@pytest.mark.parametrize("name", REPORTS)
def test_a_wide_terminal_has_a_line_for_each_row_and_note(name, columns):
    columns(HUGE)
    report = REPORTS[name]
    tables, notes = report._list_tables(HUGE), report._list_notes()
    assert len(str(report).splitlines()) == sum(3 + len(table.rows) for table in tables) + len(notes)


words = st.text("ab/_=é", min_size=1, max_size=30)
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
    # Only columns that do not wrap, and single words of those that do, make a line longer than the width.
    least = sum(measure_least(table, index) for index in range(len(table.columns))) + len(table.columns) - 1
    assert not find_overlong_lines(text, max(width, least))


def measure_least(table, index):
    column, cells = table.columns[index], [table.columns[index].header, *(row[index] for row in table.rows)]
    pieces = [word for cell in cells for word in cell.split()] if column.wraps else cells
    return max(map(len, pieces), default=0)


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
    """An environment without a width."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(shutil.os, "get_terminal_size", lambda *_: os.terminal_size((66, 24)))
    return monkeypatch


def test_a_terminal_says_its_width(unset):
    unset.setattr(sys, "stdout", Terminal())
    assert measure_width() == 66


def test_the_environment_says_it_before_the_terminal(unset):
    unset.setattr(sys, "stdout", Terminal())
    unset.setenv("COLUMNS", "100")
    assert measure_width() == 100


@pytest.mark.parametrize("nonsense", ["", "0", "wide", "-5"])
def test_a_width_that_is_not_a_positive_number_is_ignored(unset, nonsense):
    unset.setattr(sys, "stdout", Terminal())
    unset.setenv("COLUMNS", nonsense)
    assert measure_width() == 66


def test_a_file_has_no_width(unset):
    unset.setattr(sys, "stdout", io.StringIO())
    assert measure_width() is None


def test_a_file_has_notes_of_one_line_each(unset):
    unset.setattr(sys, "stdout", io.StringIO())
    report = REPORTS["audit"]
    assert set(report._list_notes()) <= set(str(report).splitlines())


def test_every_kind_of_report_is_looked_at():
    # A Tuning prints code below its table, whose lines stay as they are: tests/numerics/tune looks at it.
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
