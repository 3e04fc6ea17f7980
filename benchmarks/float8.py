"""Costs and errors of training in 8-bit floating point, against Flax's operations and qwix on the same data.

Run from the root of the repository:

    python -m benchmarks.float8 [--quick]

Two tables of a dense layer, an MLP and a transformer block: the costs of the forward pass and of loss, gradients and
next state, ours over those who do the same; the errors of the gradients.
"""

import dataclasses
from collections.abc import Iterator

from flax import linen

from benchmarks._float8_contestants import (
    BFLOAT16,
    CONTESTANTS,
    MODELS,
    PEERS,
    Case,
    case,
    reference_gradients,
    relative_error,
)
from benchmarks._measure import cost
from benchmarks._results import ResultTable, run_alone

SHAPE = (4, 64, 256)
"""The shape of the input: batch, length, width."""

STEPS = 4
"""How often a gradient is taken, so that delayed scales have seen their data."""


def tables(quick: bool) -> Iterator[ResultTable]:
    """The costs over those who do the same, and the errors; a quick run measures a dense layer alone."""
    models = dict(list(MODELS.items())[:1]) if quick else MODELS
    header = ["model", "program", "recipe", "over", "operations", "flops", "bytes", "temporaries"]
    rows = [row for name, made in models.items() for row in cost_rows(name, made)]
    yield ResultTable.of("peers", "Ours over those who do the same", header, rows, notes=_PEER_NOTES)
    rows = [error_row(name, made) for name, made in models.items()]
    title = "Errors of gradients against float64, over their norm"
    yield ResultTable.of("errors", title, ["model", *CONTESTANTS], rows, notes=_ERROR_NOTES)


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


def cost_rows(name: str, made: type[linen.Module]) -> Iterator[list[str]]:
    """Yields our costs over those of each peer, for the forward pass and for a training step."""
    cases = {contestant: case(contestant, made, SHAPE) for contestant in CONTESTANTS}
    for program, make in {"forward": Case.forward, "training": Case.training}.items():
        costs = {contestant: cost(make(each)) for contestant, each in cases.items() if contestant != BFLOAT16}
        for recipe, peers in PEERS.items():
            for peer in peers:
                ratios = dataclasses.astuple(costs[recipe].over(costs[peer]))
                yield [name, program, recipe, peer, *(f"{ratio:.3f}" for ratio in ratios)]


def error_row(name: str, made: type[linen.Module]) -> list[str]:
    """Returns the distance of each contestant's gradients from float64."""
    expected = reference_gradients(made, SHAPE)
    errors = [relative_error(case(other, made, SHAPE).gradients(STEPS), expected) for other in CONTESTANTS]
    return [name, *(f"{error:.4f}" for error in errors)]


if __name__ == "__main__":
    run_alone(__doc__, tables)
