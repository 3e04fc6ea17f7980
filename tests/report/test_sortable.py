"""Tables that sort in a notebook: what they hold, and what they ask of a page."""

import re

from jmp_policy.report import Cell, Column, draw_sortable_table

COLUMNS = [Column("layer"), Column("float16\nzero", is_number=True)]


def draw(*rows):
    return draw_sortable_table(COLUMNS, rows)


def test_cells_say_what_they_sort_by():
    page = draw([Cell("a"), Cell("1 %", 0.01)], [Cell("b"), Cell("")], [Cell("c"), Cell("all", 1)])
    assert re.findall(r'data-value="([^"]*)"', page) == ["0.01", "-Infinity", "1.0"]
    assert re.findall(r'data-number="([^"]*)"', page) == ["0", "1"]


def test_a_page_asks_nothing_of_a_network():
    page = draw([Cell("a"), Cell("1", 1.0)])
    assert not re.search(r"https?:|<script|<link|src=|@import|url\(", page)


def test_texts_and_hints_are_escaped():
    page = draw([Cell("<b>", hint='"quoted" & more'), Cell("", 0.5, bars=[0, 1])])
    assert ">&lt;b&gt;</td>" in page
    assert 'title="&quot;quoted&quot; &amp; more"' in page


def test_heat_veils_a_cell():
    page = draw([Cell("a", heat=1.0), Cell("0", 0.0, heat=0.5)], [Cell("b"), Cell("0", 0.0)])
    assert re.findall(r"rgba\(213,94,0,([\d.]+)\)", page) == ["0.70", "0.40"]


def test_bars_are_one_path_with_a_text_for_those_who_cannot_see_it():
    page = draw([Cell("a"), Cell("two bars", 1.0, bars=[0.5, 1.0])])
    assert 'aria-label="two bars"><path d="M0 18V9h2V0h2V18z"/></svg>' in page


def test_headers_are_reached_by_keys():
    page = draw()
    assert page.count('tabindex="0"') == len(COLUMNS)
    assert "onkeydown=" in page
