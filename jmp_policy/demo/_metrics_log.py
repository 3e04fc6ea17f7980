"""The figures of a run as JSON lines."""

import json
import math
import os
from pathlib import Path
from typing import Any


def json_value(value: Any) -> Any:
    """The value itself, or `None` for a number that JSON does not have.

    >>> json_value(float("nan")), json_value(1.5), json_value("a name")
    (None, 1.5, 'a name')
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """A file with one JSON object a line, each with the number of its `step`.

    Every line is written out at once. A process killed in the middle leaves at most one broken line, which
    `truncate` drops.
    """

    def __init__(self, path: Path):
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record; a number that is not finite becomes null."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({key: json_value(value) for key, value in record.items()}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All records, without a broken last line; none if there is no file."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have a figure, and the figure of each; nan for null."""
        records = [record for record in self.read() if key in record]
        figures = [math.nan if record[key] is None else record[key] for record in records]
        return [record["step"] for record in records], figures

    def truncate(self, step: int) -> None:
        """Drops the records of later steps: a run resumed at `step` writes them again."""
        kept = [record for record in self.read() if record["step"] <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(temporary, self.path)
