"""What a policy did for a run: to its train step, by the library's own tools, and over its history."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var

from jmp_policy._base import PyTree
from jmp_policy.report import format_bytes

from ._trainer import LossFn, Trainer

_MOST_RANGES = 6
"""A line names so many ranges of skipped steps; `summary.json` has them all."""


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What a policy makes of a train step: known without running it, and the same on every device.

    Attributes:
      matmul_shares: by dtype, the share of the flops of matmuls that run in it.
      findings: what the audit finds in the step: how often, by name.
      residual_bytes: what `measure_residual_bytes` says of the loss.
      float32_residual_bytes: what it says of the loss of the same model in float32.
    """

    matmul_shares: dict[str, float]
    findings: dict[str, int]
    residual_bytes: int
    float32_residual_bytes: int


@dataclasses.dataclass(frozen=True)
class ScaleHistory:
    """How the loss scale of a run moved, and which steps overflowed.

    Attributes:
      first: the scale of the first step.
      last: the scale of the step to come.
      lowest: the least that it ever was.
      highest: the most.
      growths: how often it grew.
      backoffs: how often it fell.
      skipped_steps: how many steps were skipped.
      skipped: their numbers, from 1; without those whose metrics were lost.
    """

    first: float
    last: float
    lowest: float
    highest: float
    growths: int
    backoffs: int
    skipped_steps: int
    skipped: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """What a policy did for a run, up to a step.

    Attributes:
      policy: the policy.
      step: how many steps there were, the skipped ones among them.
      facts: what the policy made of the train step.
      scale: how the loss scale moved.
    """

    policy: str
    step: int
    facts: StepFacts
    scale: ScaleHistory

    def to_json(self) -> dict[str, Any]:
        """The summary as a JSON object."""
        facts, scale = dataclasses.asdict(self.facts), dataclasses.asdict(self.scale)
        return {"policy": self.policy, "step": self.step, **facts, "loss_scale": scale}

    def list_rows(self) -> list[tuple[str, str]]:
        """The summary in words: what each line is about, and the line."""
        moves = f"{self.scale.growths} up, {self.scale.backoffs} down"
        return [
            ("policy", self.policy),
            ("matmul flops", describe_shares(self.facts.matmul_shares)),
            ("kept for backward", describe_residuals(self.facts)),
            ("loss scale", describe_scale(self.scale)),
            *([("its moves", moves)] if self.scale.lowest < self.scale.highest else []),
            ("skipped steps", describe_skips(self.scale, self.step)),
        ]


def examine_step(trainer: Trainer, reference: Trainer, windows: np.ndarray) -> StepFacts:
    """Asks the library's tools what a policy makes of a train step.

    Args:
      trainer: the model and its optimizer.
      reference: the same in float32.
      windows: a batch, uint8 `(batch, context + 1)`.
    """
    report = trainer.audit(windows)
    residuals, expected = (measure_residual_bytes(each.loss_fn, each.params, windows) for each in (trainer, reference))
    findings = Counter(finding.id for finding in report.findings)
    return StepFacts(report.matmul_shares, dict(findings), residuals, expected)


def measure_residual_bytes(loss_fn: LossFn, params: PyTree, windows: np.ndarray) -> int:
    """Counts the bytes that a forward pass keeps for the backward pass.

    These are the residuals of `jax.vjp`: activations, casts of parameters and masks. Parameters that are kept as they
    are do not count, since they are in memory anyway. XLA may keep less, for it computes some again: its temporaries
    differ from device to device, and `compare` shows them.

    >>> import jax.numpy as jnp
    >>> loss_fn = lambda w, x: jnp.sum(jnp.sin(w * x))      # keeps cos(w * x), and x: 8 numbers each
    >>> measure_residual_bytes(loss_fn, jnp.ones(8), np.ones(8, np.float32))
    32
    """

    def list_residuals(params: PyTree, windows: jax.typing.ArrayLike) -> list[jax.Array]:
        _, pullback = jax.vjp(lambda params: loss_fn(params, windows), params)
        return jax.tree.leaves(pullback)

    program, shapes = jax.make_jaxpr(list_residuals, return_shape=True)(params, windows)
    given = {*program.jaxpr.invars, *program.jaxpr.constvars}
    pairs = zip(program.jaxpr.outvars, shapes, strict=True)
    made = {var: shape for var, shape in pairs if isinstance(var, Var) and var not in given}
    return sum(shape.size * shape.dtype.itemsize for shape in made.values())


