"""Whole training steps of an MLP that is all parameters, with each way to update them, on real arrays."""

from collections.abc import Callable

import jmp_policy as jmp
from benchmarks._gpu_models import Work
from benchmarks._optimizer_steps import Steps, float16_steps
from benchmarks._optimizer_updates import half_optimizers
from benchmarks._peer_problems import MLP_BATCH
from benchmarks._programs import Program

SIZE, TINY_SIZE = 10**8, 10**4

Build = Callable[[Steps], Program]


def half_steps() -> dict[str, Build]:
    """The ways to update bfloat16 parameters, alone and with steps skipped."""
    steps: dict[str, Build] = {}
    for name, tx in half_optimizers().items():
        steps[name] = lambda steps, tx=tx: steps.minimized(tx)
        skipping = jmp.optim.skip_nonfinite(tx)
        steps[f"{name}, skip_nonfinite"] = lambda steps, tx=skipping: steps.minimized(tx)
    return steps


OPTIMIZERS: dict[str, tuple[str, dict[str, Build]]] = {
    "mixed_float16": ("mixed_float16", float16_steps()),
    "half_parameters": ("bfloat16", half_steps()),
}
"""By table: its policy, and its rows."""


def optimizer_step(table: str, name: str, tiny: bool) -> Work:
    """The step of a row."""
    policy, steps = OPTIMIZERS[table]
    size = TINY_SIZE if tiny else SIZE
    make = lambda: steps[name](Steps(size, policy, real=True)).args  # traced, so that arrays are made on the device
    return Work(steps[name](Steps(size, policy)).step, make, MLP_BATCH)
