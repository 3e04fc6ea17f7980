"""Draws the levels of packages from the table of ARCHITECTURE.md."""

import html
import re

_WIDTH, _LINE, _GAP = 560, 26, 6
_LETTER = 7.25  # width of a letter in a box, in units of the picture

_STYLE = (
    "text{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px}"
    ".level{fill:#5c6bc0;fill-opacity:.14}.number{fill:#7d87c9;font-size:17px;font-weight:bold}"
    ".package{fill:#3f51b5}.name{fill:#fff}"
)


def read_levels(architecture: str) -> dict[int, list[str]]:
    """Reads the packages of each level, in the order of the table of ARCHITECTURE.md.

    >>> read_levels("| level | packages | purpose |\\n|---|---|---|\\n| 0 | `_a.py` | y |\\n| 1 | `b/`, `_c.py` | x |")
    {0: ['_a.py'], 1: ['b/', '_c.py']}
    """
    levels: dict[int, list[str]] = {}
    for number, packages in re.findall(r"^\| (\d+) \| (`[^|]*) \|", architecture, re.MULTILINE):
        levels.setdefault(int(number), []).extend(re.findall(r"`([^`]+)`", packages))
    return levels


def draw_levels(levels: dict[int, list[str]]) -> str:
    """Returns an SVG with a row per level, the highest on top, and a box per package, for light and dark pages."""
    shapes, top = [], 0
    for number, packages in reversed(levels.items()):
        boxes, height = _draw_packages(packages, top + _GAP)
        shapes.append(f'<rect class="level" x="0" y="{top}" width="{_WIDTH}" height="{height + _GAP}" rx="6"/>')
        shapes.append(f'<text class="number" x="14" y="{top + 25}">{number}</text>')
        shapes += boxes
        top += height + 2 * _GAP
    title = "<title>The packages: each imports only from lower levels</title>"
    size = f'viewBox="0 0 {_WIDTH} {top - _GAP}" width="{_WIDTH}" height="{top - _GAP}"'
    body = "\n".join(shapes)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{title}<style>{_STYLE}</style>\n{body}\n</svg>\n'


def _draw_packages(packages: list[str], top: int) -> tuple[list[str], int]:
    """Returns the boxes of one level, on as many lines as they take, and their height."""
    boxes, left, line = [], 44.0, 0
    for package in packages:
        width = len(package) * _LETTER + 14
        if left + width > _WIDTH - _GAP:
            left, line = 44.0, line + 1
        y = top + line * (_LINE + _GAP)
        boxes.append(f'<rect class="package" x="{left:g}" y="{y}" width="{width:g}" height="{_LINE}" rx="4"/>')
        boxes.append(f'<text class="name" x="{left + 7:g}" y="{y + 17}">{html.escape(package)}</text>')
        left += width + _GAP
    return boxes, (line + 1) * (_LINE + _GAP)
