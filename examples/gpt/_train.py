"""Training the byte-level GPT: the loop of a run, and what it leaves in its folder."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import jmp_policy as jmp
from jmp_policy.cli import UserError

from ._checkpoints import Checkpoints
from ._data import Corpus, bigram_bits_per_byte, sample_batch, sample_rows, unigram_bits_per_byte, validation_batches
from ._display import TrainDisplay
from ._gpt import TrainerConfig
from ._mesh_trainer import MeshTrainer
from ._numerics import is_measured, read_history, write_numerics
from ._open_run import TrainOptions, open_run
from ._origins import SkipInspector
from ._plot import plot_run
from ._processes import agree, make_stop_request, meet_along_axes
from ._run_folder import RunConfig, RunFolder
from ._sharding import make_batch, place_batches
from ._summary import RunSummary, ScaleHistory, examine_step, follow_loss_scale, spell_scale
from ._trainer import NATS_PER_BIT, Trainer, make_trainer, measure_bits_per_byte, read_scaling_figures

EVALUATE_EVERY = 250
CHECKPOINT_EVERY = 100
EVALUATION_BATCHES = 64
RUN_FILES = "summary.json", "metrics.jsonl", "loss.png", "checkpoints/"

_FLOAT32 = jmp.Policy("float32", "float32", "float32")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended; losses are bits per byte of the same validation windows.

    Attributes:
      folder: the folder of the run.
      step: the step it came to.
      finished: whether that was the last one; false after Ctrl-C and SIGTERM.
      validation: the loss of the model; nan unless the run finished.
      unigram: the loss of the byte frequencies.
      bigram: the loss of the frequencies of pairs.
      summary: what the policy did.
      files: what the folder holds of it, by name.
      interrupted: whether Ctrl-C stopped it.
    """

    folder: Path
    step: int
    finished: bool
    validation: float
    unigram: float
    bigram: float
    summary: RunSummary
    files: tuple[str, ...] = RUN_FILES
    interrupted: bool = False


def train(options: TrainOptions, console: Console) -> TrainResult:
    """Begins a run or resumes one, and trains until its last step, Ctrl-C or SIGTERM.

    Every process of a run calls it, and all return the same but for the figures that only the first one reads.

    Raises:
      UserError: the options do not fit together, or with the data, the device or the folder.
      FloatingPointError: training is stuck, since every step overflows.
    """
    with open_run(options, console) as opened:
        return _train(TrainingRun(*opened), console)


def _train(run: "TrainingRun", console: Console) -> TrainResult:
    folder, config = run.folder, run.config
    run.describe(console)
    with Checkpoints(folder.checkpoints) as checkpoints:
        step = agree(lambda: _restore(run, checkpoints))
        try:
            step = run.loop(step, checkpoints, console)
        except FloatingPointError:
            run.plot()  # which shows since when training is stuck
            raise
    figures = agree(lambda: _conclude(run, step))
    return TrainResult(folder.path, step, step == config.steps, **figures, interrupted=run.interrupted)


def _conclude(run: "TrainingRun", step: int) -> dict[str, Any]:
    """Plots a run up to a step, and returns what is to be said of it."""
    run.plot()
    finished, folder = step == run.config.steps, run.folder
    losses = folder.metrics.curve("validation_loss")[1] if finished and folder.is_writer else []
    validation = losses[-1] if losses else math.nan  # a resumed run may have lost its metrics
    return {"validation": validation, **run.baselines, "summary": run.summarize(step), "files": _list_files(folder)}


def _list_files(folder: RunFolder) -> tuple[str, ...]:
    others = [file.name for pattern in ("numerics*", "origins.jsonl") for file in folder.path.glob(pattern)]
    return *RUN_FILES, *sorted(others)


