"""Tables for a reader."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(["name", "value"], [["a", "1"]]))
    | name | value |
    |---|---|
    | a | 1 |
    """
    lines = [header, *rows]
    written = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([written[0], "|" + "---|" * len(header), *written[1:]])
