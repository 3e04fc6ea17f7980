"""The same short training in float32, bfloat16, and float16 without and with a loss scale, side by side.

The gradient of a mean loss by a logit is `(p - y) / tokens`, and float16 rounds numbers up to 3e-8 to zero. A mean over
32,768 bytes, which many a real step exceeds, makes that of all wrong bytes less likely than 0.001: nothing makes them
less likely still. Multiplied by a loss scale of 2**15, the same gradients are ordinary numbers of float16.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import jmp_policy as jmp
from jmp_policy.report import find_style

from .data import check_size, load_corpus, sample_batch
from .model import NATS_PER_BIT, GPTConfig, TrainerConfig, make_trainer, read_scaling
from .run import hold_folder, new_folder
from .train import parse_policy, smooth

MODEL, BATCH_SIZE = GPTConfig(width=32, depth=2, heads=2, context=64), 512
SAME, CLEAR = 0.02, 0.1
"""Bits per byte. Losses that end closer than `SAME` count as equal, since other seeds end further apart."""

VARIANTS: dict[str, tuple[str, jmp.LossScale | None]] = {
    "float32": ("float32", None),  # the reference
    "mixed_bfloat16": ("mixed_bfloat16", None),
    "mixed_float16, no scaling": ("mixed_float16", jmp.StaticLossScale(1.0)),  # `NoOpLossScale` would warn
    "mixed_float16, dynamic scaling": ("mixed_float16", None),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the comparison."""

    name: str
    loss: float  # the mean training loss of the last tenth of the steps, in bits per byte
    difference: float  # its difference to the loss in float32
    zeroed: float  # share of the gradient that is zero, and not so in float32 at the same parameters
    skipped_steps: int  # steps that overflowed
    activation_mib: float  # memory of the forward and backward pass, beside the parameters
    step_ms: float  # the median time of a step


def compare(
    data: Sequence[str] = (),
    steps: int = 200,
    seed: int = 0,
    out: Path | None = None,
    model: GPTConfig = MODEL,
    batch_size: int = BATCH_SIZE,
) -> tuple[Path, list[Row]]:
    """Trains the nnx GPT under each of `VARIANTS`, prints a table, and writes `table.json` and `loss.png`.

    Raises:
      UserError: the data or the folder cannot be used.
    """
    corpus = load_corpus(data)
    check_size(corpus, model.context)
    folder = new_folder(out, prefix="compare-")
    with hold_folder(folder):
        print(f"batch  {batch_size} windows of {model.context} bytes: each loss is the mean over", end=" ")
        print(f"{batch_size * model.context:,} bytes of {corpus.source}", flush=True)
        batches = [
            sample_batch(corpus.train, seed=seed, step=step, batch_size=batch_size, context=model.context)
            for step in range(steps + 1)
        ]
        trainers, losses, times = {}, {}, {}
        for name, (policy, scale) in VARIANTS.items():
            config = TrainerConfig(parse_policy(policy), model, seed, loss_scale=scale)
            trainers[name] = make_trainer("nnx", config)
            losses[name], times[name] = _train(trainers[name], batches[:-1])
            print(f"{name}: loss {losses[name][-1]:.3f}", flush=True)
        rows = make_rows(trainers, losses, times, batches[-1])
        table = json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
        (folder / "table.json").write_text(table.replace("NaN", "null") + "\n", encoding="utf-8")
        draw(losses).savefig(folder / "loss.png", dpi=120)
    print("\n".join(["", *tabulate(rows), "", judge(rows), f"{folder}/ holds table.json, loss.png"]))
    return folder, rows


def _train(trainer: Any, batches: Sequence[np.ndarray]) -> tuple[list[float], list[float]]:
    """Returns the loss in bits per byte and the seconds of each step."""
    losses, times = [], []
    for windows in batches:
        start = time.perf_counter()
        losses.append(float(trainer.step(windows)) / NATS_PER_BIT)
        times.append(time.perf_counter() - start)
    return losses, times


