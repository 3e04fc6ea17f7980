"""What `numerics.predict` returns: reasons, a policy map and a loss scale, as data, a table and a picture."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...policy import Policy, PolicyMap
from ...report import Column, Report, Table, is_fitting
from .._stats import format_share
from ._prediction_plot import SpanBar, plot_spans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 40
"""A terminal shows so many reasons: `.reasons` has the others."""

_VERBS = {"overflow": "overflows", "underflow": "underflows", "precision": "loses its numbers"}
_SIGNS = {"overflow": "↑", "underflow": "↓", "precision": "±"}


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a scope would lose numbers under a policy: the worst of its values with this fault in this pass.

    Attributes:
      path: the scope.
      direction: the pass, `"forward"`, `"recomputed"` or `"backward"`.
      what: `"overflow"`, `"underflow"`, or `"precision"` of a quantized tensor.
      format: the format that the policy would have it in.
      share: how many of its numbers would overflow or become zero; for `"precision"` the relative error.
      amax: its largest magnitude, times the loss scale in a backward pass.
      limit: the largest or the smallest number of the format; for `"precision"` the largest harmless error.
      primitive: the operation that makes the value, or that reads it.
      is_operand: whether the scope reads the value, and casts it for that.
      source: the user's line of the value, `"/home/me/train.py:12"`; of an argument its path.
      cure: `"loss_scale"` where the loss scale of the prediction is enough, `"float32"` where the scope must stay
        there.
      risk: how bad it is: up to 1 the relative error of the value, and for an overflow 1 and the binades beyond.

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
        """The reason as a sentence."""
        place = f"`{self.path}`" if self.path else "what is in no scope"
        operation = f"what `{self.primitive}` reads" if self.is_operand else f"`{self.primitive}`"
        where = f" ({self.source.rpartition('/')[2]})" if self.source else ""
        cure = {"loss_scale": "The loss scale saves it.", "float32": "It needs float32."}[self.cure]
        return f"{place} {_VERBS[self.what]} in the {self.direction} pass: {operation}{where} {self._measure()}. {cure}"

    def _measure(self) -> str:
        if self.what == "overflow":
            return f"reaches {self.amax:.3g}, and {self.format} ends at {self.limit:.6g}"
        if self.what == "precision":
            return f"has a relative error of {self.share:.2g} in {self.format}, where {self.limit:.2g} is harmless"
        lost = f"{format_share(self.share)} of its numbers" if self.share else "most bits of its numbers"
        return f"reaches {self.amax:.3g}, and {self.format} begins at {self.limit:.2g}: {lost} would be lost"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prediction(Report):
    """What a policy would lose of a program, and what saves it. Printed, a table; in a notebook, too.

    Attributes:
      reasons: the faults, worst first: one for each scope, pass and kind of fault.
      policy_map: the policy with float32 for the scopes that need it; for `autocast` and `with_policy`.
      loss_scale: the scale that goes with the map, a power of two: of those that save most scopes the one that leaves
        most room on both sides. The user's own where it is as good, and `None` where no backward pass was measured.
      policy: the policy that was asked about.
      asked_scale: the loss scale that the reasons are for; 1 where none was given.
      by: `"autocast"` or `"with_policy"`.
      risks: by scope how bad its worst value is, worst first: the relative error up to 1, and for an overflow 1 and
        the binades that it is beyond. A scope without any value in a narrow format is not there.
      notes: what else there is to say.
      spans: what `plot` draws.

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

    @property
    def culprits(self) -> tuple[str, ...]:
        """The scopes that must stay in float32, worst first."""
        return tuple(dict.fromkeys(reason.path for reason in self.reasons if reason.cure == "float32"))

    @property
    def ranking(self) -> tuple[str, ...]:
        """All scopes that have a value in a narrow format, worst first."""
        return tuple(self.risks)

    def to_dict(self) -> dict[str, Any]:
        """The reasons, the loss scale, the map and the ranking as plain dictionaries, lists, strings and numbers."""
        return {
            "policy": str(self.policy),
            "by": self.by,
            "asked_scale": self.asked_scale,
            "loss_scale": self.loss_scale,
            "policy_map": self.policy_map.get_config(),
            "reasons": [dataclasses.asdict(reason) for reason in self.reasons],
            "risks": dict(self.risks),
        }

    def plot(self) -> "Figure":
        """Draws the magnitudes of each scope beside the range of the format, forward and backward, worst on top.

        A bar goes from the smallest numbers that matter to the largest one. Backward it stands where the loss scale of
        the prediction puts it, and pale where it was without.

        Returns:
          A `matplotlib.figure.Figure`, which notebooks show and `figure.savefig("prediction.png")` writes.

        Raises:
          ImportError: matplotlib is not installed.
        """
        return plot_spans(self.spans, self.asked_scale, self.loss_scale)

    def __repr__(self) -> str:
        count = f"{len(self.reasons)} reason{'' if len(self.reasons) == 1 else 's'}"
        return f"<Prediction: {count}, loss scale {spell_scale(self.loss_scale)}; print it for the table>"

    def _list_tables(self, width: int | None) -> Sequence[Table]:
        reasons = self.reasons if width is None else self.reasons[:MOST_LINES]
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
        left_out = len(self.reasons) - MOST_LINES
        if left_out > 0:
            notes.append(f"{left_out} reasons of less risk are left out: `.reasons` has them.")
        if any(reason.is_operand for reason in self.reasons):
            notes.append("→ what the scope reads, and casts for that.")
        return [*notes, *self.notes]


def spell_map(policy_map: PolicyMap) -> str:
    """A map as code to paste."""
    return f"jmp.{policy_map!r}"


def spell_scale(scale: float | None) -> str:
    if scale is None:
        return "unknown"
    return (
        f"2**{round(math.log2(scale))}" if scale > 0 and math.log2(scale).is_integer() and scale != 1 else f"{scale:g}"
    )