class TrainingRun:
    """Trains, evaluates, and keeps the folder of the run up to date.

    All that a run depends on is its configuration, its corpus and the state of its trainer: one that was killed and
    restored goes on bit-exactly.

    Attributes:
      baselines: bits per byte of what counting achieves on the validation windows, by name.
      interrupted: whether Ctrl-C has stopped it.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, corpus: Corpus):
        self.folder, self.config, self.corpus, self.interrupted = folder, config, corpus, False
        self._traced = self._make_trainer(config.policy_map or config.policy, config.make_loss_scale())
        self._mesh = None if config.mesh is None else config.mesh.make_mesh()
        self.trainer = self._traced
        if self._mesh is not None:
            meet_along_axes(self._mesh)
            self.trainer = MeshTrainer(self._traced, self._mesh)
        self._sizes = {"batch_size": config.batch_size, "context": config.model.context}
        windows = validation_batches(corpus.validation, count=EVALUATION_BATCHES, **self._sizes)
        self._shape = windows.shape[1:]
        self._validation = windows if self._mesh is None else place_batches(windows, self._mesh)
        self.baselines = {
            "unigram": unigram_bits_per_byte(corpus.train, windows),
            "bigram": bigram_bits_per_byte(corpus.train, windows),
        }

    def describe(self, console: Console) -> None:
        """Prints what is trained, on what, and where to."""
        config, corpus = self.config, self.corpus
        count = sum(np.size(leaf) for leaf in jax.tree.leaves(self.trainer.params))
        size = len(corpus.train) + len(corpus.validation)
        console.print(f"model   byte-level GPT in {config.api}, {count:,} parameters")
        console.print(f"policy  {config.policy}")
        if config.policy_map is not None:
            console.print(f"map     {config.policy_map}")
        if config.mesh is not None:
            console.print(f"mesh    {config.mesh}; processes: {jax.process_count()}")
        console.print(f"scale   {_describe_loss_scale(config.make_loss_scale())}")
        console.print(f"data    {size:,} bytes of {corpus.source}")
        console.print(f"out     {self.folder.path}")

    def restore(self, checkpoints: Checkpoints) -> int:
        """Goes back to the newest checkpoint; returns its step, 0 if there is none.

        What the metrics say of later steps is dropped: the run comes by there again.
        """
        step = checkpoints.latest_step
        if step is not None:
            self.trainer.state = checkpoints.restore(step, self.trainer.state)
        self.folder.metrics.truncate(step or 0)
        self.folder.numerics.truncate(step or 0)
        self.folder.origins.truncate(step or 0)
        read_history(self.folder)  # which would fail at the end
        return step or 0

    def loop(self, step: int, checkpoints: Checkpoints, console: Console) -> int:
        """Trains from a step on, until the last one or a request to stop; returns the step that it has saved."""
        last, inspector = self.config.steps, SkipInspector(self.trainer, self.folder.origins)
        is_due = False
        with make_stop_request() as stop, TrainDisplay(console, steps=last, done=step) as display:
            while step < last and not is_due:
                self._train_step(step, display, inspector)
                step += 1
                if step % EVALUATE_EVERY == 0 or step == last:
                    self._evaluate(step, display, inspector)
                is_due = stop.is_due(step)
                if step % CHECKPOINT_EVERY == 0 or step == last or is_due:
                    checkpoints.save(step, self.trainer.state)
            self.interrupted = is_due and stop.interrupted
        return step

    def plot(self) -> None:
        """Draws the losses of all steps so far, the loss scale, and what was measured of tensors."""
        if not self.folder.is_writer:
            return
        metrics, scale = self.folder.metrics, self._follow_loss_scale()
        steps, scales = metrics.curve("loss_scale")
        plot_run(
            self.folder.plot,
            self.config.policy,
            losses=metrics.curve("loss"),
            validation=metrics.curve("validation_loss"),
            baselines=self.baselines,
            scales=([0, *steps], [scale.first, *scales]),
            skipped=scale.skipped,
        )
        write_numerics(self.folder)

    def summarize(self, step: int) -> RunSummary:
        """Says what the policy did up to a step, and writes it to `summary.json`."""
        windows = sample_batch(self.corpus.train, seed=self.config.seed, step=0, **self._sizes)
        facts = examine_step(self._traced, self._make_trainer(_FLOAT32, jmp.NoOpLossScale()), windows)
        summary = RunSummary(self.config.policy.name, step, facts, self._follow_loss_scale())
        self.folder.write_summary(summary.to_json())
        return summary

    def _follow_loss_scale(self) -> ScaleHistory:
        first = jmp.metrics(self.config.make_loss_scale())["loss_scale"]
        return follow_loss_scale(float(first), self.folder.metrics.read())

    def _make_trainer(self, policy: jmp.Policy | jmp.PolicyMap, loss_scale: jmp.LossScale) -> Trainer:
        config = self.config
        trainer = TrainerConfig(policy, config.model, config.seed, config.learning_rate, loss_scale)
        return make_trainer(config.api, trainer)

    def _draw(self, step: int) -> jax.typing.ArrayLike:
        """The batch of a step; on a mesh, each process draws the rows of its own devices."""
        if self._mesh is None:
            return sample_batch(self.corpus.train, seed=self.config.seed, step=step, **self._sizes)
        wishes = {"seed": self.config.seed, "step": step, **self._sizes}
        return make_batch(lambda rows: sample_rows(self.corpus.train, rows, **wishes), self._shape, self._mesh)

    def _train_step(self, step: int, display: TrainDisplay, inspector: SkipInspector) -> None:
        windows = self._draw(step)
        if is_measured(step + 1, self.config.numerics):
            self.folder.numerics.append({"step": step + 1, **self.trainer.observe(windows).to_dict()})
        start = time.perf_counter()
        loss = float(self.trainer.step(windows)) / NATS_PER_BIT
        figures = read_scaling_figures(self.trainer)
        seconds = round(time.perf_counter() - start, 6)
        self.folder.metrics.append({"step": step + 1, "loss": loss, **figures, "step_seconds": seconds})
        display.update(step + 1, loss=loss, **figures)
        inspector.look(step + 1, windows, loss, figures, display)

    def _evaluate(self, step: int, display: TrainDisplay, inspector: SkipInspector) -> None:
        try:
            jmp.optim.check(self.trainer.opt_state)
        except FloatingPointError as error:
            if inspector.last is None:
                raise
            raise FloatingPointError(f"{error} {inspector.last.describe()}") from None
        loss = measure_bits_per_byte(self.trainer.loss_fn, self.trainer.params, self._validation)
        self.folder.metrics.append({"step": step, "validation_loss": loss})
        display.note(f"step {step}: validation loss {loss:.3f} bits per byte")


def _restore(run: TrainingRun, checkpoints: Checkpoints) -> int:
    steps = run.config.steps
    if (checkpoints.latest_step or 0) > steps:
        raise UserError(
            f"{run.folder.path} is at step {checkpoints.latest_step} already, past --steps {steps}: give it more"
        )
    step = run.restore(checkpoints)
    if run.folder.read_config() != run.config:
        run.folder.write_config(run.config)
    return step


def _describe_loss_scale(scale: jmp.LossScale) -> str:
    if not isinstance(scale, jmp.DynamicLossScale):
        return "none: only float16 needs one"
    start = spell_scale(float(scale.loss_scale))
    return f"{start} at first, doubled by {scale.period:,} finite steps in a row, halved by an overflow"