def make_rows(
    trainers: dict[str, Any], losses: dict[str, list[float]], times: dict[str, list[float]], windows: np.ndarray
) -> list[Row]:
    """Makes the rows of the table; gradients are those of one batch, at the parameters that float32 ended with."""
    params, steps = trainers["float32"].params, len(losses["float32"])
    final = {name: statistics.fmean(values[-max(1, steps // 10) :]) for name, values in losses.items()}
    rows, expected = [], None
    for name, trainer in trainers.items():
        grad_fn = jmp.grad(trainer.loss_fn, loss_scale=jmp.get_loss_scale(trainer.opt_state))
        compiled = jax.jit(grad_fn).lower(params, windows).compile()
        grads, memory = compiled(params, windows), compiled.memory_analysis()
        expected = grads if expected is None else expected  # float32 comes first
        row = Row(
            name,
            final[name],
            final[name] - final["float32"],
            measure_zeroed(grads, expected),
            read_scaling(trainer.opt_state)["skipped_steps"],
            math.nan if memory is None else memory.temp_size_in_bytes / 2**20,
            statistics.median(times[name]) * 1e3,
        )
        rows.append(row)
    return rows


def measure_zeroed(grads: Any, expected: Any) -> float:
    """Returns the share of elements that are zero although they are not in `expected`.

    >>> measure_zeroed({"w": np.array([1.0, 0.0]), "b": np.zeros(2)}, {"w": np.array([1.0, 1e-9]), "b": np.zeros(2)})
    0.25
    """
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True))
    zeroed = sum(int(((grad == 0) & (reference != 0)).sum()) for grad, reference in pairs)
    return zeroed / sum(reference.size for _, reference in pairs)


def tabulate(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of the table, within 80 columns."""
    heads = f"{'loss':>7}{'vs float32':>11}{'zeroed':>8}{'skipped':>8}{'MiB':>8}{'ms':>6}"
    lines = [f"{'':30}{heads}"]
    for row in rows:
        numbers = f"{row.loss:7.3f}{row.difference:+11.4f}{row.zeroed:8.1%}{row.skipped_steps:8}"
        lines.append(f"{row.name:30}{numbers}{row.activation_mib:8.1f}{row.step_ms:6.0f}")
    lines.append("loss: bits per byte, mean of the last tenth of steps. zeroed: of the gradient")
    return [*lines, "that is not zero in float32. MiB: of activations. ms: of a step, the median."]


def judge(rows: Sequence[Row]) -> str:
    """Says what the losses of float16 without and with a loss scale show."""
    reference, _, unscaled, scaled = rows
    if not math.isfinite(reference.loss):
        return "Verdict: float32 itself does not end at a finite loss, so there is nothing to compare with."
    if not scaled.difference <= SAME:  # nan too
        return "Verdict: float16 falls behind here even with the dynamic loss scale."
    if not unscaled.difference < CLEAR:
        return "Verdict: float16 needs its loss scale here: without it float16 loses, with it it does not."
    if unscaled.difference > SAME:
        return f"Verdict: float16 loses here without a loss scale, by less than {CLEAR:g} bits per byte."
    return "Verdict: float16 loses nothing here. Larger batches and more steps would show what a loss scale saves."


def draw(losses: dict[str, list[float]]) -> Figure:
    """Draws the training loss of each variant, and its difference to float32."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    for name, values in losses.items():
        line = find_style(VARIANTS[name][0], is_scaled="no scaling" not in name).line
        steps = range(1, len(values) + 1)
        curves.plot(steps, smooth(values, 10), **line, label=name)
        differences.plot(steps, smooth(np.subtract(values, losses["float32"]).tolist(), 10), **line)
    differences.axhspan(-SAME, SAME, color="0.5", alpha=0.15, linewidth=0, label=f"within {SAME:g}")
    curves.set(title="Training loss, mean of 10 steps", xlabel="step", ylabel="loss (bits per byte)")
    differences.set(title="Difference to float32", xlabel="step", ylabel="bits per byte")
    for axes in (curves, differences):
        axes.grid(alpha=0.25)
        axes.legend()
    return figure
