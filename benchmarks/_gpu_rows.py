"""The rows of the benchmark: tables of names, and how to load the object of a name."""

import dataclasses
import functools
from collections.abc import Callable

from benchmarks._gpu_models import PRECISIONS, Work, gpt2, observing, resnet50, training
from benchmarks._gpu_optimizers import OPTIMIZERS, optimizer_step
from benchmarks._gpu_products import PRODUCTS, multiply

SIZES = (8192, 16384, 4096, 2048, 1024)

OBSERVED = {"`numerics.collect`, each step": None, "`numerics.collect`, `every=100`": 100}
"""How often statistics are measured. To choose between two compiled steps on the host costs nothing."""

GPT_ONLY = {"bfloat16, `with_policy`, `skip_nonfinite`", "float8, `with_policy`, current"}
"""What ResNet-50, which takes long to compile, is not asked."""


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
      alone: whether each row is measured in a process of its own, which tells its peak memory.
    """

    key: str
    title: str
    rows: tuple[Row, ...]
    items: str = ""
    alone: bool = True

    def jobs(self, tiny: bool = False) -> list[tuple[Row, ...]]:
        """The rows that are measured in one go: all of them where nobody asks for the peak memory of each."""
        return [(row,) for row in self.rows] if self.alone and not tiny else [self.rows]


def tables() -> list[Table]:
    """All tables, the quickest and most wanted first."""
    products = [
        _table(
            f"products-{size}",
            f"Products of two matrices of {size} by {size}",
            {name: functools.partial(_multiply, name, size) for name in PRODUCTS},
            alone=False,
        )
        for size in SIZES
    ]
    gpt = {name: functools.partial(_train, "gpt2", name) for name in PRECISIONS}
    by_hand = "bfloat16 by hand"
    observed = {by_hand: functools.partial(_train, "gpt2", by_hand)}
    observed |= {name: functools.partial(_observe, every) for name, every in OBSERVED.items()}
    mixed, half = (
        {name: functools.partial(optimizer_step, table, name) for name in steps}
        for table, (_, steps) in OPTIMIZERS.items()
    )
    resnet = {name: functools.partial(_train, "resnet50", name) for name in PRECISIONS if name not in GPT_ONLY}
    return [
        *products,
        _table("gpt2", "Training a model of GPT-2 small's shape, 8 windows of 1024 tokens", gpt, items="tokens"),
        _table("mixed_float16", "Optimizers: AdamW, 100 M float32 parameters, compute in float16", mixed),
        _table("half_parameters", "Optimizers: AdamW, 100 M bfloat16 parameters", half),
        _table("numerics", "Statistics of each product of that model, trained in bfloat16", observed, items="tokens"),
        _table("resnet50", "Training ResNet-50, 128 images of 224 by 224", resnet, items="images"),
    ]


def _table(key: str, title: str, loads: dict[str, Callable[[bool], Work]], **options: object) -> Table:
    rows = tuple(Row(f"{key}/{name.replace('`', '')}", name, load) for name, load in loads.items())
    return Table(key, title, rows, **options)  # type: ignore[arg-type]


def _multiply(name: str, size: int, tiny: bool) -> Work:
    return multiply(PRODUCTS[name], size // 32 if tiny else size)


def _train(task: str, name: str, tiny: bool) -> Work:
    return training({"gpt2": gpt2, "resnet50": resnet50}[task](tiny), PRECISIONS[name])


def _observe(every: int | None, tiny: bool) -> Work:
    return observing(gpt2(tiny), PRECISIONS["bfloat16 by hand"], every)
