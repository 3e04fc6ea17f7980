"""Result of `numerics.predict`: reasons, a policy map, a loss scale and a plot."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..policy import Policy, PolicyMap, parse_format
from ..report import BEFORE, KEPT, Column, Report, Table, is_fitting, list_styles, make_figure, make_note, make_plain
from ._stats_report import format_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_VERBS = {"overflow": "overflows", "underflow": "underflows", "precision": "loses precision"}
_SIGNS = {"overflow": "↑", "underflow": "↓", "precision": "±"}


@dataclasses.dataclass(frozen=True)
class Reason:
    """The worst value of a scope with one kind of fault in one pass.

    Attributes:
      path: the scope.
      direction: `"forward"`, `"recomputed"` or `"backward"`.
      what: `"overflow"`, `"underflow"`, or `"precision"` for a quantized tensor.
      format: the format of the value under the policy.
      share: the fraction of elements that would overflow or become zero; for `"precision"` the relative error.
      amax: the largest magnitude, multiplied by the loss scale in the backward pass.
      limit: the largest or smallest positive number of the format; for `"precision"` the largest harmless error.
      primitive: the op that makes the value, or the op that reads it if `is_operand`.
      is_operand: True if the scope reads the value and casts it down.
      source: the user's line of the value, `"/home/me/train.py:12"`; for an argument its path.
      cure: `"loss_scale"` if the loss scale of the prediction is enough, else the dtype that the scope must stay in:
        `"float32"`, or `"float64"` under a policy with it.
      risk: the relative error of the value, at most 1; for an overflow 1 plus the number of binades beyond the format.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> _, stats = jax.jit(jmp.numerics.collect(lambda x: jnp.sum((x @ x) * 3e4), where="all"))(jnp.ones((4, 4)))
    >>> reason = jmp.numerics.predict(stats, "mixed_float16").reasons[0]
    >>> reason.what, reason.format, reason.primitive, reason.amax, reason.limit, reason.cure
    ('overflow', 'float16', 'mul', 120000.0, 65504.0, 'float32')
    """

    path: str
    direction: str
    what: str
    format: str
    share: float
    amax: float
    limit: float
    primitive: str
    is_operand: bool
    source: str
    cure: str
    risk: float

    def __str__(self) -> str:
        """Returns the reason as a sentence."""
        place = f"`{self.path}`" if self.path else "The root"
        operation = f"an operand of `{self.primitive}`" if self.is_operand else f"`{self.primitive}`"
        where = f" ({self.source.rpartition('/')[2]})" if self.source else ""
        cure = "The loss scale saves it." if self.cure == "loss_scale" else f"It needs {self.cure}."
        return f"{place} {_VERBS[self.what]} in the {self.direction} pass: {operation}{where} {self._measure()}. {cure}"

    def _measure(self) -> str:
        if self.what == "overflow":
            return f"reaches {self.amax:.3g}, and the largest {self.format} number is {self.limit:.6g}"
        if self.what == "precision":
            return f"has a relative error of {self.share:.2g} in {self.format} (up to {self.limit:.2g} is harmless)"
        lost = f"{format_share(self.share)} of its elements" if self.share else "most bits of its elements"
        return f"reaches {self.amax:.3g}, but {self.format} starts at {self.limit:.2g}: {lost} would be lost"


class SpanBar(NamedTuple):
    """Binary exponents `least` to `most` of the relevant magnitudes in a scope and pass.

    `is_lost` is True if a `Reason` names them, `is_saved` if the loss scale is enough to fix that.
    """

    path: str
    direction: str
    format: str
    least: float
    most: float
    is_lost: bool
    is_saved: bool = False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prediction(Report):
    """Values that a policy would lose, and a map and loss scale that save them. Prints as a table.

    Attributes:
      reasons: the worst value for each scope, pass and kind of fault, worst first.
      policy_map: the policy with its full dtype for the scopes that need it, for `autocast` or `with_policy`.
      loss_scale: the power of two to use with the map. It saves the most scopes, with the most room to over- and
        underflow. It is the given scale if that saves as many; `None` if no backward pass was measured.
      policy: the checked policy.
      asked_scale: the loss scale of the reasons; 1 if none was given.
      by: `"autocast"` or `"with_policy"`.
      risks: `Reason.risk` of the worst value of each scope, worst first. Only scopes with values in half precision or a
        quantized format.
      notes: other remarks.
      spans: the bars of `plot`.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> _, stats = jax.jit(jmp.numerics.collect(lambda x: jnp.sum(x * 2), where="all"))(jnp.ones(4))
    >>> prediction = jmp.numerics.predict(stats, "mixed_float16")
    >>> prediction.reasons, prediction.culprits, prediction.by
    ((), (), 'autocast')
    """

    reasons: tuple[Reason, ...]
    policy_map: PolicyMap
    loss_scale: float | None
    policy: Policy | PolicyMap
    asked_scale: float
    by: str
    risks: Mapping[str, float]
    notes: tuple[str, ...]
    spans: tuple[SpanBar, ...] = ()

    _MOST_ROWS = 40

    @property
    def culprits(self) -> tuple[str, ...]:
        """Scopes that must stay in the full dtype, worst first."""
        return tuple(dict.fromkeys(reason.path for reason in self.reasons if reason.cure != "loss_scale"))

    @property
    def ranking(self) -> tuple[str, ...]:
        """All scopes with a value in half precision or a quantized format, worst first."""
        return tuple(self.risks)

    def to_dict(self) -> dict[str, Any]:
        """Returns reasons, loss scale, map and ranking as dictionaries, lists, strings and numbers."""
        names = ("by", "asked_scale", "loss_scale", "policy_map", "reasons", "risks")
        return {"policy": str(self.policy)} | {name: make_plain(getattr(self, name)) for name in names}

    def plot(self) -> "Figure":
        """Draws the magnitudes of each scope and the range of the format, forward and backward, worst on top.

        A bar spans the smallest relevant to the largest magnitude. In the backward pass a second, pale bar shows them
        without the loss scale.

        Raises:
          ImportError: matplotlib is not installed.
        """
        return plot_spans(self.spans, self.asked_scale, self.loss_scale)

    def _summarize(self) -> str:
        count = f"{len(self.reasons)} reason{'' if len(self.reasons) == 1 else 's'}"
        return f"{count}, loss scale {spell_scale(self.loss_scale)}"

    def _list_tables(self, width: int | None) -> Sequence[Table]:
        reasons = self._keep_largest(self.reasons)
        if not reasons:
            return []
        tables = [self._make_table(reasons, dropped) for dropped in ((), ("limit",), ("limit", "operation"))]
        return [next((table for table in tables if width is None or is_fitting(table, width)), tables[-1])]

    def _make_table(self, reasons: Sequence[Reason], dropped: Sequence[str]) -> Table:
        cells = {
            "scope": [reason.path or "(no scope)" for reason in reasons],
            "pass": [reason.direction for reason in reasons],
            "fault": [f"{'→ ' if reason.is_operand else ''}{_SIGNS[reason.what]} {reason.what}" for reason in reasons],
            "lost": [format_share(reason.share) for reason in reasons],
            "amax": [f"{reason.amax:.2g}" for reason in reasons],
            "limit": [f"{reason.limit:.2g}" for reason in reasons],
            "operation": [reason.primitive for reason in reasons],
            "line": [os.path.basename(reason.source) for reason in reasons],
            "cure": [reason.cure.replace("_", " ") for reason in reasons],
        }
        kept = {header: column for header, column in cells.items() if header not in dropped}
        columns = [Column(header, is_number=header in ("lost", "amax", "limit")) for header in kept]
        return Table(columns, list(zip(*kept.values(), strict=True)))

    def _list_notes(self) -> Sequence[str]:
        scopes = len({reason.path for reason in self.reasons})
        scaled = f" at a loss scale of {spell_scale(self.asked_scale)}" if self.loss_scale is not None else ""
        found = f"{scopes} of {len(self.risks)} scopes would lose numbers" if scopes else "no scope would lose numbers"
        notes = [f"{self.policy} by {self.by}{scaled}: {found}."]
        notes += self._note_left_out(self.reasons, "reasons with less risk", ".reasons")
        if any(reason.is_operand for reason in self.reasons):
            notes.append("→ an operand that the scope casts down.")
        return [*notes, *self.notes]


def spell_scale(scale: float | None) -> str:
    if scale is None:
        return "unknown"
    return (
        f"2**{round(math.log2(scale))}" if scale > 0 and math.log2(scale).is_integer() and scale != 1 else f"{scale:g}"
    )


MOST_SCOPES = 40
_LOST = "#D55E00"
"""Vermilion, the color of lost values in tables."""

# In inches. The figure grows with the number and length of names so that none is cut.
_ROW_HEIGHT, _OTHER_HEIGHT = 0.24, 1.5
_PANEL_WIDTH, _CHARACTER_WIDTH = 4.2, 0.075
_NAME_SIZE = 9


def plot_spans(spans: Sequence[SpanBar], asked_scale: float, loss_scale: float | None) -> "Figure":
    """Draws one panel per pass."""
    paths = list(dict.fromkeys(span.path for span in spans))[:MOST_SCOPES]
    if not paths:
        return make_note("No value would be in half precision or a quantized format.")
    directions = list(dict.fromkeys(sorted((span.direction for span in spans), key="backward".__eq__)))
    width = _PANEL_WIDTH * len(directions) + _CHARACTER_WIDTH * max(map(len, paths)) + 0.6
    figure = make_figure(width, _OTHER_HEIGHT + _ROW_HEIGHT * len(paths))
    all_axes = figure.subplots(1, len(directions), sharey=True, sharex=True, squeeze=False)[0]
    shift = math.log2((loss_scale or asked_scale) / asked_scale)
    for axes, direction in zip(all_axes, directions, strict=True):
        own = [span for span in spans if span.direction == direction and span.path in paths]
        _draw_spans(axes, own, paths, shift if direction == "backward" else 0.0)
        scaled = f", loss scale {loss_scale:g}" if direction == "backward" and loss_scale is not None else ""
        axes.set_title(f"{direction}{scaled}", fontsize=10, loc="left")
    first = all_axes[0]
    first.set_yticks(range(len(paths)), [path or "(no scope)" for path in paths], fontsize=_NAME_SIZE)
    first.set_ylim(len(paths) - 0.4, -0.6)
    _draw_legend(figure, spans, shift)
    return figure


def _draw_spans(axes: "Axes", spans: Sequence[SpanBar], paths: Sequence[str], shift: float) -> None:
    styles = list_styles(dict.fromkeys(span.format for span in spans))
    for name, style in styles.items():
        known = parse_format(name)
        if not known.block:
            axes.axvspan(known.least_exponent, known.min_exponent, color=style.color, alpha=0.07, linewidth=0)
            axes.axvspan(known.min_exponent, math.log2(known.max), color=style.color, alpha=0.17, linewidth=0)
    for span in spans:
        row, length = paths.index(span.path), max(0.35, span.most - span.least)
        if shift:
            edge = _LOST if span.is_lost else KEPT
            axes.barh(row, length, 0.62, span.least, color=BEFORE, edgecolor=edge, linewidth=1.0)
        color = _LOST if span.is_lost and not (span.is_saved and shift) else KEPT
        axes.barh(row, length, 0.34 if shift else 0.62, span.least + shift, color=color, linewidth=0)
    low = min([-26.0, *(span.least for span in spans)])
    high = max([18.0, *(span.most for span in spans), *(span.most + shift for span in spans)])
    axes.set_xlim(max(low, -60) - 1, min(high, 60) + 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    axes.set_xlabel("magnitude", fontsize=_NAME_SIZE)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_legend(figure: "Figure", spans: Sequence[SpanBar], shift: float) -> None:
    from matplotlib.patches import Patch

    styles = list_styles(dict.fromkeys(span.format for span in spans))
    patches = [Patch(color=style.color, alpha=0.3, label=f"{name} (pale: subnormal)") for name, style in styles.items()]
    patches.append(Patch(color=KEPT, label="fits"))
    if any(span.is_lost and not span.is_saved for span in spans):
        patches.append(Patch(color=_LOST, label="does not: float32 by the map"))
    if shift:
        is_saving = any(span.is_saved for span in spans)
        patches.append(Patch(facecolor=BEFORE, edgecolor=_LOST if is_saving else KEPT, label="before the loss scale"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=_NAME_SIZE)
