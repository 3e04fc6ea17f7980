"""What quantization cost and saved, layer by layer: the result of `quant.compare`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ..report import (
    BEFORE,
    KEPT,
    BarChart,
    Bars,
    Column,
    Panel,
    Report,
    Table,
    choose_byte_unit,
    find_row,
    find_style,
    format_bytes,
)


@dataclasses.dataclass(frozen=True)
class LayerComparison:
    """A layer with a weight, before and after.

    Attributes:
      path: the module names joined by `/`; the root's is the empty string.
      type: the name of its class; the empty string, if it was not called.
      quantization: the format of the weight afterwards, or why it is as it was.
      bytes_before: the size of the weight.
      bytes_after: its size afterwards, with its scales.
      weight_error: the norm of what the weight lost, relative to its own.
      output_error: how far apart the outputs of the layer are in the two models, over all of its calls: the norm of
        their difference, relative to the norm of the first. The errors of earlier layers are part of it. `None` where
        the layer was not called, or returned no numbers, as inside of `vmap` and `remat`.

    >>> import jmp_policy as jmp
    >>> row = jmp.quant.LayerComparison("head", "Dense", "int8", 16384, 4352, weight_error=0.01, output_error=0.02)
    >>> row.is_quantized, row.sqnr
    (True, 40.0)
    """

    path: str
    type: str
    quantization: str
    bytes_before: int
    bytes_after: int
    weight_error: float
    output_error: float | None

    @property
    def sqnr(self) -> float:
        """The signal-to-quantization-noise ratio of the weight, in decibels."""
        return math.inf if self.weight_error == 0 else -20 * math.log10(self.weight_error)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is quantized afterwards."""
        return not self.quantization.startswith("left: ")

    def to_dict(self) -> dict[str, Any]:
        """The fields, and the ratio."""
        return dataclasses.asdict(self) | {"sqnr": self.sqnr}


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Report):
    """What `quant.compare` found: a table in a terminal and in a notebook, and a plot.

    Attributes:
      rows: one for each layer with a weight, in the order of their first calls.
      output_error: how far apart the outputs of the two models are: the norm of their difference, relative to the
        norm of the first.

    >>> import jmp_policy as jmp
    >>> head = jmp.quant.LayerComparison("head", "Dense", "int8", 16384, 4352, weight_error=0.01, output_error=0.02)
    >>> comparison = jmp.quant.Comparison((head,), output_error=0.02)
    >>> comparison["head"].bytes_after, comparison.bytes_before
    (4352, 16384)
    >>> print(comparison)
    layer  type   format   before    after  weight error     SQNR  output error
    ───────────────────────────────────────────────────────────────────────────
    head   Dense  int8    16.4 kB  4.35 kB           1 %  40.0 dB           2 %
    <BLANKLINE>
    weights: 16.4 kB, now 4.35 kB: 26.6%
    output of the model: 2 % off
    """

    rows: tuple[LayerComparison, ...]
    output_error: float

    @property
    def bytes_before(self) -> int:
        """The size of the weights of all rows."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Their size afterwards."""
        return sum(row.bytes_after for row in self.rows)

    @property
    def quantized(self) -> tuple[LayerComparison, ...]:
        """The rows whose weights are quantized."""
        return tuple(row for row in self.rows if row.is_quantized)

    def __getitem__(self, path: str) -> LayerComparison:
        """The row of the layer at a path.

        Raises:
          KeyError: no row has this path.
        """
        return find_row(self.rows, path, "layer", "compared")

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain dictionaries, lists, strings and numbers, for tests and for JSON."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "output_error": self.output_error,
        }

    def plot(self) -> Any:
        """Bars of the output error and the bytes of each layer, as a `matplotlib.figure.Figure`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        rows = self.rows
        colors = [_choose_color(row) for row in rows]
        errors = [None if row.output_error is None else 100 * row.output_error for row in rows]
        unit, divisor = choose_byte_unit(max((row.bytes_before for row in rows), default=0))
        before = [row.bytes_before / divisor for row in rows]
        after = [row.bytes_after / divisor for row in rows]
        formats = {row.quantization.partition("(")[0]: _choose_color(row) for row in self.quantized}
        has_left = len(self.quantized) < len(rows)
        chart = BarChart(
            kind="layer",
            names=[row.path or row.type for row in rows],
            panels=[
                Panel(
                    "Output error", "% of the norm before", [Bars(errors, colors)], 100 * self.output_error, "not seen"
                ),
                Panel("Weights", unit, [Bars(before, BEFORE), Bars(after, colors, height=0.5)]),
            ],
            legend={"before": BEFORE, **formats, **({"left as it was": KEPT} if has_left else {})},
            line_name="the model itself",
        )
        return chart.draw()

    def __repr__(self) -> str:
        counts = f"{len(self.quantized)} of {len(self.rows)} layers quantized"
        return f"<Comparison: {counts}; print it for the table>"

    def _list_tables(self, width: int | None) -> list[Table]:
        texts, numbers = ("layer", "type", "format"), ("before", "after", "weight error", "SQNR", "output error")
        columns = [*map(Column, texts), *(Column(number, is_number=True) for number in numbers)]
        return [Table(columns, [*map(_list_cells, self.rows)])]

    def _list_notes(self) -> list[str]:
        before, after, quantized = self.bytes_before, self.bytes_after, self.quantized
        if not before:
            notes = ["weights: 0 B"]
        else:
            notes = [f"weights: {format_bytes(before)}, now {format_bytes(after)}: {after / before:.1%}"]
        size = sum(row.bytes_before for row in quantized)
        if size and len(quantized) < len(self.rows):
            share = sum(row.bytes_after for row in quantized) / size
            notes.append(f"those quantized, {len(quantized)} of {len(self.rows)}: {share:.1%}")
        return [*notes, f"output of the model: {_format_error(self.output_error)} off", *_list_reasons(self.rows)]


def _choose_color(row: LayerComparison) -> str:
    return find_style(row.quantization).color if row.is_quantized else KEPT


def _list_cells(row: LayerComparison) -> tuple[str, ...]:
    is_exact = row.weight_error == 0
    return (
        row.path,
        row.type,
        row.quantization if row.is_quantized else "left",
        format_bytes(row.bytes_before),
        format_bytes(row.bytes_after),
        "" if is_exact else _format_error(row.weight_error),
        "" if is_exact else f"{row.sqnr:.1f} dB",
        "not seen" if row.output_error is None else _format_error(row.output_error),
    )


def _list_reasons(rows: Sequence[LayerComparison]) -> list[str]:
    """A sentence for each reason to leave a weight."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if not row.is_quantized:
            names.setdefault(row.quantization, []).append(row.path or row.type)
    return [f"{why}: {', '.join(layers)}" for why, layers in names.items()]


def _format_error(error: float) -> str:
    return f"{error:.3g}" if error > 10 else f"{error * 100:.2g} %"
