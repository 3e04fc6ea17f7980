"""One process of a run, for the tests: `python worker.py REQUEST` trains, and prints what it holds in the end."""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import tiny
from jax.experimental import multihost_utils

from examples.gpt import _gpt_linen, _train, train
from examples.gpt._trainer import read_scaling_figures

PLANT = 255
"""A byte that the text does not hold: where it is a target, the logits are infinite."""


def plant_infinity(request: dict) -> None:
    """Has the rows of the last process overflow in one step."""
    sample_rows, cross_entropy = _train.sample_rows, _gpt_linen.cross_entropy

    def sample_bad_rows(data, rows, **wishes):
        windows = sample_rows(data, rows, **wishes)
        is_bad = wishes["step"] == request["planted"] and request["index"] == request["count"] - 1
        return np.full_like(windows, PLANT) if is_bad else windows

    def overflow(logits, targets):
        infinite = jax.numpy.where((targets == PLANT)[..., None], jax.numpy.inf, 0.0)
        return cross_entropy(logits + infinite.astype(logits.dtype), targets)

    _train.sample_rows, _gpt_linen.cross_entropy = sample_bad_rows, overflow


class Recorder(_train.MeshTrainer):
    """Keeps the trainer of the run, and the losses of its steps."""

    made: "Recorder"

    def __init__(self, *args):
        super().__init__(*args)
        self.losses, Recorder.made = [], self

    def step(self, windows):
        loss = super().step(windows)
        self.losses.append(float(loss))
        return loss


def digest_parts(tree) -> list[tuple[str, str, str]]:
    """Which part of which array each device of this process has."""
    return [
        (jax.tree_util.keystr(path), str(shard.index), hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest())
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        for shard in leaf.addressable_shards
    ]


def main(request: dict) -> None:
    jax.config.update("jax_num_cpu_devices", request["devices"])
    if request["count"] > 1:
        place = request["coordinator"], request["count"], request["index"]
        jax.distributed.initialize(*place, initialization_timeout=120, heartbeat_timeout_seconds=60)
        multihost_utils.sync_global_devices("joined")
    _train.MeshTrainer = Recorder
    if request["planted"] is not None:
        plant_infinity(request)
    options = tiny.options(Path(request["folder"]), out=Path(request["out"]), **request["wishes"])
    console = tiny.silent_console()
    with jax.numpy_dtype_promotion("standard"):
        result = train(options, console)
    figures = {name: float(value) for name, value in read_scaling_figures(Recorder.made).items()}
    parts = digest_parts(Recorder.made.state)
    print(json.dumps({"losses": Recorder.made.losses, "figures": figures, "parts": parts, "step": result.step}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
