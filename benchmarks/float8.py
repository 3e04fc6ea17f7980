"""Costs and errors of training in 8-bit floating point, against Flax's operations and qwix on the same data.

Run from the root of the repository:

    python -m benchmarks.float8 [--quick]

Three tables of a dense layer, an MLP and a transformer block: the costs of the forward pass and of loss, gradients and
next state, ours over those who do the same; the costs of all over bfloat16; the errors of the gradients.
"""

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence

import jax
from flax import linen

from benchmarks._float8_contestants import (
    BFLOAT16,
    CONTESTANTS,
    PEERS,
    case,
    reference_gradients,
    relative_error,
)
from benchmarks._float8_models import MODELS
from benchmarks._measure import Cost, cost, lowering_seconds
from benchmarks._programs import Program
from benchmarks._results import ResultTable, print_tables

SHAPE = (4, 64, 256)
"""The shape of the input: batch, length, width."""

STEPS = 4
"""How often a gradient is taken, so that delayed scales have seen their data."""


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a dense layer alone, one repeat of what is timed")
    quick = parser.parse_args(argv).quick
    with jax.numpy_dtype_promotion("standard"):
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "qwix")]
        print(", ".join([*versions, jax.default_backend()]))
        print_tables(tables(quick))


def tables(quick: bool) -> Iterator[ResultTable]:
    """The costs over those who do the same and over bfloat16, and the errors."""
    models, repeats = (dict(list(MODELS.items())[:1]), 1) if quick else (MODELS, 3)
    measured = {name: Measured.of(made, repeats) for name, made in models.items()}
    header = ["model", "program", "recipe", "over", *_COSTS]
    yield ResultTable.of("peers", "Ours over those who do the same", header, _peer_rows(measured), _TIMED, _PEER_NOTES)
    header = ["model", "program", "over bfloat16", *_COSTS]
    notes = [
        "A CPU has no products in 8 bits: it widens the numbers, so that nothing here can be below bfloat16 for them."
    ]
    yield ResultTable.of("bfloat16", "All over bfloat16", header, _bfloat16_rows(measured), _TIMED, notes)
    header, rows = ["model", *CONTESTANTS], [error_row(name, made) for name, made in models.items()]
    yield ResultTable.of(
        "errors", "Errors of gradients against float64, over their norm", header, rows, (), _ERROR_NOTES
    )


_COSTS = ["operations", "flops", "bytes", "temporaries", "lowering time"]
_TIMED = ["lowering time"]
_PEER_NOTES = (
    "Operations above 1: ours show a nan of any operand, which Flax hides, and qwix's maximum loses on a CPU; by row "
    "ours are rounded once along each axis that is summed over, qwix's once; in blocks ours read exponents from bits, "
    "and nvfp4 has a scale of the tensor beside those of its blocks, which qwix's has not.",
    "Bytes above 1 in training with delayed scaling: the search for a nan, which XLA:CPU does not fuse.",
    "Temporaries above 1 in training: XLA:CPU has more of ours alive at once. Casts and scales in bfloat16, as Flax "
    "has them, do not change it.",
)
_ERROR_NOTES = (
    "mxfp8 has e4m3 for gradients, with more digits than the e5m2 of float8: its errors are smaller.",
    "bfloat16 has 8 bits more, and is the nearest.",
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Costs of the programs of a model.

    Attributes:
      costs: by program and contestant.
      seconds: to trace and lower them, likewise.
    """

    costs: dict[tuple[str, str], Cost]
    seconds: dict[tuple[str, str], float]

    @classmethod
    def of(cls, made: type[linen.Module], repeats: int) -> "Measured":
        """Measures all contestants, whose lowering is timed in turns."""
        all_programs = programs(made)
        costs = {name: cost(program) for name, program in all_programs.items()}
        seconds = lowering_seconds(list(all_programs.values()), repeats)
        return cls(costs, dict(zip(all_programs, seconds, strict=True)))

    def ratios(self, program: str, mine: str, other: str) -> list[str]:
        """Returns the costs of a contestant over another's."""
        over = self.costs[program, mine].over(self.costs[program, other])
        lowering = self.seconds[program, mine] / self.seconds[program, other]
        return [f"{ratio:.3f}" for ratio in (*dataclasses.astuple(over), lowering)]


def programs(made: type[linen.Module], shape: tuple[int, ...] = SHAPE) -> dict[tuple[str, str], Program]:
    """Returns the programs of all contestants, by task and contestant."""
    cases = {name: case(name, made, shape) for name in CONTESTANTS}
    forward = {("forward", name): each.forward() for name, each in cases.items()}
    return forward | {("training", name): each.training() for name, each in cases.items()}


def error_row(name: str, made: type[linen.Module]) -> list[str]:
    """Returns the distance of each contestant's gradients from float64."""
    expected = reference_gradients(made, SHAPE)
    errors = [relative_error(case(other, made, SHAPE).gradients(STEPS), expected) for other in CONTESTANTS]
    return [name, *(f"{error:.4f}" for error in errors)]


def _peer_rows(measured: dict[str, Measured]) -> list[list[str]]:
    return [
        [name, program, recipe, peer, *of_model.ratios(program, recipe, peer)]
        for name, of_model in measured.items()
        for program in ("forward", "training")
        for recipe, peers in PEERS.items()
        for peer in peers
    ]


def _bfloat16_rows(measured: dict[str, Measured]) -> list[list[str]]:
    return [
        [name, program, contestant, *of_model.ratios(program, contestant, BFLOAT16)]
        for name, of_model in measured.items()
        for program in ("forward", "training")
        for contestant in CONTESTANTS
        if contestant != BFLOAT16
    ]


if __name__ == "__main__":
    main()
