"""Training the byte-level GPT: from the user's wishes to a run, begun or resumed."""

import dataclasses
import math
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

import jmp_policy as jmp

from ..cli._command import UserError
from ..doctor import diagnose
from ._auto_policy import AUTO, decide_policy
from ._checkpoints import Checkpoints
from ._data import (
    Corpus,
    bigram_bits_per_byte,
    check_size,
    load_corpus,
    sample_batch,
    unigram_bits_per_byte,
    validation_batches,
)
from ._display import StopRequest, TrainDisplay
from ._gpt import GPTConfig, TrainerConfig
from ._numerics import is_measured, write_numerics
from ._origins import SkipInspector
from ._plot import plot_run
from ._run_folder import RunConfig, RunFolder
from ._summary import RunSummary, ScaleHistory, examine_step, follow_loss_scale, spell_scale
from ._trainer import NATS_PER_BIT, Trainer, make_trainer, measure_bits_per_byte, read_scaling_figures

DEFAULT_STEPS = 1500
# The library's 2,000, as in jmp and PyTorch, is for runs of many thousand steps: this one would end before the scale
# moves. Short runs take a shorter period; fairseq divides its own by the number of devices, for the same reason. The
# price is a skipped step in a hundred, once the scale is as high as the gradients allow.
GROWTH_PERIOD = 100
EVALUATE_EVERY = 250
CHECKPOINT_EVERY = 100
EVALUATION_BATCHES = 64
RUN_FILES = "summary.json", "metrics.jsonl", "loss.png", "checkpoints/"

_FLOAT32 = jmp.Policy("float32", "float32", "float32")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """What the user asked for; `None` (or nothing) where they did not say.

    A new run then takes the default, and a resumed one what it was begun with.

    Attributes:
      api: the Flax API, `"nnx"` (the default) or `"linen"`.
      policy: a policy as `get_policy` reads it; by default what `diagnose` recommends, if that is half precision, and
        `mixed_float16` if not. `"auto"` is that too, with float32 where some steps in it say that half would lose.
      data: text files and folders; by default the Python standard library.
      steps: where to stop.
      seed: the seed of parameters and batches, 0 by default.
      out: the folder of the run; by default the next of `runs/001`, `runs/002`, ..., the last one to resume.
      resume: whether to continue a run.
      model: the sizes of the model.
      batch_size: windows in a batch.
      numerics: every how many steps to measure tensors, the first step too; by default none.
    """

    api: str | None = None
    policy: str | None = None
    data: tuple[str, ...] = ()
    steps: int | None = None
    seed: int | None = None
    out: Path | None = None
    resume: bool = False
    model: GPTConfig | None = None
    batch_size: int | None = None
    numerics: int | None = None


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended; losses are bits per byte of the same validation windows.

    Attributes:
      folder: the folder of the run.
      step: the step it came to.
      finished: whether that was the last one; false after Ctrl-C.
      validation: the loss of the model; nan unless the run finished.
      unigram: the loss of the byte frequencies.
      bigram: the loss of the frequencies of pairs.
      summary: what the policy did.
      files: what the folder holds of it, by name.
    """

    folder: Path
    step: int
    finished: bool
    validation: float
    unigram: float
    bigram: float
    summary: RunSummary
    files: tuple[str, ...] = RUN_FILES


def train(options: TrainOptions, console: Console) -> TrainResult:
    """Begins a run or resumes one, and trains until its last step or Ctrl-C.

    Raises:
      UserError: the options do not fit together, or with the data, the device or the folder.
      FloatingPointError: training is stuck, since every step overflows.
    """
    folder, config, corpus = _resume(options) if options.resume else _begin(options, console)
    run = TrainingRun(folder, config, corpus)
    run.describe(console)
    with Checkpoints(folder.checkpoints) as checkpoints:
        step = _restore(run, checkpoints)
        try:
            step = run.loop(step, checkpoints, console)
        except FloatingPointError:
            run.plot()  # which shows since when training is stuck
            raise
    run.plot()
    finished = step == config.steps
    validation = folder.metrics.curve("validation_loss")[1][-1] if finished else math.nan
    summary = run.summarize(step)
    return TrainResult(
        folder.path, step, finished, validation, **run.baselines, summary=summary, files=_list_files(folder)
    )


def _list_files(folder: RunFolder) -> tuple[str, ...]:
    others = [file.name for pattern in ("numerics*", "origins.jsonl") for file in folder.path.glob(pattern)]
    return *RUN_FILES, *sorted(others)


class TrainingRun:
    """Trains, evaluates, and keeps the folder of the run up to date.

    All that a run depends on is its configuration, its corpus and the state of its trainer: one that was killed and
    restored goes on bit-exactly.

    Attributes:
      baselines: bits per byte of what counting achieves on the validation windows, by name.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, corpus: Corpus):
        self.folder, self.config, self.corpus = folder, config, corpus
        self.trainer = self._make_trainer(config.policy_map or config.policy, config.make_loss_scale())
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
        if config.policy_map is not None:
            console.print(f"map     {config.policy_map}")
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
        return step or 0

    def loop(self, step: int, checkpoints: Checkpoints, console: Console) -> int:
        """Trains from a step on, to the last one or to Ctrl-C; returns the step that it came to and has saved."""
        last, inspector = self.config.steps, SkipInspector(self.trainer, self.folder.origins)
        with StopRequest() as stop, TrainDisplay(console, steps=last, done=step) as display:
            while step < last and not stop.requested:
                self._train_step(step, display, inspector)
                step += 1
                if step % EVALUATE_EVERY == 0 or step == last:
                    self._evaluate(step, display, inspector)
                if step % CHECKPOINT_EVERY == 0 or step == last or stop.requested:
                    checkpoints.save(step, self.trainer.state)
        return step

    def plot(self) -> None:
        """Draws the losses of all steps so far, the loss scale, and what was measured of tensors."""
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
        facts = examine_step(self.trainer, self._make_trainer(_FLOAT32, jmp.NoOpLossScale()), windows)
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

    def _train_step(self, step: int, display: TrainDisplay, inspector: SkipInspector) -> None:
        windows = sample_batch(self.corpus.train, seed=self.config.seed, step=step, **self._sizes)
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
        loss = measure_bits_per_byte(self.trainer.loss_fn, self.trainer.params, self._windows)
        self.folder.metrics.append({"step": step, "validation_loss": loss})
        display.note(f"step {step}: validation loss {loss:.3f} bits per byte")


