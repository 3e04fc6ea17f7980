"""The programs of a page of the documentation, as a reader pastes them one below the other, and what they print."""

import dataclasses
import doctest
import pathlib
import re

FOLDER = pathlib.Path(__file__).parent.parent.parent / "docs"

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^(?P=indent)```$"
    r"|^ *<!-- needs: (?P<needs>[\w, ]+) -->$",
    re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass
class Block:
    """A block of Python.

    Attributes:
      code: the program.
      line: where it begins on the page.
      output: what the page says that it prints, or None if the page does not say: `...` stands for anything.
      needs: the modules of other libraries without which it cannot run.
    """

    code: str
    line: int
    output: str | None = None
    needs: tuple[str, ...] = ()


def read_pages() -> list[pathlib.Path]:
    """The pages that have programs."""
    return [page for page in sorted(FOLDER.rglob("*.md")) if read_blocks(page.read_text(encoding="utf-8"))]


def read_blocks(text: str) -> list[Block]:
    """The blocks of Python of a page, in order.

    A block of `text` right below one of `python` is what it prints. `<!-- needs: torch -->` above a block says that it
    runs only where torch is installed.

    >>> [block] = read_blocks('''<!-- needs: torch -->
    ... ```python
    ... print(1)
    ... ```
    ...
    ... ```text
    ... 1
    ... ```''')
    >>> block
    Block(code='print(1)\\n', line=3, output='1\\n', needs=('torch',))
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
            line = text.count("\n", 0, fence.start("body")) + 1
            blocks.append(Block(body, line, needs=needs))
            needs, end = (), fence.end()
        elif fence["language"] == "text" and end >= 0 and not text[end : fence.start()].strip():
            blocks[-1].output, end = body, -1
        else:
            end = -1
    return blocks


def assert_prints(place: str, printed: str, expected: str) -> None:
    """Asserts that a program printed what a page says, in which `...` stands for anything."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, printed, options), f"{place} printed:\n{printed}"
