"""Costs of a program, in metrics that do not depend on how busy the machine is."""

import dataclasses
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks._compiled import compile_for_figures, figures
from benchmarks._programs import Program

_OPERATION = re.compile(r'^\s*(?:%\S+(?:, %\S+)* = )?(?:"?(?:stablehlo|chlo)\.(\w+)|(?:func\.)?(call) @)', re.MULTILINE)
_NO_WORK = {"return", "constant"}  # ends of regions, and literals
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = \S.*? ([a-z][\w\-]*)\(", re.MULTILINE)
_NO_INSTRUCTION = {"parameter", "constant", "tuple", "get-tuple-element"}


@dataclasses.dataclass(frozen=True)
class Cost:
    """XLA's analysis of a program.

    Attributes:
      operations: StableHLO operations, calls included, literals and ends of regions not.
      flops: floating-point operations.
      bytes_accessed: bytes read and written.
      temporaries: bytes of temporary buffers.
    """

    operations: float
    flops: float
    bytes_accessed: float
    temporaries: float

    def over(self, other: "Cost") -> "Cost":
        """The ratios of this cost to another."""
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return Cost(*(a / b if b else 1.0 if a == b else float("inf") for a, b in zip(mine, others, strict=True)))


def cost(program: Program) -> Cost:
    """The cost of a program, which is compiled for it."""
    lowered = program.lower()
    return cost_of(lowered, compile_for_figures(lowered))


def cost_of(lowered: Any, compiled: Any) -> Cost:
    """The cost of a program that was compiled for this machine."""
    found = figures(compiled)
    return Cost(count_operations(lowered.as_text()), found.flops, found.bytes_accessed, found.temporaries)


def count_calls(trace: Callable[[], Any], *, clear: bool = True) -> int:
    """The number of functions, of Python and of C, that are called; by default with JAX's caches cleared."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    if clear:
        jax.clear_caches()
    gc.collect()
    gc.disable()  # finalizers are functions as well, and nobody knows when they run
    sys.setprofile(count)
    try:
        trace()
    finally:
        sys.setprofile(None)
        gc.enable()
    return sum(counts.values())


def count_operations(stablehlo: str) -> int:
    """The number of operations in the text of a StableHLO module.

    >>> count_operations('''%0 = stablehlo.constant dense<1.0>
    ... %1:2 = "stablehlo.case"(%c) ({
    ...   %2 = call @_where(%0, %1)
    ...   stablehlo.return %2''')
    2
    """
    names = [operation or call for operation, call in _OPERATION.findall(stablehlo)]
    return sum(name not in _NO_WORK for name in names)


def count_instructions(hlo: str) -> int:
    """The number of instructions in the text of an optimized HLO module, those inside of fusions included.

    Parameters, literals, tuples and their elements do no work, and are not counted.

    >>> count_instructions('''
    ...   %x = f32[2]{0} parameter(0)
    ...   ROOT %add.1 = f32[2]{0} add(%x, %x), metadata={op_name="add"}''')
    1
    """
    return sum(name not in _NO_INSTRUCTION for name in _INSTRUCTION.findall(hlo))


def lowering_seconds(programs: Sequence[Program], repeats: int = 10) -> list[float]:
    """The process time that each program takes to be traced and lowered, as `seconds` measures it."""
    return seconds([program.lower for program in programs], repeats)


def seconds(traces: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """The least process time of each over interleaved repeats, with JAX's caches cleared.

    Each repeat runs below another number of frames: the same tracing took 601 to 833 ms with 0 to 56 more frames on the
    stack. The garbage of the one before is collected outside the clock, and the order turns round each time: otherwise
    each program pays for its predecessor, which made a difference of 10 %.
    """
    taken: list[list[float]] = [[] for _ in traces]
    for repeat in range(repeats):
        for index in range(len(traces)) if repeat % 2 else reversed(range(len(traces))):
            jax.clear_caches()
            gc.collect()
            taken[index].append(_call_below(7 * repeat, lambda index=index: _time(traces[index])))
    return [min(times) for times in taken]


def _call_below(frames: int, fun: Callable[[], float]) -> float:
    return _call_below(frames - 1, fun) if frames else fun()


def _time(trace: Callable[[], Any]) -> float:
    start = time.process_time()
    trace()
    return time.process_time() - start


def median_seconds(runs: Sequence[Callable[[], None]], repeats: int, clock: Callable[[], float]) -> list[float]:
    """Returns the seconds of each function, a median over repeats in which all functions alternate."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, taken in zip(runs, seconds, strict=True):
            start = clock()
            run()
            taken.append(clock() - start)
    return [statistics.median(taken) for taken in seconds]
