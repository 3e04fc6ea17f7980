"""Measures the cost and error of quantized policies, against qwix on the same model with the same weights.

Run from the root of the repository:

    python -m benchmarks.quant [--quick]

Makes two tables: the costs of the forward pass and of quantization-aware training, ours over qwix's; the error of the
logits and the bytes of the parameters.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks._measure import cost, lowering_seconds
from benchmarks._programs import Program
from benchmarks._quant_contestants import (
    SCHEMES,
    Scheme,
    Served,
    gpt_params,
    in_float32,
    our_training,
    ours,
    random_batch,
    training_with_qwix,
    with_qwix,
)
from benchmarks._results import ResultTable, run_alone
from examples.gpt.model import GPTConfig

QUICK_GPT = GPTConfig(depth=1, context=16)


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the tables of costs, and of errors of served models."""
    config, repeats, schemes = (QUICK_GPT, 1, SCHEMES[:1]) if quick else (GPTConfig(), 10, SCHEMES)
    rows = [row for scheme in schemes for row in cost_rows(scheme, config, repeats)]
    timed = ["lowering time"]
    yield ResultTable.of("costs", "The demo's GPT, ours over qwix's", _COST_HEADER, rows, timed, _COST_NOTES)
    title = "The error of logits, and bytes of the parameters over float32"
    yield ResultTable.of("errors", title, _ERROR_HEADER, [error_row(scheme, config) for scheme in schemes])


_COST_NOTES = (
    "Above 1: ours show a nan in any input, which qwix's maximum loses on a CPU, and XLA:CPU does not fuse the search.",
    "Above 1 with qwix's default: ours differentiate at the rounded operands, as the row before does; by default qwix "
    "does at the operands before rounding, which spares it the numbers that the integers stand for.",
    "Operations above 1 in 4 bits: ours take apart numbers that are stored two to a byte, with a zero point; qwix has "
    "one number to a byte on a CPU, and no zero point.",
)
_COST_HEADER = ["format", "program", "operations", "flops", "bytes", "temporaries", "lowering time"]
_ERROR_HEADER = ["format", "error of logits", "qwix's error", "parameter bytes", "qwix's bytes"]


def pairs(scheme: Scheme, config: GPTConfig) -> dict[str, tuple[Program, Program]]:
    """Returns our program and qwix's, by name."""
    params, batch = jax.eval_shape(lambda: gpt_params(config)), random_batch(config)
    forward = [served.program(params, batch[0]) for served in both(scheme, config)]
    mine = our_training(params, batch, config, scheme)
    as_rounded, default = (training_with_qwix(params, batch, config, scheme, rounded) for rounded in (True, False))
    return {
        "forward": (forward[0], forward[1]),
        "training, rounded operands": (mine, as_rounded),
        "training, qwix's default": (mine, default),
    }


def both(scheme: Scheme, config: GPTConfig) -> tuple[Served, Served]:
    """Returns our model and qwix's."""
    return ours(config, scheme.map), with_qwix(config, scheme.rule)


def cost_rows(scheme: Scheme, config: GPTConfig, repeats: int) -> list[list[str]]:
    """Makes the rows of our costs over qwix's."""
    programs = pairs(scheme, config)
    costs = {name: cost(mine).over(cost(theirs)) for name, (mine, theirs) in programs.items()}
    rows = []
    for name, (mine, theirs) in programs.items():
        seconds, their_seconds = lowering_seconds([mine, theirs], repeats)  # clears JAX's caches
        ratios = (*dataclasses.astuple(costs[name]), seconds / their_seconds)
        rows.append([scheme.name, name, *(f"{ratio:.3f}" for ratio in ratios)])
    return rows


def error_row(scheme: Scheme, config: GPTConfig) -> list[str]:
    """Measures outputs and memory of the quantized models against the model in float32."""
    params, (tokens, _) = gpt_params(config), random_batch(config)
    reference = in_float32(config)
    expected = reference.logits(params, tokens)
    errors = [relative_error(served.logits(params, tokens), expected) for served in both(scheme, config)]
    sizes = [served.nbytes(params) / reference.nbytes(params) for served in both(scheme, config)]
    return [scheme.name, *(f"{error:.4f}" for error in errors), *(f"{size:.3f}" for size in sizes)]


def relative_error(got: jax.Array, expected: jax.Array) -> float:
    """Returns the norm of the difference over the norm of the expected array."""
    return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))


if __name__ == "__main__":
    run_alone(__doc__, tables)
