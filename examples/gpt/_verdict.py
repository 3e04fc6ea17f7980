"""The rows of a comparison, and what they show, in words: what float16 lost, and who ended where."""

import dataclasses
import math
from collections.abc import Sequence

from ._underflow import LARGEST_FLUSHED

SAME = 0.02
"""Bits per byte. What ends closer to float32 than this counts as equal: other seeds end further apart."""

CLEAR = 0.1
"""Bits per byte. What ends this much above float32 has lost clearly."""


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """One row of the comparison.

    Attributes:
      name: the policy and its loss scaling.
      final_loss: the mean training loss of the last tenth of the steps, in bits per byte.
      difference: its difference to the loss in float32.
      zeroed_gradient_share: of the gradient's elements, how many are exactly zero although the gradient in float32,
        of the same batch and the same parameters (those that float32 training ended with), is not.
      skipped_steps: steps that overflowed.
      loss_scale: the loss scale at the end.
      parameter_bytes: memory of the stored parameters: the arguments of the forward and backward pass.
      activation_bytes: its temporaries, of which most are activations kept for the backward pass.
      step_seconds: the median time of a step.
      zeroed_logits_share: as `zeroed_gradient_share`, of the gradient by the logits, where the backward pass begins.
      zeroed_layer_shares: as `zeroed_gradient_share`, of each layer.
    """

    name: str
    final_loss: float
    difference: float
    zeroed_gradient_share: float
    skipped_steps: int
    loss_scale: float
    parameter_bytes: int
    activation_bytes: int
    step_seconds: float
    zeroed_logits_share: float = 0.0
    zeroed_layer_shares: dict[str, float] = dataclasses.field(default_factory=dict)


def explain_underflow(rows: Sequence[VariantResult], tokens: int) -> str:
    """Says what float16 rounds to zero in this run, and why.

    Args:
      rows: the results, in the order of `VARIANTS`.
      tokens: how many the loss of a step is the mean of.
    """
    _, _, unscaled, scaled = rows
    ordered = sorted(unscaled.zeroed_layer_shares.items(), key=lambda layer: -layer[1])
    worst = [f"{name} {_percent(share)}" for name, share in ordered[:3] if share >= 0.001]
    layers = f" ({', '.join(worst)})" if worst else ""
    return (
        f"What float16 loses: the loss is the mean over {tokens:,} bytes, so its gradient by a logit is (p - y) / "
        f"{tokens:,}, which float16 rounds to zero for wrong bytes less likely than {LARGEST_FLUSHED * tokens:.1g}. "
        f"Without a loss scale {_percent(unscaled.zeroed_logits_share)} of the gradient by the logits is zero, and "
        f"{_percent(unscaled.zeroed_gradient_share)} of that by the parameters{layers}; with the dynamic scale "
        f"{_percent(scaled.zeroed_logits_share)} and {_percent(scaled.zeroed_gradient_share)}."
    )


def judge(rows: Sequence[VariantResult]) -> list[str]:
    """Says who ended where, and what follows for the loss scale, a line each.

    Args:
      rows: the results, in the order of `VARIANTS`: float32 first, float16 without and with a loss scale last.
    """
    reference, *others = rows
    if not math.isfinite(reference.final_loss):
        return [f"Verdict: {reference.name} itself does not end at a finite loss; there is nothing to compare with."]
    ends = [f"{row.name}: {_describe_end(row, reference)}." for row in others]
    *_, unscaled, scaled = others
    return [*ends, f"Verdict: {_conclude(unscaled, scaled)}"]


def _describe_end(row: VariantResult, reference: VariantResult) -> str:
    difference, unit = row.difference, "bits per byte"
    steps = "1 step" if row.skipped_steps == 1 else f"{row.skipped_steps} steps"
    skipped = f"; {steps} overflowed" if row.skipped_steps else ""
    if not math.isfinite(difference):
        return f"does not end at a finite loss{skipped}"
    if difference >= CLEAR:
        return f"ends {difference:.2f} {unit} above {reference.name}, a clear loss{skipped}"
    if abs(difference) > SAME:
        side = "above" if difference > 0 else "below"
        return f"ends {abs(difference):.3f} {unit} {side} {reference.name}{skipped}"
    return f"ends as {reference.name} does, within {SAME:g} {unit} ({difference:+.4f}){skipped}"


def _conclude(unscaled: VariantResult, scaled: VariantResult) -> str:
    if not _keeps_up(scaled):
        return "float16 falls behind here even with the dynamic loss scale."
    if not math.isfinite(unscaled.difference) or unscaled.difference >= CLEAR:
        return "float16 needs its loss scale here: without it float16 loses, with it it does not."
    if not _keeps_up(unscaled):
        return f"float16 loses here without a loss scale, by less than {CLEAR:g} bits per byte; with it it does not."
    return "float16 loses nothing here, with or without a loss scale. Larger batches and more steps would show it."


def _keeps_up(row: VariantResult) -> bool:
    return math.isfinite(row.difference) and row.difference <= SAME


def _percent(share: float) -> str:
    """As `83%`, with the digits that a small share needs.

    >>> [_percent(share) for share in (0.0, 0.834, 0.0123, 0.00001)]
    ['0%', '83%', '1.2%', 'less than 0.1%']
    """
    if 0 < share < 0.001:
        return "less than 0.1%"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"
