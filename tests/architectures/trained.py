"""The trained architectures, each trained once for all tests of a process."""

import functools

import jmp_policy as jmp
from benchmarks.architectures._registry import ARCHITECTURES
from benchmarks.architectures._training import Run, initialize, train

SEEDS = 5

initial = functools.cache(lambda name: initialize(ARCHITECTURES[name], SEEDS))


@functools.cache
def trained(name: str, policy: str, loss_scale: float | None = None) -> Run:
    scale = None if loss_scale is None else jmp.DynamicLossScale(loss_scale)
    return train(ARCHITECTURES[name], jmp.get_policy(policy), initial(name), scale)
