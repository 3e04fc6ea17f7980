"""Finding a row of a table by the path of its module."""

from collections.abc import Iterable
from typing import Any, TypeVar

R = TypeVar("R")


def row_at(rows: Iterable[R], path: str, kind: str, listed: str) -> R:
    """The row at a path.

    Args:
      rows: objects with a `path`.
      path: module names joined by `/`.
      kind: what the error calls that which has a row.
      listed: what the error says of those that have one.

    Raises:
      KeyError: there is no such row.
    """
    by_path: dict[str, Any] = {row.path: row for row in rows}  # type: ignore[attr-defined]
    if path in by_path:
        return by_path[path]
    raise KeyError(f"No {kind} at {path!r}. Those {listed} are {', '.join(map(repr, by_path))}.")
