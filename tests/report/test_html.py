"""Pages of reports: well-formed, escaped, and no name may be cut into two lines."""

import re
from html.parser import HTMLParser

import pytest
from reports import NAMES, REPORTS, Drawn

from jmp_policy.report import Column, Table


class Page(HTMLParser):
    """The texts of a page, and which of them a browser may break."""

    def __init__(self, page):
        super().__init__()
        self.open, self.breakable, self.texts = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append((tag, "nowrap" in (dict(attrs).get("style") or "")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.texts.append(data)
        if not any(is_whole for _, is_whole in self.open):
            self.breakable.append(data)


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_has_a_cell_for_each_column_and_no_name_may_be_cut(name):
    drawn = REPORTS[name]._repr_html_()
    page = Page(drawn)
    # Browsers break lines at spaces, and after these.
    assert not [text for text in page.breakable if re.search(r"\S[/|?!-]\S", text)]
    assert set(NAMES[name]) <= set("\n".join(page.texts).split())
    for table, part in zip(REPORTS[name]._list_tables(None), drawn.split("<table>")[1:], strict=True):
        assert part.count("<th ") == len(table.columns)
        assert part.count("<td ") == len(table.columns) * len(table.rows)
    assert drawn.count("<p>") == len(REPORTS[name]._list_notes())


def test_a_page_leaves_out_the_reasons_that_it_says_it_does():
    report = REPORTS["prediction"]
    (table,) = report._list_tables(None)
    assert f"{len(report.reasons) - len(table.rows)} reasons with less risk are left out" in report._repr_html_()


def test_text_is_on_the_left_and_escaped_and_numbers_on_the_right():
    prices = Drawn([Table([Column("<fruit>"), Column("price", is_number=True)], [("a<b/c>", "1")])], ["a & <b/c>"])
    assert repr(prices) == "<Drawn: 1 tables; print it for the table>"
    page = prices._repr_html_()
    assert Page(page).texts == ["<fruit>", "price", "a<b/c>", "1", "a & ", "<b/c>"]
    assert '<td style="text-align:right;white-space:nowrap">1</td>' in page
    assert '<th style="text-align:left;white-space:nowrap">&lt;fruit&gt;</th>' in page
