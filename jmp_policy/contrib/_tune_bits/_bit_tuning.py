"""Result of `tune_bits`: a policy map, the format of each layer, and the loss over bits per weight."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...numerics._tune import CHOSEN, Tuning
from ...report import REFERENCE_LINE, Table, find_style, make_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class BitRow:
    """A point of the curve of `tune_bits`.

    Attributes:
      bits: bits per weight, scales included.
      predicted: the predicted increase of the loss, relative to the loss before quantization. Its unit is fitted to
        the measured increases of all trials.
      error: the measured increase with rounded weights, for the chosen map `BitTuning.error`; `None` if the budget of
        trials ran out first.
      formats: the format in which each layer is stored, by path.

    >>> import jmp_policy as jmp
    >>> jmp.contrib.BitRow(4.3, 0.02, 0.018, {"head": "int4/128"}).bits
    4.3
    """

    bits: float
    predicted: float
    error: float | None
    formats: Mapping[str, str]


@dataclasses.dataclass(frozen=True, repr=False)
class BitTuning(Tuning):
    """The format of each layer within a number of bits per weight, found by `tune_bits`. Prints as a table.

    It has the attributes of `Tuning`. Its `scopes` are the layers that do not have the smallest format `low`, and
    `kept` is `"wider"`. Errors are increases of the loss, relative to the loss before quantization. The tolerance is
    infinite.

    Attributes:
      effective_bits: bits per weight under the map.
      formats: the format in which each layer is stored, by path: `"int8"` for a table in int4.
      curve: a `BitRow` for each of some maps that no other one beats by prediction, and for the chosen one.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> options = {"formats": ["int4/64", "int8"], "metric": lambda model, x: jnp.mean(model(x) ** 2)}
    >>> model, x = nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.eye(64)
    >>> tuning = jmp.contrib.tune_bits(model, (x,), "float32", effective_bits=5.0, **options)
    >>> tuning.effective_bits, tuning.formats
    (4.625, {'': 'int4/64'})
    """

    effective_bits: float
    formats: Mapping[str, str]
    curve: tuple[BitRow, ...]

    def _draw(self, axes: "Axes") -> None:
        measured = [row for row in self.curve if row.error is not None]
        bits, color = [row.bits for row in self.curve], find_style(self.low).color
        axes.plot(bits, [100 * row.predicted for row in self.curve], **REFERENCE_LINE, label="predicted")
        errors = [100 * (row.error or 0) for row in measured]
        axes.plot([row.bits for row in measured], errors, color=color, marker="o", label="measured")
        axes.scatter([self.effective_bits], [100 * self.error], **CHOSEN)
        axes.set(xlabel="bits per weight, with scales", ylabel="increase of the loss, %")
        axes.set_title(self.name, loc="left")

    def _summarize(self) -> str:
        return f"{self.effective_bits:.4g} bits per weight, loss {_format_change(self.error)}"

    def _list_tables(self, width: int | None) -> Sequence[Table]:
        ranks = {scope: index + 1 for index, scope in enumerate(self.candidates)}
        layers = [(path or "(root)", name, f"{ranks[path]} of {len(ranks)}") for path, name in self.formats.items()]
        points = [(f"{row.bits:.4g}", *map(_format_change, (row.predicted, row.error))) for row in self.curve]
        return [
            Table(make_columns("layer, format", "suspicion"), layers),
            Table(make_columns("bits", "predicted, measured"), points),
        ]

    def _describe(self) -> str:
        is_other = self.scopes and not math.isnan(self.low_error)
        low = f", and with all in {self.low} by {_format_change(self.low_error)}" if is_other else ""
        changes = f"Its loss changes by {_format_change(self.error)}{low}."
        return f"{self.name} takes {self.effective_bits:.4g} bits per weight. {changes}"


def _format_change(error: float | None) -> str:
    if error is None:
        return "not tried"
    return f"{100 * error:+.2g} %" if math.isfinite(error) else "not finite"
