"""The programs of a page of the documentation, as a reader pastes them one below the other, and their outputs."""

import doctest
import pathlib
import re
from typing import NamedTuple

FOLDER = pathlib.Path(__file__).parent.parent.parent / "docs"

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^(?P=indent)```$"
    r"|^ *<!-- needs: (?P<needs>[\w., ]+) -->$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of Python, the line where it begins, its output (`...` stands for anything), and what it imports."""

    code: str
    line: int
    output: str | None = None
    needs: tuple[str, ...] = ()


def read_blocks(text: str) -> list[Block]:
    """Returns the blocks of Python of a page, in order.

    >>> page = ["<!-- needs: torch -->", "```python", "print(1)", "```", "", "```text", "1", "```"]
    >>> read_blocks("\\n".join(page))
    [Block(code='print(1)\\n', line=3, output='1\\n', needs=('torch',))]
    """
    blocks: list[Block] = []
    needs: tuple[str, ...] = ()
    end = -1
    for fence in _FENCE.finditer(text):
        if fence["needs"]:
            needs = tuple(name.strip() for name in fence["needs"].split(","))
            continue
        body = re.sub(f"^{fence['indent']}", "", fence["body"], flags=re.MULTILINE)
        if fence["language"] == "python":
            blocks.append(Block(body, text.count("\n", 0, fence.start("body")) + 1, needs=needs))
            needs, end = (), fence.end()
            continue
        if fence["language"] == "text" and end >= 0 and not text[end : fence.start()].strip():
            blocks[-1] = blocks[-1]._replace(output=body)
        end = -1
    return blocks


def assert_prints(place: str, printed: str, expected: str) -> None:
    """Asserts that a program printed the output on the page, in which `...` stands for anything."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, printed, options), f"{place} printed:\n{printed}"
