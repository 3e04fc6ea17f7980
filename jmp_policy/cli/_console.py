"""The terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console() -> "Console":
    """A console that prints text as it is: paths may hold brackets, and lines are read by other programs, too."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
