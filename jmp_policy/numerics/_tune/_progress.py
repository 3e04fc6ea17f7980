"""The bar that shows a search in a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ..._base import escape_controls


class Show(Protocol):
    """Shows a trial: how many scopes are kept and not yet known to be needed or free, and the last error."""

    def __call__(self, trials: int, kept: int, error: float) -> None: ...


@contextmanager
def show_progress(name: str, wanted: bool | None, budget: int | None) -> Iterator[Show]:
    """Shows a bar on standard error while the block runs.

    Args:
      name: what is tuned.
      wanted: whether to show it; `None` where standard error is a terminal and rich is installed.
      budget: how many trials there may be; `None` if nobody knows.

    Raises:
      ImportError: it is wanted, and rich is not installed.
    """
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield lambda trials, kept, error: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        if wanted:
            raise ImportError("A progress bar needs rich: pip install rich, or tune(..., progress=False).") from None
        yield lambda trials, kept, error: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"tuning {escape_controls(name)}", total=budget, state="float32")

        def show(trials: int, kept: int, error: float) -> None:
            progress.update(task, completed=trials, state=f"trial {trials}: {kept} kept, error {error:.2g}")

        yield show
