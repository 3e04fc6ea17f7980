"""Training the GPT: the loop of a run, and what it leaves in its folder."""

import contextlib
import dataclasses
import functools
import json
import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import jmp_policy as jmp
from jmp_policy.report import OTHER_STYLES, REFERENCE_LINE, UNSCALED, draw_document, find_style

from . import UserError
from .data import Corpus, bigram_bits_per_byte, check_size, load_corpus, sample_batch, validation_batches
from .devices import StopRequest, agree, copy_to_all, is_first, make_batch, make_mesh, meet, place_state, share
from .model import NATS_PER_BIT, TrainerConfig, make_trainer, measure_bits_per_byte, read_scaling
from .run import (
    FIXED,
    RunConfig,
    append_line,
    dump_config,
    find_run,
    hold_folder,
    new_folder,
    open_checkpoints,
    parse_config,
    read_config,
    read_lines,
    restore_checkpoint,
    save_checkpoint,
    truncate_lines,
    write_config,
)

PRINT_EVERY, EVALUATE_EVERY, CHECKPOINT_EVERY = 50, 250, 100
EVALUATION_BATCHES = 32
FLOAT32 = jmp.Policy("float32", "float32", "float32")

GROWTH_PERIOD = 100
"""Finite steps in a row that double the loss scale. The library's 2,000 is for runs of many thousand steps."""


def train(wishes: Mapping[str, Any], *, out: Path | None = None, resume: bool = False) -> bool:
    """Begins a run or resumes one, and trains until its last step, Ctrl-C or SIGTERM.

    Every process of a run calls it.

    Args:
      wishes: fields of `RunConfig`; the others have their defaults, or in a resumed run the values of that run.
      out: the folder of the run; by default the next of `runs/001`, `runs/002`, ..., the last one to resume.
      resume: True to continue a run.

    Returns:
      True if Ctrl-C stopped it.

    Raises:
      UserError: the wishes do not fit together, or with the data, the devices or the folder.
      FloatingPointError: training is stuck, since every step overflows.
    """
    with contextlib.ExitStack() as stack:
        begin = functools.partial(open_run, dict(wishes), out, resume, stack)
        if jax.process_count() == 1:
            folder, config, corpus = begin()
        else:  # the first process opens the run, and tells the others
            opened = agree(lambda: begin() if is_first() else None)
            folder = Path(share(str(opened[0]) if opened else ""))
            config = parse_config(json.loads(share(dump_config(opened[1]) if opened else "")))
            corpus = agree(lambda: opened[2] if opened else load_same(folder, config))
        run = Run(folder, config, corpus)
        if run.mesh is not None:
            stack.enter_context(jax.set_mesh(run.mesh))
        run.describe()
        stack.callback(run.checkpoints.close)
        step = agree(run.restore)
        try:
            step, number = run.loop(step)
        finally:
            run.draw()
        run.summarize(step)
        return number == signal.SIGINT


def open_run(
    wishes: dict[str, Any], out: Path | None, resume: bool, stack: contextlib.ExitStack
) -> tuple[Path, RunConfig, Corpus]:
    """Finds or makes the folder of a run, and keeps other processes out of it."""
    if "policy" in wishes:
        wishes["policy"] = str(parse_policy(wishes["policy"]))
    if jax.process_count() > 1:
        wishes.setdefault("mesh", f"data={jax.device_count()}")
    if resume:
        folder = find_run(out)
        stack.enter_context(hold_folder(folder))
        saved = read_config(folder)
        for name in sorted(wishes.keys() & FIXED):
            if wishes[name] != getattr(saved, name):
                raise UserError(
                    f"{folder} was trained with {name} {getattr(saved, name)}, not {wishes[name]}: resume it with its "
                    "own, or begin another run with another --out"
                )
        config = dataclasses.replace(saved, **wishes)
        corpus = load_same(folder, config)
        check_sizes(config, corpus)
    else:
        config = RunConfig(**wishes)
        corpus = load_corpus(config.data)
        config = dataclasses.replace(config, policy=str(parse_policy(config.policy)), data_sha256=corpus.sha256)
        check_sizes(config, corpus)
        folder = new_folder(out, hint="continue a run with --resume, or choose another --out")
        stack.enter_context(hold_folder(folder))
        write_config(folder, config)
    return folder, config, corpus


def check_sizes(config: RunConfig, corpus: Corpus) -> None:
    """Raises a UserError, before anything is written, if the data or the devices do not suffice."""
    check_size(corpus, config.model.context)
    if config.mesh is not None:
        make_mesh(config.mesh, config.model, config.batch_size)


