"""`jmp-policy train` as the drill starts it: a small model, frequent checkpoints, and a digest of the last state."""

import functools
import hashlib
import sys

import jax
import numpy as np

from examples.gpt import GPTConfig, RunSummary, StepFacts, _open_run, _train
from jmp_policy.cli import main

CHECKPOINT_EVERY = 5


class Run(_train.TrainingRun):
    """A run that leaves the digest of its state, as far as this process has it, in its folder."""

    def loop(self, step, checkpoints, console):
        step = super().loop(step, checkpoints, console)
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.trainer.state):
            for shard in leaf.addressable_shards:
                digest.update(np.asarray(shard.data).tobytes())
        path = self.folder.path / f"digest-{jax.process_index()}"
        path.write_text(f"{step} {digest.hexdigest()}", encoding="utf-8")
        return step

    def plot(self):
        """Nothing: kills are the matter here, and plots take long."""

    def summarize(self, step):
        """What is known without tracing the step."""
        return RunSummary(self.config.policy.name, step, StepFacts({}, {}, 0, 0), self._follow_loss_scale())


if __name__ == "__main__":
    _train.CHECKPOINT_EVERY, _train.TrainingRun = CHECKPOINT_EVERY, Run
    _open_run.GPTConfig = functools.partial(GPTConfig, width=16, depth=1, heads=2, context=16)
    _train.EVALUATION_BATCHES = 1
    sys.exit(main(["train", *sys.argv[1:]]))
