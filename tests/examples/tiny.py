"""Training so small that it takes seconds, compilation included."""

import contextlib
import io
import json
import random
from pathlib import Path

import jax
import optax

import jmp_policy as jmp
from examples.gpt.model import GPTConfig, TrainerConfig, cross_entropy, split_windows
from examples.gpt.train import train

MODEL = GPTConfig(width=16, depth=1, heads=2, context=16)


def write_text(path: Path) -> Path:
    """Random words, which a bigram model cannot spell."""
    words = ["policy", "compute", "parameter", "float", "scale", "gradient", "underflow", "half"]
    path.write_text(" ".join(random.Random(0).choices(words, k=5000)), encoding="utf-8")
    return path


def run(folder: Path, *, resume: bool = False, **wishes) -> str:
    """Runs a tiny training on the text in `folder`; returns what it printed. A wish of None is not said."""
    defaults = {"policy": "float32", "data": (str(folder / "text.txt"),), "steps": 6, "out": folder / "run"}
    defaults |= {"model": MODEL, "batch_size": 2}
    chosen = {name: value for name, value in (defaults | wishes).items() if value is not None}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(chosen, out=chosen.pop("out", None), resume=resume)
    return printed.getvalue()


def read_records(path: Path) -> list[dict]:
    """The metrics of a run, without the times."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != "step_seconds"} for line in lines]


def read_contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TableTrainer:
    """A trainer of a table of bigram logits: for what does not depend on the model, and compiled only once."""

    def __init__(self, config: TrainerConfig):
        table = jax.random.normal(jax.random.key(config.seed), (256, 256)).astype(config.policy.param_dtype)
        scale = jmp.NoOpLossScale() if config.loss_scale is None else config.loss_scale
        self.state = {"params": table, "opt_state": _optimizer(scale).init(table)}

    @property
    def params(self) -> jax.Array:
        return self.state["params"]

    @property
    def opt_state(self):
        return self.state["opt_state"]

    def step(self, windows) -> jax.Array:
        loss, self.state = _step(self.state, windows)
        return loss

    def loss_fn(self, params, windows) -> jax.Array:
        return _loss_fn(params, windows)

    def audit(self, windows) -> jmp.numerics.AuditReport:
        return jmp.numerics.audit(_step)(self.state, windows)

    def judge(self, windows, scale) -> jmp.optim.Verdict:
        find = jmp.optim.find_origin(_loss_fn, _optimizer(scale))
        return find.verdict(self.params, self.opt_state._replace(loss_scale=scale), windows)

    def watch(self, windows) -> None:
        pass

    def observe(self, windows) -> jmp.numerics.Stats:
        return _observe(self.params, windows)[1]


def _optimizer(scale: jmp.LossScale) -> optax.GradientTransformationExtraArgs:
    return jmp.optim.loss_scaled(_INNER, scale)


_INNER = optax.sgd(0.1, momentum=0.9)


@jax.jit
def _loss_fn(table, windows) -> jax.Array:
    inputs, targets = split_windows(windows)
    return cross_entropy(table[inputs], targets)


@jax.jit
def _step(state, windows):
    scale = jmp.get_loss_scale(state["opt_state"])
    loss, grads = jmp.value_and_grad(_loss_fn, loss_scale=scale)(state["params"], windows)
    params, opt_state = jmp.optim.step(_optimizer(scale), grads, state["opt_state"], state["params"])
    return loss, {"params": params, "opt_state": opt_state}


_observe = jax.jit(jmp.numerics.collect(jax.grad(_loss_fn), of="results"))
