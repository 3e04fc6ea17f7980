"""The rows of the benchmark on a GPU: tables of names, and how to load the program of a name."""

import dataclasses
import functools
from collections.abc import Callable

from benchmarks._gpu_models import PRECISIONS, Work, gpt2, training
from benchmarks._optimizer_steps import Steps, float16_steps
from benchmarks._peer_problems import MLP_BATCH


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: its key in the file of results, its name in the table, and `load`, `(tiny) -> Work`."""

    key: str
    name: str
    load: Callable[[bool], Work]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows that are compared.

    Attributes:
      rows: the first is the one that the others are divided by.
      items: the unit of a step, in the plural; empty if it is not of interest.
    """

    title: str
    rows: tuple[Row, ...]
    items: str = ""


def tables() -> list[Table]:
    """All tables, the most wanted first."""
    gpt = {name: functools.partial(_train, name) for name in PRECISIONS}
    steps = {name: functools.partial(_update, name) for name in float16_steps()}
    optimizers = "Optimizers: AdamW, 100 M float32 parameters, compute in float16"
    return [
        Table("Training a model of GPT-2 small's shape, 8 windows of 1024 tokens", _rows("gpt2", gpt), "tokens"),
        Table(optimizers, _rows("mixed_float16", steps)),
    ]


def _rows(key: str, loads: dict[str, Callable[[bool], Work]]) -> tuple[Row, ...]:
    return tuple(Row(f"{key}/{name.replace('`', '')}", name, load) for name, load in loads.items())


def _train(name: str, tiny: bool) -> Work:
    return training(gpt2(tiny), PRECISIONS[name])


def _update(name: str, tiny: bool) -> Work:
    """A whole training step of an MLP that is all parameters, on real arrays."""
    size, make_step = 10**4 if tiny else 10**8, float16_steps()[name]
    make = lambda: make_step(Steps(size, real=True)).args  # traced, so that arrays are made on the device
    return Work(make_step(Steps(size)).step, make, MLP_BATCH)
