"""The same short training under several policies, side by side, in a setting in which float16 needs its loss scale.

The setting is an ordinary one: a small GPT on text, the optimizer of `train`, and a loss that is the mean over the
tokens of a large batch. The batch is what matters: `_underflow.py` says why.
"""

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import jmp_policy as jmp
from jmp_policy._base import PyTree
from jmp_policy.report import Style, find_style

from ._data import Corpus, check_size, load_corpus, sample_batch
from ._display import TrainDisplay
from ._gpt import GPTConfig, TrainerConfig
from ._gpt_nnx import NnxTrainer
from ._plot import plot_comparison
from ._run_folder import hold_folder, json_value, new_folder
from ._trainer import NATS_PER_BIT, read_scaling_figures
from ._underflow import measure_zeroed, measure_zeroed_at_logits
from ._verdict import VariantResult

COMPARE_MODEL = GPTConfig(width=32, depth=2, heads=2, context=64)
"""Smaller than the model of `train`, so that four trainings on large batches take minutes on a CPU."""

COMPARE_BATCH_SIZE = 512


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train: a policy, and a loss scale where it is not the policy's own."""

    name: str
    policy: jmp.Policy
    loss_scale: jmp.LossScale | None = None

    @property
    def style(self) -> Style:
        """How its curve looks."""
        return find_style(self.policy, is_scaled=self.loss_scale is None)


_MIXED_FLOAT16 = jmp.Policy("float32", "float16", "float16")

VARIANTS = (
    Variant("float32", jmp.Policy("float32", "float32", "float32")),  # the reference
    Variant("mixed_bfloat16", jmp.Policy("float32", "bfloat16", "bfloat16")),
    Variant("mixed_float16, no scaling", _MIXED_FLOAT16, jmp.NoOpLossScale()),
    Variant("mixed_float16, dynamic scaling", _MIXED_FLOAT16),
)


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """What to train.

    Attributes:
      data: text files and folders; by default the Python standard library.
      steps: the length of each training.
      seed: the seed of parameters and batches.
      out: the folder for the table and the plot; by default the next of `runs/compare-001`, ...
      model: the sizes of the model.
      batch_size: windows in a batch.
    """

    data: tuple[str, ...] = ()
    steps: int = 200
    seed: int = 0
    out: Path | None = None
    model: GPTConfig = COMPARE_MODEL
    batch_size: int = COMPARE_BATCH_SIZE

    @property
    def tokens(self) -> int:
        """The bytes that the loss of a step is the mean of."""
        return self.batch_size * self.model.context


def compare(options: CompareOptions, console: Console) -> tuple[Path, list[VariantResult]]:
    """Trains the nnx GPT under each of `VARIANTS`; writes `table.json` and `loss.png`.

    Returns:
      The folder of these files, and the rows of the table.

    Raises:
      UserError: the data or the folder cannot be used.
    """
    corpus = load_corpus(options.data)
    check_size(corpus, options.model.context)
    folder = new_folder(options.out, prefix="compare-")
    with hold_folder(folder):
        return folder, _compare(options, corpus, folder, console)


def _compare(options: CompareOptions, corpus: Corpus, folder: Path, console: Console) -> list[VariantResult]:
    _describe(options, corpus, console)
    runs = {variant.name: _train(variant, options, corpus, console) for variant in VARIANTS}
    rows = _make_rows(runs, _draw_windows(options, corpus, options.steps))
    styles = {variant.name: variant.style for variant in VARIANTS}
    losses = {name: run.losses for name, run in runs.items()}
    plot_comparison(folder / "loss.png", losses, styles, bytes_per_step=options.tokens)
    table = [{key: json_value(value) for key, value in dataclasses.asdict(row).items()} for row in rows]
    (folder / "table.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return rows


def _describe(options: CompareOptions, corpus: Corpus, console: Console) -> None:
    model, size = options.model, len(corpus.train) + len(corpus.validation)
    blocks = f"{model.depth} blocks of width {model.width}"
    windows = f"{options.batch_size} windows of {model.context} bytes"
    console.print(f"model  byte-level GPT in nnx, {blocks}, {model.heads} heads; AdamW")
    console.print(f"batch  {windows}: the loss of a step is the mean over {options.tokens:,} bytes")
    console.print(f"data   {size:,} bytes of {corpus.source}")
    console.print(f"steps  {options.steps} under each of {len(VARIANTS)} policies, seed {options.seed}")


@dataclasses.dataclass(frozen=True)
class _Run:
    trainer: NnxTrainer
    losses: list[float]
    seconds: list[float]


def _train(variant: Variant, options: CompareOptions, corpus: Corpus, console: Console) -> _Run:
    config = TrainerConfig(variant.policy, options.model, options.seed, loss_scale=variant.loss_scale)
    run = _Run(NnxTrainer(config), [], [])
    with TrainDisplay(console, steps=options.steps, done=0) as display:
        display.note(variant.name)
        for step in range(options.steps):
            windows = _draw_windows(options, corpus, step)
            start = time.perf_counter()
            loss = float(run.trainer.step(windows)) / NATS_PER_BIT
            run.seconds.append(time.perf_counter() - start)
            run.losses.append(loss)
            display.update(step + 1, loss=loss, **read_scaling_figures(run.trainer))
    return run


def _draw_windows(options: CompareOptions, corpus: Corpus, step: int) -> np.ndarray:
    sizes = {"batch_size": options.batch_size, "context": options.model.context}
    return sample_batch(corpus.train, seed=options.seed, step=step, **sizes)


def _make_rows(runs: dict[str, _Run], windows: np.ndarray) -> list[VariantResult]:
    reference = next(iter(runs.values()))
    params = reference.trainer.params
    gradients = {name: _compile_gradient(run.trainer, params, windows) for name, run in runs.items()}
    expected = gradients[next(iter(runs))](params, windows)
    rows = []
    for name, run in runs.items():
        memory = gradients[name].memory_analysis()
        zeroed_share, zeroed_layer_shares = measure_zeroed(gradients[name](params, windows), expected)
        logits, loss_scale = run.trainer.compute_logits(params, windows), jmp.get_loss_scale(run.trainer.opt_state)
        row = VariantResult(
            name=name,
            final_loss=_average_last_losses(run.losses),
            difference=_average_last_losses(run.losses) - _average_last_losses(reference.losses),
            zeroed_gradient_share=zeroed_share,
            **read_scaling_figures(run.trainer),
            parameter_bytes=memory.argument_size_in_bytes - windows.nbytes,
            activation_bytes=memory.temp_size_in_bytes,
            step_seconds=statistics.median(run.seconds),
            zeroed_logits_share=measure_zeroed_at_logits(logits, windows, loss_scale),
            zeroed_layer_shares=zeroed_layer_shares,
        )
        rows.append(row)
    return rows


def _compile_gradient(trainer: NnxTrainer, params: PyTree, windows: np.ndarray) -> Any:
    loss_scale = jmp.get_loss_scale(trainer.opt_state)
    return jax.jit(jmp.grad(trainer.loss_fn, loss_scale=loss_scale)).lower(params, windows).compile()


def _average_last_losses(losses: list[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])