def follow_loss_scale(first: float, records: Iterable[Mapping[str, Any]]) -> ScaleHistory:
    """Reads from the metrics of a run how its loss scale moved.

    Args:
      first: the scale of the first step.
      records: those of `metrics.jsonl`, in order; each has the scale and the count of skips after its step.

    >>> records = [{"step": n, "loss_scale": scale, "skipped_steps": 1} for n, scale in ((1, 1.0), (2, 1.0), (3, 2.0))]
    >>> history = follow_loss_scale(2.0, records)
    >>> history.growths, history.backoffs, history.skipped
    (1, 1, (1,))
    """
    steps = [record for record in records if "loss_scale" in record and "skipped_steps" in record]
    scales = [first, *(record["loss_scale"] for record in steps)]
    moves = [after / before for before, after in itertools.pairwise(scales)]
    return ScaleHistory(
        first=first,
        last=scales[-1],
        lowest=min(scales),
        highest=max(scales),
        growths=sum(move > 1 for move in moves),
        backoffs=sum(move < 1 for move in moves),
        skipped_steps=steps[-1]["skipped_steps"] if steps else 0,
        skipped=tuple(find_skipped_steps(steps)),
    )


def find_skipped_steps(steps: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of the steps after which there was one skip more than before; the one before step 1 has none."""
    before = {"step": 0, "skipped_steps": 0}
    return [
        step["step"]
        for previous, step in itertools.pairwise([before, *steps])
        if step["step"] == previous["step"] + 1 and step["skipped_steps"] > previous["skipped_steps"]
    ]


def describe_shares(shares: Mapping[str, float]) -> str:
    """Says in which dtypes matmuls run.

    >>> describe_shares({"bfloat16": 0.25, "float8_e4m3fn": 0.75})
    '75.0% in float8_e4m3fn, 25.0% in bfloat16'
    """
    parts = [f"{share:.1%} in {dtype}" for dtype, share in sorted(shares.items(), key=lambda item: -item[1])]
    return ", ".join(parts)


def describe_residuals(facts: StepFacts) -> str:
    """Says what is kept for the backward pass.

    >>> describe_residuals(StepFacts({}, {}, 3_000_000, 4_000_000))
    "3 MB, 0.75 of float32's 4 MB"
    """
    kept, expected = facts.residual_bytes, facts.float32_residual_bytes
    if kept == expected:
        return f"{format_bytes(kept)}, as in float32"
    return f"{format_bytes(kept)}, {kept / expected:.2f} of float32's {format_bytes(expected)}"


def describe_scale(scale: ScaleHistory) -> str:
    """Says where the loss scale was.

    >>> describe_scale(ScaleHistory(8.0, 4.0, 2.0, 16.0, growths=2, backoffs=3, skipped_steps=3, skipped=(2, 3, 5)))
    '2^3 to 2^2, between 2^1 and 2^4'
    >>> describe_scale(ScaleHistory(1.0, 1.0, 1.0, 1.0, growths=0, backoffs=0, skipped_steps=0, skipped=()))
    'none: only float16 needs one'
    """
    if scale.lowest == scale.highest:
        return "none: only float16 needs one" if scale.first == 1 else f"{spell_scale(scale.first)} all along"
    first, last, lowest, highest = map(spell_scale, (scale.first, scale.last, scale.lowest, scale.highest))
    return f"{first} to {last}, between {lowest} and {highest}"


def spell_scale(scale: float) -> str:
    """Writes a loss scale as a power of two, if it is one.

    >>> spell_scale(32768.0), spell_scale(1.0), spell_scale(1000.0)
    ('2^15', '2^0', '1000')
    """
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def describe_skips(scale: ScaleHistory, step: int) -> str:
    """Says how many steps were skipped, and which.

    >>> describe_skips(ScaleHistory(8.0, 4.0, 2.0, 16.0, 2, 3, skipped_steps=3, skipped=(2, 3, 5)), 100)
    '3 of 100: 2-3, 5'
    """
    ranges = [f"{first}" if first == last else f"{first}-{last}" for first, last in _join_steps(scale.skipped)]
    others = [f"{len(ranges) - _MOST_RANGES} more"] if len(ranges) > _MOST_RANGES else []
    which = ", ".join([*ranges[:_MOST_RANGES], *others])
    return f"{scale.skipped_steps:,} of {step:,}{f': {which}' if which else ''}"


def _join_steps(steps: Iterable[int]) -> list[tuple[int, int]]:
    """The first and last of each run of steps that follow each other."""
    ranges: list[tuple[int, int]] = []
    for step in steps:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == step - 1 else step
        ranges.append((first, step))
    return ranges
