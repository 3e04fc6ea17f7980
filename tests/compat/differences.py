"""The tables of differences in the reference of `compat`, each row of which is held by a check."""

from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compat.md"


def rows_of(library: str) -> list[str]:
    """The first cells of the rows in a section; those of headings begin with "of "."""
    _, section = PAGE.read_text(encoding="utf-8").split(f"\n## {library}\n")
    lines = section.partition("\n## ")[0].splitlines()
    cells = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    return [cell for cell in cells if not cell.startswith("of ")]


class Checks(dict[str, Callable[[], None]]):
    """The check of each row."""

    def holds(self, *rows: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Registers a check as that of the rows with these first cells."""

        def register(check: Callable[[], None]) -> Callable[[], None]:
            self.update(dict.fromkeys(rows, check))
            return check

        return register
