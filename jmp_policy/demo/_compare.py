"""The same short training under several policies, side by side."""

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import jmp_policy as jmp

from .._trees import PyTree
from ._data import Corpus, check_size, load_corpus, sample_batch
from ._display import TrainDisplay
from ._gpt import GPTConfig, TrainerConfig
from ._plot import plot_comparison
from ._run_folder import json_value, new_folder
from ._trainer import NATS_PER_BIT, Trainer, make_trainer, read_scaling_figures


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train: a policy, and a loss scale where it is not the policy's own."""

    name: str
    policy: jmp.Policy
    loss_scale: jmp.LossScale | None = None


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
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    batch_size: int = 16


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
    runs = {variant.name: _train(variant, options, corpus, console) for variant in VARIANTS}
    rows = _make_rows(runs, _draw_windows(options, corpus, options.steps))
    plot_comparison(folder / "loss.png", {name: run.losses for name, run in runs.items()})
    table = [{key: json_value(value) for key, value in dataclasses.asdict(row).items()} for row in rows]
    (folder / "table.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return folder, rows


@dataclasses.dataclass(frozen=True)
class _Run:
    trainer: Trainer
    losses: list[float]
    seconds: list[float]


def _train(variant: Variant, options: CompareOptions, corpus: Corpus, console: Console) -> _Run:
    config = TrainerConfig(variant.policy, options.model, options.seed, loss_scale=variant.loss_scale)
    run = _Run(make_trainer("nnx", config), [], [])
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
    grads = {name: gradient(params, windows) for name, gradient in gradients.items()}
    expected = next(iter(grads.values()))
    rows = []
    for name, run in runs.items():
        memory = gradients[name].memory_analysis()
        row = VariantResult(
            name=name,
            final_loss=_average_last_losses(run.losses),
            difference=_average_last_losses(run.losses) - _average_last_losses(reference.losses),
            zeroed_gradient_share=_measure_zeroed_share(grads[name], expected),
            **read_scaling_figures(run.trainer),
            parameter_bytes=memory.argument_size_in_bytes - windows.nbytes,
            activation_bytes=memory.temp_size_in_bytes,
            step_seconds=statistics.median(run.seconds),
        )
        rows.append(row)
    return rows


def _compile_gradient(trainer: Trainer, params: PyTree, windows: np.ndarray) -> Any:
    loss_scale = jmp.get_loss_scale(trainer.opt_state)
    return jax.jit(jmp.grad(trainer.loss_fn, loss_scale=loss_scale)).lower(params, windows).compile()


def _measure_zeroed_share(grads: PyTree, expected: PyTree) -> float:
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True))
    zeroed = sum(int(jnp.sum((grad == 0) & (reference != 0))) for grad, reference in pairs)
    return zeroed / sum(reference.size for _, reference in pairs)


def _average_last_losses(losses: list[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])
