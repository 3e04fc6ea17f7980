"""Opening a run: from the user's wishes to a folder, a configuration and data, of a new run or one to resume."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import jmp_policy as jmp
from jmp_policy.cli import UserError
from jmp_policy.cli.doctor import diagnose

from ._auto_policy import AUTO, decide_policy
from ._data import Corpus, check_size, load_corpus
from ._gpt import GPTConfig, TrainerConfig
from ._mesh import MeshShape
from ._processes import agree, is_first, share
from ._run_folder import RunConfig, RunFolder, hold_folder

DEFAULT_STEPS = 1500
# The library's 2,000, as in jmp and PyTorch, is for runs of many thousand steps: this one would end before the scale
# moves. Short runs take a shorter period; fairseq divides its own by the number of devices, for the same reason. The
# price is a skipped step in a hundred, once the scale is as high as the gradients allow.
GROWTH_PERIOD = 100


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
      mesh: the devices along each axis, such as `"data=2,fsdp=2"`; by default one device, and along data all of several
        processes. A run may be resumed on another.
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
    mesh: str | None = None


Opened = tuple[RunFolder, RunConfig, Corpus]


@contextlib.contextmanager
def open_run(options: TrainOptions, console: Console) -> Iterator[Opened]:
    """Begins a run, or finds the one to resume, and keeps other processes out of its folder.

    Of several processes of a run the first does, and the others do as it says.

    Raises:
      UserError: the options do not fit together, or with the data, the device or the folder.
    """
    with contextlib.ExitStack() as stack:
        begin = functools.partial(_resume if options.resume else _begin, options, console, stack)
        if jax.process_count() == 1:
            yield begin()
            return
        opened = agree(lambda: begin() if is_first() else None)
        told = share("" if opened is None else json.dumps([str(opened[0].path), opened[1].to_json()]))
        yield agree(lambda: opened or _join(*json.loads(told)))


def _join(path: str, config: dict[str, Any]) -> Opened:
    """Opens in another process the run that the first one has opened."""
    folder, run = RunFolder(Path(path), is_writer=False), RunConfig.from_json(config)
    return folder, run, _load_same(folder, run.data, run)


def _begin(options: TrainOptions, console: Console, stack: contextlib.ExitStack) -> Opened:
    policy = None if options.policy is None or options.policy == AUTO else _parse_policy(options.policy)
    model = options.model or GPTConfig()
    corpus = load_corpus(options.data)
    check_size(corpus, model.context)
    batch_size, mesh = options.batch_size or 16, _choose_mesh(options.mesh)
    if mesh is not None:
        mesh.check_sizes(model, batch_size)
        mesh.make_mesh()  # says what is wrong before there is a folder
    config = RunConfig(
        api=options.api or "nnx",
        policy=policy or _choose_policy(console),
        seed=options.seed or 0,
        data=options.data,
        data_sha256=corpus.sha256,
        model=model,
        batch_size=batch_size,
        learning_rate=TrainerConfig.learning_rate,
        steps=options.steps or DEFAULT_STEPS,
        growth_period=GROWTH_PERIOD,
        numerics=options.numerics,
        mesh=mesh,
    )
    folder = RunFolder.create(options.out)
    stack.enter_context(hold_folder(folder.path))
    folder.write_config(config)
    if options.policy == AUTO:
        config = decide_policy(config, corpus, console)
        folder.write_config(config)
    return folder, config, corpus


def _resume(options: TrainOptions, console: Console, stack: contextlib.ExitStack) -> Opened:
    folder = RunFolder.find(options.out)
    stack.enter_context(hold_folder(folder.path))
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
    corpus = _load_same(folder, options.data or saved.data, saved)
    mesh = _choose_mesh(options.mesh) or saved.mesh
    if mesh is not None:
        mesh.check_sizes(saved.model, saved.batch_size)
        mesh.make_mesh()
    may_change = {"steps": options.steps or saved.steps, "numerics": options.numerics or saved.numerics, "mesh": mesh}
    return folder, dataclasses.replace(saved, **may_change), corpus


def _load_same(folder: RunFolder, data: tuple[str, ...], config: RunConfig) -> Corpus:
    corpus = load_corpus(data)
    if corpus.sha256 != config.data_sha256:
        raise UserError(f"{folder.path} was trained on other bytes than those of {corpus.source}: resume it with those")
    check_size(corpus, config.model.context)
    return corpus


def _choose_mesh(text: str | None) -> MeshShape | None:
    if text is not None:
        return MeshShape.parse(text)
    return MeshShape(data=jax.device_count()) if jax.process_count() > 1 else None


def _check_same(folder: RunFolder, name: str, saved: object, asked: object) -> None:
    if asked is None or asked == saved:
        return
    was, is_not = (value.name if isinstance(value, jmp.Policy) else value for value in (saved, asked))
    raise UserError(
        f"{folder.path} was trained with {name} {was}, not {is_not}: resume it with its own, or begin another run "
        "with another --out"
    )


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
