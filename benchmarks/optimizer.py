"""Measures the memory traffic of an optimizer's step, in mixed precision and with half-precision parameters.

Run from the root of the repository:

    python -m benchmarks.optimizer [--quick]

Makes three tables: whole training steps, and half-precision parameters from given gradients and in whole steps. Bytes
accessed, temporaries and bytes updated in place come from XLA's analysis of the compiled step. They are the same on
every run and however busy the machine is. Programs are compiled for the shapes of 10 and 100 million parameters, and
never run.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import optax

import jmp_policy as jmp
from benchmarks._compiled import Figures, count_bytes, count_parameters, traffic
from benchmarks._optimizer_steps import Steps, bfloat16_steps, float16_steps
from benchmarks._optimizer_updates import ADAMW, Update, half_optimizers, half_updates
from benchmarks._programs import Program
from benchmarks._results import ResultTable, run_alone

SIZES = {"10 M": 10**7, "100 M": 10**8}
QUICK_SIZES = {"1 M": 10**6}
HALF_POLICY = "params=bfloat16,compute=bfloat16,output=float32"


@dataclasses.dataclass(frozen=True)
class Row:
    """Measurements of a step.

    Attributes:
      name: its name in the table.
      by_size: its traffic for each size.
      floor: the bytes to access if each array is read once and written once.
      state: bytes of optimizer state per parameter, if they are reported.
      missing: the library that it needs, if that is not installed.
    """

    name: str
    by_size: dict[str, Figures]
    floor: float
    state: float | None = None
    missing: str | None = None


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the three tables; a quick run has only that of float32 parameters."""
    sizes = QUICK_SIZES if quick else SIZES
    title = "A whole step, float32 parameters, in multiples of their bytes"
    yield report("whole", title, whole_steps(sizes), _WHOLE_NOTES)
    if not quick:
        title = "From given gradients, bfloat16 parameters, in bytes per parameter"
        yield report("half_given", title, half_from_gradients(sizes), _HALF_NOTES)
        title = "A whole step by `optim.minimize`, bfloat16 parameters, in bytes per parameter"
        yield report("half_whole", title, half_whole_steps(sizes), _HALF_NOTES)


def report(name: str, title: str, made: Iterable[Row], notes: Sequence[str] = ()) -> ResultTable:
    """Makes a table of rows."""
    rows = list(made)
    sizes = list(rows[0].by_size)
    measured = [f"{figure}, {size}" for figure in ("accessed", "temporaries", "in place") for size in sizes]
    has_state = rows[0].state is not None
    header = ["step", *measured, "floor", *(["state, bytes per parameter"] if has_state else [])]
    cells = map(_cells, rows)
    return ResultTable.of(name, title, header, [row + [""] * (len(header) - len(row)) for row in cells], notes=notes)


def half_from_gradients(sizes: dict[str, int]) -> Iterator[Row]:
    """Measures steps from given gradients, with bfloat16 parameters, in bytes per parameter."""
    for update in half_updates():
        yield _update_row(update, sizes)


def whole_steps(sizes: dict[str, int]) -> Iterator[Row]:
    """Measures steps from a batch, with float32 parameters, in multiples of the bytes of the parameters."""
    for policy, programs in {"mixed_float16": float16_steps(), "mixed_bfloat16": bfloat16_steps()}.items():
        steps = {name: Steps(size, policy) for name, size in sizes.items()}
        for name, program in programs.items():
            try:
                yield _step_row(f"{policy.removeprefix('mixed_')}: {name}", steps, program, ADAMW, unit=4)
            except ImportError as error:
                yield Row(f"{policy.removeprefix('mixed_')}: {name}", {}, 0, missing=error.name)


def half_whole_steps(sizes: dict[str, int]) -> Iterator[Row]:
    """Measures steps from a batch, with bfloat16 parameters, in bytes per parameter."""
    steps = {name: Steps(size, HALF_POLICY) for name, size in sizes.items()}
    for name, tx in half_optimizers().items():
        yield _step_row(name, steps, lambda s, tx=tx: s.minimized(tx), tx, unit=1)
        tx = jmp.optim.skip_nonfinite(tx)
        yield _step_row(f"{name}, skip_nonfinite", steps, lambda s, tx=tx: s.minimized(tx), tx, unit=1)


_WHOLE_NOTES = (
    "Below `optim.minimize` are only the rows without a check: a check reads the gradients before anything may be "
    "written.",
    "`value_and_grad` with update and apply accesses more than jmp, whose select XLA:CPU fuses with the update; it "
    "needs fewer temporaries. Use `optim.minimize`, or `optim.step` where you look at the gradients.",
)
_HALF_NOTES = (
    "A split master weight and Kahan's compensation have 2 bytes of state fewer than float32 copies, and more traffic "
    "on a CPU: it writes the split value down first, and copies the two arrays that Kahan's parameter and memory read.",
    "Stochastic rounding has the most traffic, for its random numbers.",
)

def _update_row(update: Update, sizes: dict[str, int]) -> Row:
    """Measures an update, in bytes per parameter."""
    by_size = {}
    for name, size in sizes.items():
        by_size[name] = traffic(update.program(size)).per(count_parameters(update.params(size)))
    size = max(sizes.values())
    count = count_parameters(update.params(size))
    return Row(update.name, by_size, update.floor(size) / count, update.state_bytes(size) / count)


def _step_row(
    name: str,
    steps: dict[str, Steps],
    program: Callable[[Steps], Program],
    tx: optax.GradientTransformation,
    unit: int,
) -> Row:
    """Measures a whole step, in multiples of `unit` bytes per parameter; `tx` is for its state."""
    by_size = {size: traffic(program(s)).per(unit * count_parameters(s.params)) for size, s in steps.items()}
    largest = max(steps.values(), key=lambda s: count_bytes(s.params))
    return Row(name, by_size, largest.floor(tx) / (unit * count_parameters(largest.params)))


def _cells(row: Row) -> list[str]:
    if row.missing:
        return [row.name, f"not measured: needs {row.missing}"]
    names = ("bytes_accessed", "temporaries", "aliased")
    measured = [f"{getattr(figures, name):.2f}" for name in names for figures in row.by_size.values()]
    return [row.name, *measured, f"{row.floor:.2f}", *([] if row.state is None else [f"{row.state:.2f}"])]


if __name__ == "__main__":
    run_alone(__doc__, tables)
