"""One process of a run, for the tests: `python worker.py REQUEST` trains, and prints what it holds in the end."""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import tiny

from examples.gpt import gpt_linen, train
from examples.gpt.devices import join
from examples.gpt.model import read_scaling

PLANT = 255
"""A byte that the text does not hold: where it is a target, the logits are infinite."""


def plant_infinity(request: dict) -> None:
    """Has the rows of the last process overflow in one step."""
    sample_batch, cross_entropy = train.sample_batch, gpt_linen.cross_entropy

    def sample_bad_rows(data, *args, **wishes):
        windows = sample_batch(data, *args, **wishes)
        is_bad = wishes["step"] == request["planted"] and request["index"] == request["count"] - 1
        return np.full_like(windows, PLANT) if is_bad else windows

    def overflow(logits, targets):
        infinite = jax.numpy.where((targets == PLANT)[..., None], jax.numpy.inf, 0.0)
        return cross_entropy(logits + infinite.astype(logits.dtype), targets)

    train.sample_batch, gpt_linen.cross_entropy = sample_bad_rows, overflow


class Recorder(train.Run):
    """Keeps itself, and the losses of its steps."""

    made: "Recorder"

    def __init__(self, *args):
        super().__init__(*args)
        self.losses, Recorder.made = [], self
        step = self.trainer.step

        def record(windows):
            loss = step(windows)
            self.losses.append(float(loss))
            return loss

        self.trainer.step = record


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
        join(request["coordinator"], request["count"], request["index"], 120)
    train.Run = Recorder
    if request["planted"] is not None:
        plant_infinity(request)
    with jax.numpy_dtype_promotion("standard"):
        tiny.run(Path(request["folder"]), out=Path(request["out"]), **request["wishes"])
    parts = digest_parts(Recorder.made.trainer.state)
    scaling = read_scaling(Recorder.made.trainer.opt_state)
    print(json.dumps({"losses": Recorder.made.losses, "scaling": scaling, "parts": parts}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
