"""The tables of differences in the docstrings of `compat`, each row of which is held by a check."""

from collections.abc import Callable
from types import ModuleType


def rows_of(module: ModuleType) -> list[str]:
    """The first cells of the rows in a module's docstring; those of headings begin with "of "."""
    lines = (module.__doc__ or "").splitlines()
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