def _begin(options: TrainOptions, console: Console) -> tuple[RunFolder, RunConfig, Corpus]:
    policy = None if options.policy is None or options.policy == AUTO else _parse_policy(options.policy)
    model = options.model or GPTConfig()
    corpus = load_corpus(options.data)
    check_size(corpus, model.context)
    config = RunConfig(
        api=options.api or "nnx",
        policy=policy or _choose_policy(console),
        seed=options.seed or 0,
        data=options.data,
        data_sha256=corpus.sha256,
        model=model,
        batch_size=options.batch_size or 16,
        learning_rate=TrainerConfig.learning_rate,
        steps=options.steps or DEFAULT_STEPS,
        growth_period=GROWTH_PERIOD,
        numerics=options.numerics,
    )
    folder = RunFolder.create(options.out, config)
    if options.policy == AUTO:
        config = decide_policy(config, corpus, console)
        folder.write_config(config)
    return folder, config, corpus


def _resume(options: TrainOptions) -> tuple[RunFolder, RunConfig, Corpus]:
    folder = RunFolder.find(options.out)
    saved = folder.read_config()
    asked = {
        "api": options.api,
        "policy": None if options.policy is None or options.policy == AUTO else _parse_policy(options.policy),
        "seed": options.seed,
        "model": options.model,
        "batch_size": options.batch_size,
    }
    for name, value in asked.items():
        _check_same(folder, name, getattr(saved, name), value)
    corpus = load_corpus(options.data or saved.data)
    if corpus.sha256 != saved.data_sha256:
        raise UserError(f"{folder.path} was trained on other bytes than those of {corpus.source}: resume it with those")
    may_change = {"steps": options.steps or saved.steps, "numerics": options.numerics or saved.numerics}
    return folder, dataclasses.replace(saved, **may_change), corpus


def _check_same(folder: RunFolder, name: str, saved: object, asked: object) -> None:
    if asked is None or asked == saved:
        return
    was, is_not = (value.name if isinstance(value, jmp.Policy) else value for value in (saved, asked))
    raise UserError(
        f"{folder.path} was trained with {name} {was}, not {is_not}: resume it with its own, or begin another run "
        "with another --out"
    )


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


def _parse_policy(spec: str) -> jmp.Policy:
    try:
        policy = jmp.get_policy(spec)
    except ValueError as error:
        raise UserError(f"--policy: {error}") from error
    assert isinstance(policy, jmp.Policy)  # a string never stands for a map
    return policy


def _choose_policy(console: Console) -> jmp.Policy:
    """What the doctor recommends; mixed_float16 where that is float32, since half precision is what a run shows."""
    diagnosis = diagnose(half_only=True)
    recommendation = diagnosis.recommendation
    if recommendation.policy != "float32":
        console.print(f"The doctor recommends {recommendation.policy}: {recommendation.reason}.")
        return _parse_policy(recommendation.policy)
    speedup = diagnosis.steps["float16"].speedup.value
    console.print(
        f"float32 would be as fast or faster here: a pass in float16 runs at {speedup:.2f}x its speed. "
        "--policy float32 trains so; jmp-policy doctor says why."
    )
    return _parse_policy("mixed_float16")


def _describe_loss_scale(scale: jmp.LossScale) -> str:
    if not isinstance(scale, jmp.DynamicLossScale):
        return "none: only float16 needs one"
    start = spell_scale(float(scale.loss_scale))
    return f"{start} at first, doubled by {scale.period:,} finite steps in a row, halved by an overflow"
