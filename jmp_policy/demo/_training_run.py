"""A training run in progress."""

import time

import jax
import numpy as np
from rich.console import Console

import jmp_policy as jmp

from ._baselines import bigram_bits_per_byte, unigram_bits_per_byte
from ._checkpoints import Checkpoints
from ._data import Corpus, sample_batch, validation_batches
from ._display import TrainDisplay
from ._plot import plot_run
from ._run_folder import RunConfig, RunFolder
from ._stop_request import StopRequest
from ._trainer import NATS_PER_BIT, TrainerConfig, make_trainer, mean_bits_per_byte, scaling_figures

EVALUATE_EVERY = 250
CHECKPOINT_EVERY = 100
EVALUATION_BATCHES = 64


class TrainingRun:
    """Trains, evaluates, and keeps the folder of the run up to date.

    All that a run depends on is its configuration, its corpus and the state of its trainer: one that was killed and
    restored goes on bit-exactly.

    Attributes:
      baselines: bits per byte of what counting achieves on the validation windows, by name.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, corpus: Corpus):
        self.folder, self.config, self.corpus = folder, config, corpus
        self.trainer = make_trainer(
            config.api, TrainerConfig(config.policy, config.model, config.seed, config.learning_rate)
        )
        self._sizes = {"batch_size": config.batch_size, "context": config.model.context}
        self._windows = validation_batches(corpus.validation, count=EVALUATION_BATCHES, **self._sizes)
        self.baselines = {
            "unigram": unigram_bits_per_byte(corpus.train, self._windows),
            "bigram": bigram_bits_per_byte(corpus.train, self._windows),
        }

    def describe(self, console: Console) -> None:
        """Prints what is trained, on what, and where to."""
        config, corpus = self.config, self.corpus
        count = sum(np.size(leaf) for leaf in jax.tree.leaves(self.trainer.params))
        size = len(corpus.train) + len(corpus.validation)
        console.print(f"model   byte-level GPT in {config.api}, {count:,} parameters")
        console.print(f"policy  {config.policy}")
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
        return step or 0

    def loop(self, step: int, checkpoints: Checkpoints, console: Console) -> int:
        """Trains from a step on, to the last one or to Ctrl-C; returns the step that it came to and has saved."""
        last = self.config.steps
        with StopRequest() as stop, TrainDisplay(console, steps=last, done=step) as display:
            while step < last and not stop.requested:
                self._train_step(step, display)
                step += 1
                if step % EVALUATE_EVERY == 0 or step == last:
                    self._evaluate(step, display)
                if step % CHECKPOINT_EVERY == 0 or step == last or stop.requested:
                    checkpoints.save(step, self.trainer.state)
        return step

    def plot(self) -> None:
        """Draws the losses of all steps so far."""
        metrics = self.folder.metrics
        plot_run(self.folder.plot, metrics.curve("loss"), metrics.curve("validation_loss"), self.baselines)

    def _train_step(self, step: int, display: TrainDisplay) -> None:
        start = time.perf_counter()
        windows = sample_batch(self.corpus.train, seed=self.config.seed, step=step, **self._sizes)
        loss = float(self.trainer.step(windows)) / NATS_PER_BIT
        figures = scaling_figures(self.trainer)
        seconds = round(time.perf_counter() - start, 6)
        self.folder.metrics.append({"step": step + 1, "loss": loss, **figures, "step_seconds": seconds})
        display.update(step + 1, loss=loss, **figures)

    def _evaluate(self, step: int, display: TrainDisplay) -> None:
        jmp.optim.check(self.trainer.opt_state)
        loss = mean_bits_per_byte(self.trainer.loss_fn, self.trainer.params, self._windows)
        self.folder.metrics.append({"step": step, "validation_loss": loss})
        display.note(f"step {step}: validation loss {loss:.3f} bits per byte")