def load_same(folder: Path, config: RunConfig) -> Corpus:
    """Loads the data of a run; raises a UserError if it has changed."""
    corpus = load_corpus(config.data)
    if corpus.sha256 != config.data_sha256:
        raise UserError(f"{folder} was trained on other bytes than those of {corpus.source}: resume it with those")
    return corpus


def parse_policy(spec: str) -> jmp.Policy:
    """Reads a policy; raises a UserError if it is none."""
    try:
        policy = jmp.get_policy(spec)
    except ValueError as error:
        raise UserError(f"--policy: {error}") from error
    assert isinstance(policy, jmp.Policy)  # only a mapping becomes a map
    return policy


class Run:
    """A run: its trainer, another one that computes the same in float32 to compare with, its data and its folder.

    Configuration, corpus and state determine everything, so a run that was killed and restored continues bit-exactly.
    """

    def __init__(self, folder: Path, config: RunConfig, corpus: Corpus):
        self.folder, self.config, self.corpus = folder, config, corpus
        policy = parse_policy(config.policy)
        scale = policy.loss_scale()
        if isinstance(scale, jmp.DynamicLossScale):
            scale = jmp.DynamicLossScale(period=GROWTH_PERIOD)
        self.first_scale, self.policy, self.verdict = float(jmp.metrics(scale)["loss_scale"]), policy, ""
        self.last_skip = 0
        self.trainer = make_trainer(config.api, TrainerConfig(policy, config.model, config.seed, loss_scale=scale))
        reference = TrainerConfig(FLOAT32, config.model, config.seed)
        self.reference = make_trainer(config.api, reference) if policy != FLOAT32 else None
        self.mesh = None if config.mesh is None else make_mesh(config.mesh, config.model, config.batch_size)
        sizes = {"batch_size": config.batch_size, "context": config.model.context}
        windows = validation_batches(corpus.validation, count=EVALUATION_BATCHES, **sizes)
        self.bigram = bigram_bits_per_byte(corpus.train, windows)
        self.validation: Sequence[jax.typing.ArrayLike] = list(windows)
        if (mesh := self.mesh) is not None:
            meet(mesh)
            # Each process draws all parameters and keeps its part: a run begins with the same bits on every mesh.
            self.state = place_state(self.state, mesh)
            self.validation = [make_batch(batch.__getitem__, batch.shape, mesh) for batch in windows]
        self.metrics, self.numerics = (folder / f"{name}.jsonl" for name in ("metrics", "numerics"))
        self.skips = jmp.optim.SkipLog(folder / "skips.jsonl") if is_first() else None
        self.checkpoints = open_checkpoints(folder)

    @property
    def state(self) -> dict[str, Any]:
        """The state of the trainer, and that of the training in float32."""
        return {"trained": self.trainer.state} | ({"float32": self.reference.state} if self.reference else {})

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.trainer.state = state["trained"]
        if self.reference:
            self.reference.state = state["float32"]

    def describe(self) -> None:
        """Prints the model, its data, and the folder that it is written to."""
        config, corpus = self.config, self.corpus
        count = sum(np.size(leaf) for leaf in jax.tree.leaves(self.trainer.params))
        say(f"model   byte-level GPT in {config.api}, {count:,} parameters")
        say(f"policy  {config.policy}{'; float32 to compare with' if self.reference else ''}")
        if config.mesh is not None:
            say(f"mesh    {config.mesh}; processes: {jax.process_count()}")
        say(f"data    {len(corpus.train) + len(corpus.validation):,} bytes of {corpus.source}")
        say(f"out     {self.folder}")

    def restore(self) -> int:
        """Goes back to the newest checkpoint, and drops the records of later steps; returns its step, or 0."""
        step = self.checkpoints.latest_step() or 0
        if step > self.config.steps:
            raise UserError(f"{self.folder} is at step {step} already, past --steps {self.config.steps}: give it more")
        if step:
            state = restore_checkpoint(self.checkpoints, step, self.state)
            self.state = state if self.mesh is None else place_state(state, self.mesh)
        for file in (self.metrics, self.numerics):
            truncate_lines(file, step)
        if self.skips:
            self.skips.truncate(step)
        write_config(self.folder, self.config)
        return step

    def loop(self, step: int) -> tuple[int, int]:
        """Trains from a step on, until the last one or a signal; returns the step that it saved, and the signal."""
        last, is_due = self.config.steps, False
        with StopRequest() as stop:
            while step < last and not is_due:
                self.train_step(step + 1)
                step += 1
                if step % EVALUATE_EVERY == 0 or step == last:
                    self.evaluate(step)
                is_due = stop.is_due(step)
                if step % CHECKPOINT_EVERY == 0 or step == last or is_due:
                    save_checkpoint(self.checkpoints, step, self.state)
        return step, stop.number if is_due else 0

    def train_step(self, step: int) -> None:
        """Takes one step, and writes its metrics."""
        windows = self.draw_batch(step - 1)
        every = self.config.numerics
        if every is not None and (step == 1 or step % every == 0):
            # Another compiled function measures, before the step: training is bit for bit the same without it.
            stats = copy_to_all(self.trainer.observe(windows), self.mesh)
            append_line(self.numerics, {"step": step, **stats.to_dict()})
        scale = jax.device_get(jmp.get_loss_scale(self.trainer.opt_state))  # the step donates its buffers
        before, start = read_scaling(self.trainer.opt_state), time.perf_counter()
        loss = float(self.trainer.step(windows)) / NATS_PER_BIT
        after, seconds = read_scaling(self.trainer.opt_state), round(time.perf_counter() - start, 6)
        record = {"step": step, "loss": loss, **after, "step_seconds": seconds}
        if self.reference:
            record["float32_loss"] = float(self.reference.step(windows)) / NATS_PER_BIT
        append_line(self.metrics, record)
        if after["skipped_steps"] > before["skipped_steps"]:
            self.explain_skip(step, windows, scale)
        else:
            self.trainer.watch(windows)
        if step % PRINT_EVERY == 0:
            losses = format_loss(loss, record.get("float32_loss"))
            say(f"step {step}: loss {losses}, scale {after['loss_scale']:g}, skipped {after['skipped_steps']}")

    def draw_batch(self, step: int) -> jax.typing.ArrayLike:
        """Draws the batch of a step; on a mesh, each process draws the rows of its devices."""
        seed, batch_size, context = self.config.seed, self.config.batch_size, self.config.model.context

        def draw(rows: slice) -> np.ndarray:
            return sample_batch(self.corpus.train, rows, seed=seed, step=step, batch_size=batch_size, context=context)

        return draw(slice(None)) if self.mesh is None else make_batch(draw, (batch_size, context + 1), self.mesh)

    def explain_skip(self, step: int, windows: jax.typing.ArrayLike, scale: jmp.LossScale) -> None:
        """Replays a skipped step, which left the parameters as they were; prints the verdict and logs it."""
        verdict = self.trainer.judge(windows, scale)
        if self.skips:
            self.skips.add(verdict, batch=step - 1, step=step)
        reason = verdict.text.partition("because")[2]
        if self.verdict != reason or self.last_skip != step - 1:  # a run that is stuck says it once
            say(f"step {step} skipped because{reason}")
        self.verdict, self.last_skip = reason, step

    def evaluate(self, step: int) -> None:
        """Measures the validation loss; raises a FloatingPointError if training is stuck."""
        last = f"The last skipped step was so because{self.verdict}"
        jmp.optim.raise_if_stuck(self.trainer.opt_state, verdict=(lambda: last) if self.verdict else None)
        measure = lambda trainer: measure_bits_per_byte(trainer.loss_fn, trainer.params, self.validation)
        record = {"step": step, "validation_loss": measure(self.trainer)}
        if self.reference:
            record["float32_validation_loss"] = measure(self.reference)
        append_line(self.metrics, record)
        losses = format_loss(record["validation_loss"], record.get("float32_validation_loss"))
        say(f"step {step}: validation loss {losses} bits per byte")

    def summarize(self, step: int) -> None:
        """Prints the effects of the policy, and how good the model is."""
        if not is_first():
            return
        windows = np.zeros((self.config.batch_size, self.config.model.context + 1), np.uint8)
        shares = self.trainer.audit(windows).matmul_shares  # traced, not run
        scales = [self.first_scale, *curve(self.metrics, "loss_scale")[1]]
        say(f"matmul flops   {', '.join(f'{share:.1%} in {dtype}' for dtype, share in shares.items()) or 'none'}")
        say(f"loss scale     {scales[0]:g} to {scales[-1]:g}, between {min(scales):g} and {max(scales):g}")
        skipped = read_scaling(self.trainer.opt_state)["skipped_steps"]
        say(f"skipped steps  {skipped} of {step}")
        if skipped and isinstance(jmp.get_loss_scale(self.trainer.opt_state), jmp.DynamicLossScale):
            say(f"               The scale doubles after {GROWTH_PERIOD} finite steps. A step whose gradients overflow")
            say("               halves it, and is skipped: the parameters stay as they were.")
        say(f"{self.folder}/ holds {', '.join(sorted(file.name for file in self.folder.glob('[!.]*')))}")
        losses, bigram = curve(self.metrics, "validation_loss")[1], self.bigram
        if step < self.config.steps:
            say(f"stopped and saved at step {step}: continue with --resume --out {self.folder}")
        elif losses:  # a resumed run may have lost its metrics
            verdict = "beats" if losses[-1] < bigram else "does not beat"
            expected = next(reversed(curve(self.metrics, "float32_validation_loss")[1]), None)
            reached = f"{format_loss(losses[-1], expected)} bits per byte"
            say(f"The model reaches {reached} and {verdict} the bigram baseline ({bigram:.3f}).")

    def draw(self) -> None:
        """Draws the losses and the loss scale so far, and the measurements of tensors."""
        if not is_first():
            return
        figure = draw_loss(self.metrics, self.policy, self.first_scale, self.bigram)
        figure.savefig(self.folder / "loss.png", dpi=120)
        lines = self.numerics.read_text(encoding="utf-8").splitlines() if self.numerics.exists() else []
        if lines:
            history = jmp.numerics.StatsHistory.from_json_lines(lines)
            stats, note = history.merge(), f"Tensors of {len(history.steps)} steps, trained with {self.config.policy}."
            (self.folder / "numerics.txt").write_text(f"{note}\n\n{stats}\n", encoding="utf-8")
            page = draw_document(stats, "numerics of a run", note)
            (self.folder / "numerics.html").write_text(page, encoding="utf-8")
            gradients = stats.select(lambda site: site.direction in ("backward", "result"))
            gradients.plot().savefig(self.folder / "numerics-exponents.png", dpi=120)
            history.plot_amax().savefig(self.folder / "numerics-amax.png", dpi=120)


