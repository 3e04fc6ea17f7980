"""A table in a notebook that sorts by the column whose header is clicked, without a network and without a library."""

import dataclasses
import math
from collections.abc import Sequence
from html import escape

from ._table import Column

# An attribute, not a script: notebooks run it where they show the page, and saved pages keep it.
_SORT = """
const head = event.target.closest('th');
if (head) {
  const number = head.dataset.number === '1', before = head.getAttribute('aria-sort');
  const down = before ? before === 'ascending' : number;
  this.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const read = row => {
    const cell = row.cells[head.cellIndex];
    return number ? Number(cell.dataset.value) : cell.textContent;
  };
  const body = this.parentNode.tBodies[0], sign = down ? -1 : 1;
  const compare = (a, b) => number ? (a < b ? -1 : Number(a > b)) : a.localeCompare(b, undefined, {numeric: true});
  [...body.rows].sort((a, b) => sign * compare(read(a), read(b))).forEach(row => body.append(row));
}
"""

# Colors are those of the page around, so that a dark one stays dark; a heat is a veil over either.
_BACKGROUND = "var(--jp-layout-color0,var(--vscode-editor-background,Canvas))"
_STYLE = f"""
.jmp-sortable {{overflow-x:auto;max-width:100%;white-space:nowrap;font-size:13px;margin-bottom:.8em}}
.jmp-sortable table {{border-collapse:collapse;margin:0;font-variant-numeric:tabular-nums}}
.jmp-sortable th,.jmp-sortable td {{padding:3px 8px;border:0;text-align:left;vertical-align:bottom}}
.jmp-sortable .number {{text-align:right}}
.jmp-sortable th {{white-space:pre;font-weight:600;border-bottom:1px solid currentColor;cursor:pointer}}
.jmp-sortable th::after {{content:'\\2195';opacity:.3;padding-left:3px}}
.jmp-sortable th[aria-sort=descending]::after {{content:'\\2193';opacity:1}}
.jmp-sortable th[aria-sort=ascending]::after {{content:'\\2191';opacity:1}}
.jmp-sortable tbody tr:hover td {{box-shadow:inset 0 -1px currentColor}}
.jmp-sortable svg {{display:block;fill:currentColor}}
@media (min-width:700px) {{.jmp-sortable .first {{position:sticky;left:0;background:{_BACKGROUND};z-index:1}}}}
"""

_HEAT = "213,94,0"
"""Vermilion, which people with any color vision see on white and on black."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table that sorts.

    Attributes:
      text: what is read.
      value: what a column of numbers sorts by; a cell without a number comes last.
      heat: how much it stands out, from 0 to 1.
      bars: lengths of bars that are drawn in place of the text, from 0 to 1; none for a text.
      hint: what is read where the pointer rests.
    """

    text: str
    value: float | None = None
    heat: float = 0.0
    bars: Sequence[float] = ()
    hint: str = ""


def draw_sortable_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    """A table as HTML that sorts by a click on a header: largest numbers first, texts from A; a second click reverses.

    The first column stays in sight while the others scroll, where there is room. A header may have several lines.

    >>> from jmp_policy.report import Cell, Column, draw_sortable_table
    >>> columns = [Column("layer"), Column("loss", is_number=True)]
    >>> page = draw_sortable_table(columns, [[Cell("a/b"), Cell("1 %", 0.01)]])
    >>> page.partition("<tbody>")[2]
    '<tr><td class="first text">a/b</td><td class="number" data-value="0.01">1 %</td></tr></tbody></table></div>'
    """
    head = "".join(
        f'<th class="{_classify(index, column)}" data-number="{int(column.is_number)}" tabindex="0">'
        f"{escape(column.header)}</th>"
        for index, column in enumerate(columns)
    )
    body = "".join(f"<tr>{''.join(map(_draw_cell, range(len(columns)), columns, row))}</tr>" for row in rows)
    keys = "if (event.key === 'Enter') this.onclick(event)"
    opening = f'<thead onclick="{escape(_SORT.strip())}" onkeydown="{escape(keys)}">'
    # The div says for itself that no name is cut: some notebooks drop style sheets.
    return (
        f'<div class="jmp-sortable" style="white-space:nowrap"><style>{_STYLE.strip()}</style><table>'
        f"{opening}<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _classify(index: int, column: Column) -> str:
    kind = "number" if column.is_number else "text"
    return f"first {kind}" if index == 0 else kind


def _draw_cell(index: int, column: Column, cell: Cell) -> str:
    attributes = {"class": _classify(index, column)}
    if column.is_number:
        attributes["data-value"] = repr(-math.inf if cell.value is None else float(cell.value)).replace(
            "inf", "Infinity"
        )
    if cell.heat > 0:
        attributes["style"] = f"background:rgba({_HEAT},{0.1 + 0.6 * min(1.0, cell.heat):.2f})"
    if cell.hint:
        attributes["title"] = cell.hint
    written = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items())
    return f"<td{written}>{_draw_bars(cell) if len(cell.bars) else escape(cell.text)}</td>"


def _draw_bars(cell: Cell) -> str:
    """Bars as a picture of one path."""
    height = 18
    steps = "".join(f"V{height - round(height * bar, 1):g}h2" for bar in cell.bars)
    size = f'width="{2 * len(cell.bars)}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{escape(cell.text)}"><path d="M0 {height}{steps}V{height}z"/></svg>'
