"""The tables of `benchmarks.compiled`, of a file that it wrote, on a machine that need not have its compiler."""

from collections.abc import Iterator
from typing import Any

from benchmarks.compiled import TABLES, Measured, _as_measured, report

NOT_MEASURED = "not measured"


class KeptMeasurements:
    """What a file has of compiled programs; others were not measured."""

    def __init__(self, kept: dict[str, Any]):
        self._programs = kept["programs"]

    def measure(self, entry: Any, options: dict[str, Any] | None = None) -> Measured | str:
        """What a program says of itself, or that it was not measured."""
        found = self._programs.get(f"{entry.name}, {options}" if options else entry.name, NOT_MEASURED)
        return found if isinstance(found, str) else _as_measured(found)


def describe_tables(kept: dict[str, Any], platform: str) -> Iterator[str]:
    """When and with what the programs were compiled for a platform, and their tables."""
    origin = dict(kept["origin"])
    target, date = origin.pop("target"), kept.get("date") or origin.pop("date", None)
    versions = ", ".join(f"{name} {version}" for name, version in origin.items() if name != "sources")
    yield f"Compiled{f' on {date}' if date else ''} for {target}: {versions}."
    for made in TABLES.values():
        if made.options is None or platform in made.options:
            yield f"**{made.title}**"
            yield report(made, KeptMeasurements(kept), (made.options or {}).get(platform))  # type: ignore[arg-type]