def say(text: str) -> None:
    """Prints, in the first process of a run."""
    if is_first():
        print(text, flush=True)


def format_loss(loss: float, expected: float | None) -> str:
    """Writes a loss, with the one in float32 if there is one."""
    return f"{loss:.3f}" if expected is None else f"{loss:.3f} (float32 {expected:.3f})"


def draw_loss(metrics: Path, policy: jmp.Policy, first_scale: float, bigram: float) -> Figure:
    """Draws the loss and the one in float32 over the baseline, their difference, and the loss scale below."""
    (steps, losses), (_, expected) = curve(metrics, "loss"), curve(metrics, "float32_loss")
    heights = (5, 2, 2) if expected else (5, 2)
    figure = Figure(figsize=(7, 7.5 if expected else 6), layout="constrained")
    above, *middle, below = panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    line = find_style(policy).line
    above.plot(steps, losses, color=line["color"], alpha=0.3, linewidth=0.7, label="training, each step")
    if expected:
        above.plot(steps, smooth(expected, 20), **find_style(FLOAT32).line, label="in float32, mean of 20 steps")
        differences = smooth(np.subtract(losses, expected).tolist(), 20)
        middle[0].plot(steps, differences, color=line["color"], label="difference to float32, mean of 20 steps")
        middle[0].set(ylabel="bits per byte")
    above.plot(steps, smooth(losses, 20), **line, label="training, mean of the last 20 steps")
    style = OTHER_STYLES[2].line | {"marker": "o", "markersize": 5, "label": "validation"}
    above.plot(*curve(metrics, "validation_loss"), **style)
    above.axhline(bigram, **REFERENCE_LINE | {"label": "bigram baseline"})
    above.set(title=f"Byte-level GPT, {policy.name}", ylabel="loss in bits per byte")
    scaled, scales = curve(metrics, "loss_scale")
    below.step([0, *scaled], [first_scale, *scales], where="post", **OTHER_STYLES[0].line)
    skips = curve(metrics, "skipped_steps")[1]
    skipped = [i for i, count in enumerate(skips) if count > (skips[i - 1] if i else 0)]
    marks = [scaled[i] for i in skipped], [[first_scale, *scales][i] for i in skipped]
    below.plot(*marks, "x", color=find_style(UNSCALED).color, label=f"skipped step ({len(skipped)})")
    below.set(xlabel="step", ylabel="loss scale")
    below.set_yscale("log", base=2)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.legend()
    return figure


def curve(file: Path, key: str) -> tuple[list[int], list[float]]:
    """Reads the steps that have a number in a file of metrics, and the number of each; nan for null."""
    records = [record for record in read_lines(file) if key in record]
    return [record["step"] for record in records], [
        math.nan if record[key] is None else record[key] for record in records
    ]


def smooth(values: Sequence[float], horizon: int) -> list[float]:
    """Returns the mean over the last `horizon` values. Running sums would keep one nan for ever."""
    return [float(np.mean(values[max(0, end - horizon) : end])) for end in range(1, len(values) + 1)]
