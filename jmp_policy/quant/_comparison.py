"""What quantization cost and saved, layer by layer: the result of `quant.compare`."""

import dataclasses
import math
from typing import Any

from ..explanation._lookup import row_at


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
      output_error: the norm of the difference of what the layer returned in the two models, over all of its calls,
        relative to that of what it returned before. It has the errors of the layers before it in it. `None`, where the
        layer was not called, or returned no numbers, as inside of `vmap` and `remat`.
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
        """Whether the weight is one of integers afterwards."""
        return not self.quantization.startswith("left: ")

    def to_dict(self) -> dict[str, Any]:
        """The fields, and the ratio."""
        return dataclasses.asdict(self) | {"sqnr": self.sqnr}


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """What `quant.compare` found: a table in a terminal and in a notebook, and a plot.

    Attributes:
      rows: one for each layer with a weight, in the order of their first calls.
      output_error: the norm of the difference of what the two models returned, relative to that of the first.
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
          KeyError: there is no such row.
        """
        return row_at(self.rows, path, "layer", "compared")

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain dictionaries, lists, strings and numbers, for tests and for JSON."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "output_error": self.output_error,
        }

    def plot(self) -> Any:
        """Bars of the output error and the bytes of each layer, as a `matplotlib.figure.Figure`."""
        from ._comparison_plot import plot

        return plot(self)

    def __repr__(self) -> str:
        counts = f"{len(self.quantized)} of {len(self.rows)} layers quantized"
        return f"<Comparison: {counts}; print it for the table>"

    def __str__(self) -> str:
        from ._comparison_table import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from ._comparison_table import as_html

        return as_html(self)
