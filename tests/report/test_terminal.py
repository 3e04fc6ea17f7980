"""Texts of reports: no name is cut into two lines, whatever the terminal, and the width is what the terminal says."""

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
from reports import NAMES, REPORTS, Drawn

import jmp_policy as jmp
from jmp_policy.report import Column, Report, Table, is_fitting

HUGE = 10**4
BY_WIDTH = pytest.mark.parametrize(
    ("name", "width"), [(name, width) for name in REPORTS for width in (20, 60, 80, 200)]
)


def draw(report, width):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        return str(report)


def count_words(text):
    """The words of a text, without the punctuation that stands between two cells."""
    return Counter(stripped for word in text.split() if (stripped := word.strip(",:─")))


def find_overlong_lines(text, width):
    return [line for line in text.splitlines() if len(line) > width]


@BY_WIDTH
def test_every_name_stands_whole_in_a_line_and_no_word_is_lost(name, width):
    report, text = REPORTS[name], draw(REPORTS[name], width)
    for part in NAMES[name] if width >= 60 else ():
        whole = re.compile(rf"(?<![\w/]){re.escape(part)}(?![\w/])")
        assert any(whole.search(line) for line in text.splitlines()), part
    tables = report._list_tables(width)
    cells = [cell for table in tables for row in table.rows for cell in row[1:]]
    wanted = count_words(" ".join([*cells, *report._list_notes()]))
    firsts = {word for table in tables for row in table.rows for word in row[0].split()}
    headers = {word for table in tables for column in table.columns for word in column.header.split()}
    found = count_words(text)
    assert not wanted - found
    assert set(found) <= {*count_words(" ".join([*wanted, *firsts, *headers]))}


@pytest.mark.parametrize("name", REPORTS)
def test_a_wide_terminal_has_a_line_for_each_row_and_note(name):
    report = REPORTS[name]
    tables, notes = report._list_tables(HUGE), report._list_notes()
    assert len(draw(report, HUGE).splitlines()) == sum(3 + len(table.rows) for table in tables) + len(notes)


words = st.text("ab/_=é-", min_size=1, max_size=30)
phrases = st.lists(words, max_size=5).map(" ".join)


@st.composite
def tables(draw):
    count = draw(st.integers(1, 5))
    columns = [Column(draw(words), draw(st.booleans()), wraps=draw(st.booleans())) for _ in range(count)]
    rows = draw(st.lists(st.tuples(*[phrases if column.wraps else words for column in columns]), max_size=6))
    return Table(columns, rows, gap=draw(st.integers(1, 3)))


@pytest.mark.slow
@given(tables(), st.integers(1, 120))
def test_a_table_of_any_words_cuts_none_and_has_a_line_for_each_row_where_it_fits(table, width):
    text = draw(Drawn([table]), width).rstrip("\n")
    cells = count_words(" ".join(cell for row in table.rows for cell in row[1:]))
    firsts = set(" ".join(row[0] for row in table.rows).split())
    headers = set(" ".join(column.header for column in table.columns).split())
    found = count_words(text)
    assert not cells - found
    assert firsts <= found.keys() <= {*cells, *firsts, *headers}
    # Only columns that do not wrap, and single words of those that do, make a line longer than the width.
    least = sum(measure_least(table, index) for index in range(len(table.columns))) + len(table.columns) - 1
    assert not find_overlong_lines(text, max(width, least))
    if is_fitting(table, width):
        assert len(text.split("\n")) <= 2 + len(table.rows)


def measure_least(table, index):
    column, cells = table.columns[index], [table.columns[index].header, *(row[index] for row in table.rows)]
    pieces = [word for cell in cells for word in cell.split()] if column.wraps else cells
    return max(map(len, pieces), default=0)


@pytest.mark.slow
@given(phrases, st.integers(1, 80))
def test_a_note_has_its_words_in_order(note, width):
    wrapped = draw(Drawn([], [note]), width)
    assert wrapped.split() == note.split()
    assert all(len(line.split()) == 1 for line in find_overlong_lines(wrapped, width))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("columns", "stream", "width"),
    [
        (None, Terminal, 66),
        ("100", Terminal, 100),
        *[(nonsense, Terminal, 66) for nonsense in ("", "0", "wide", "-5")],
        (None, io.StringIO, None),
        ("0", io.StringIO, None),
    ],
)
def test_the_environment_says_the_width_before_the_terminal_and_a_file_has_none(columns, stream, width, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((66, 24)))
    monkeypatch.setattr(sys, "stdout", stream())
    text = str(Drawn([], ["x " * 200]))
    assert max(map(len, text.splitlines())) == (400 if width is None else width - 1)


def test_every_kind_of_report_is_looked_at():
    # A Tuning prints code below its table, whose lines stay as they are: tests/numerics/tune looks at it.
    kinds = {kind.__name__ for kind in Report.__subclasses__() if kind.__module__.startswith("jmp_policy.")}
    assert {type(report).__name__ for report in REPORTS.values()} >= kinds - {"Tuning"}


EVIL = "head\x1b[31m\x07\u202e"
SHOWN = r"head\x1b[31m\x07\u202e"


class Evil(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name=EVIL)(x)


@pytest.mark.slow
def test_control_characters_of_a_name_never_reach_the_terminal():
    x, model = jnp.ones((2, 2)), jmp.with_policy(Evil(), "mixed_bfloat16")
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    audit = jmp.numerics.audit(lambda variables, x: jnp.cumsum(model.apply(variables, x)))(variables, x)
    _, stats = jmp.numerics.collect(jax.named_scope(EVIL)(lambda x: x @ x))(x)
    _, origin = jmp.numerics.first_nonfinite(lambda tree: tree[EVIL] * 2)({EVIL: jnp.array([jnp.inf])})
    explanation = jmp.explain(model, x)
    texts = [str(explanation), explanation._repr_html_(), str(stats), str(audit), str(origin)]
    with pytest.raises(ValueError, match="does not fit the target") as unfit:
        jmp.convert_state({EVIL: x}, {})
    with pytest.raises(AssertionError, match="matmuls are not in float16") as matmuls:
        audit.assert_matmuls_in("float16")
    texts += [str(unfit.value), str(matmuls.value)]
    assert all(SHOWN in text for text in texts)
    policied = jmp.with_policy(Evil(), jmp.PolicyMap({"x\x1by": "float32"}, "mixed_bfloat16"))
    with pytest.warns(UserWarning, match="matches no module") as unused:
        jax.eval_shape(policied.apply, variables, x)
    texts += [repr(stats), origin.describe(), *(str(warning.message) for warning in unused)]
    assert all(text.replace("\n", "").isprintable() for text in texts)
