"""Effects of non-finite gradients on the state of a training run: a count of corrupted values, library by library.

Run from the root of the repository:

    python -m benchmarks.faults [--quick]

The same infinities and nans are put into one number of a random gradient, at random steps and once eight times in a
row. A number is corrupted if its bits differ, after the last step, from a run of the same library in which
each non-finite step left everything unchanged but the loss scale.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks._fault_contestants import (
    CLASSES,
    FEATURES,
    Contestant,
    Fault,
    contestants,
    fault_tree,
    plan_faults,
)
from benchmarks._peer_steps import OURS
from benchmarks._results import ResultTable, run_alone

RATE = 0.03
STEPS = 1000
MISSING = "not installed"


@dataclasses.dataclass(frozen=True)
class Count:
    """Counts corrupted values."""

    corrupted: int
    total: int

    def __str__(self) -> str:
        return f"{self.corrupted} / {self.total}"


def corruption(contestant: Contestant, plan: Sequence[Fault | None]) -> dict[str, Count]:
    """Trains through the faults of a plan, and counts the corrupted values, part by part."""
    state = reference = contestant.state
    for seed, fault in enumerate(plan):
        batch = make_batch(seed, contestant.state.params, fault)
        state, _ = contestant.step(state, batch)
        after, _ = contestant.step(reference, batch)
        reference = after if fault is None else contestant.scale_of(reference, after)
    expected = contestant.parts(reference)
    return {name: _differing(part, expected[name]) for name, part in contestant.parts(state).items()}


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the table of corrupted values of each library; a quick run has twenty steps."""
    everyone = contestants()
    ours = everyone[OURS]
    assert ours is not None
    plan = plan_faults(ours.state.params, 20 if quick else STEPS, RATE, seed=0)
    header = ("library", *ours.parts(ours.state))
    rows = []
    for name, contestant in everyone.items():
        counts = [MISSING] * (len(header) - 1) if contestant is None else corruption(contestant, plan).values()
        rows.append((name, *map(str, counts)))
    faults = sum(fault is not None for fault in plan)
    title = f"Corrupted numbers of all, after {faults} faults in {len(plan)} steps"
    yield ResultTable.of("corrupted", title, header, rows, notes=NOTES)


NOTES = (
    "jmp is used as in dm-haiku's imagenet example, which selects parameters, optimizer state and batch statistics; "
    "the user's step counter advances.",
    "DynamicScale is used as in Flax's imagenet example: batch statistics and the step advance on a skipped step.",
    "mixed-precision-for-jax leaves batch statistics and the step to the user; Keras and PyTorch update batch "
    "statistics in the forward pass, before anybody looks at the gradients.",
    "PyTorch's `GradScaler` skips the optimizer and not the schedule, so that all later steps have other learning "
    "rates, and parameters and moments with them.",
    "`optax.apply_if_finite` accepts the sixth non-finite update in a row, after which everything is nan.",
)


def make_batch(seed: int, params: Any, fault: Fault | None) -> Any:
    """A random batch, and what to add to its gradients."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(16, FEATURES)).astype(np.float32)
    return (x, fault_tree(params, fault)), rng.integers(0, CLASSES, 16).astype(np.int32)


def _differing(got: Any, expected: Any) -> Count:
    corrupted = total = 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        bits = [np.atleast_1d(np.asarray(x)).view(np.uint32) for x in (a, b)]
        corrupted += int((bits[0] != bits[1]).sum())
        total += bits[0].size
    return Count(corrupted, total)


if __name__ == "__main__":
    run_alone(__doc__, tables)
