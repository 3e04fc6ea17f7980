"""The floors of ARCHITECTURE.md as a picture, so that there is one table of them."""

import html
import re

_WIDTH, _LINE, _GAP = 560, 26, 6
_LETTER = 7.25  # the width of a letter of the rooms' names, in the units of the picture

_STYLE = (
    "text{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px}"
    ".floor{fill:#5c6bc0;fill-opacity:.14}.number{fill:#7d87c9;font-size:17px;font-weight:bold}"
    ".room{fill:#3f51b5}.name{fill:#fff}"
)


def read_floors(architecture: str) -> dict[int, list[str]]:
    """The rooms of each floor, from the top, as the table of ARCHITECTURE.md has them.

    >>> read_floors("| floor | rooms | idea |\\n|---|---|---|\\n| 1 | `b/`, `_c.py` | x |\\n| 0 | `_a.py` | y |")
    {1: ['b/', '_c.py'], 0: ['_a.py']}
    """
    floors: dict[int, list[str]] = {}
    for number, rooms in re.findall(r"^\| (\d+) \| (`[^|]*) \|", architecture, re.MULTILINE):
        floors.setdefault(int(number), []).extend(re.findall(r"`([^`]+)`", rooms))
    return floors


def draw_floors(floors: dict[int, list[str]]) -> str:
    """An SVG with a row for each floor and a box for each room, in colours for light and dark pages."""
    shapes, top = [], 0
    for number, rooms in floors.items():
        boxes, height = _draw_rooms(rooms, top + _GAP)
        shapes.append(f'<rect class="floor" x="0" y="{top}" width="{_WIDTH}" height="{height + _GAP}" rx="6"/>')
        shapes.append(f'<text class="number" x="14" y="{top + 25}">{number}</text>')
        shapes += boxes
        top += height + 2 * _GAP
    title = "<title>The floors of the package: a file imports from floors below its own</title>"
    size = f'viewBox="0 0 {_WIDTH} {top - _GAP}" width="{_WIDTH}" height="{top - _GAP}"'
    body = "\n".join(shapes)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{title}<style>{_STYLE}</style>\n{body}\n</svg>\n'


def _draw_rooms(rooms: list[str], top: int) -> tuple[list[str], int]:
    """The boxes of one floor, in as many lines as they take, and the height of them all."""
    boxes, left, line = [], 44.0, 0
    for room in rooms:
        width = len(room) * _LETTER + 14
        if left + width > _WIDTH - _GAP:
            left, line = 44.0, line + 1
        y = top + line * (_LINE + _GAP)
        boxes.append(f'<rect class="room" x="{left:g}" y="{y}" width="{width:g}" height="{_LINE}" rx="4"/>')
        boxes.append(f'<text class="name" x="{left + 7:g}" y="{y + 17}">{html.escape(room)}</text>')
        left += width + _GAP
    return boxes, (line + 1) * (_LINE + _GAP)
