"""Runs `python -m examples.gpt train` for the drill: a small model, frequent checkpoints, and a digest of its state."""

import functools
import hashlib
import sys

import jax
import numpy as np

from examples.gpt import __main__, train
from examples.gpt.model import GPTConfig
from examples.gpt.run import RunConfig

CHECKPOINT_EVERY = 5


class Run(train.Run):
    """A run that leaves the digest of its state, as far as this process has it, in its folder."""

    def loop(self, step):
        step, number = super().loop(step)
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.trainer.state):
            for shard in leaf.addressable_shards:
                digest.update(np.asarray(shard.data).tobytes())
        path = self.folder / f"digest-{jax.process_index()}"
        path.write_text(f"{step} {digest.hexdigest()}", encoding="utf-8")
        return step, number

    def draw(self):
        """Nothing: the drill is about kills, and plots take long."""

    def summarize(self, step):
        """Nothing: the audit would trace the step."""


if __name__ == "__main__":
    train.CHECKPOINT_EVERY, train.EVALUATION_BATCHES, train.Run = CHECKPOINT_EVERY, 1, Run
    train.RunConfig = functools.partial(RunConfig, model=GPTConfig(width=16, depth=1, heads=2, context=16))
    sys.exit(__main__.main(["train", *sys.argv[1:]]))
