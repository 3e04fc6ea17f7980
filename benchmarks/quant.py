"""Measures the cost and error of quantized policies, against qwix on the same model with the same weights.

Run from the root of the repository:

    python -m benchmarks.quant [--quick]

Makes five tables: the costs of the forward pass and of quantization-aware training, ours over qwix's; the error of the
logits and the bytes of the parameters; the validation loss of the trained model, the divergence of its predictions from
float32, and its loss with weights rounded by `contrib.gptq` and `contrib.awq`.
"""

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from benchmarks._measure import cost, lowering_seconds
from benchmarks._programs import Program
from benchmarks._quant_accuracy import Trained, contestants, quantized_bytes, train
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
from benchmarks._results import ResultTable, print_tables
from examples.gpt.model import GPTConfig
from jmp_policy.contrib import awq, gptq

QUICK_GPT = GPTConfig(depth=1, context=16)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, no training, one repeat of what is timed")
    quick = parser.parse_args(argv).quick
    with jax.numpy_dtype_promotion("standard"):
        print(f"jax {jax.__version__}, qwix {importlib.metadata.version('qwix')}, {jax.default_backend()}")
        print_tables(tables(quick))
        if not quick:
            print_tables(training_tables(quick))


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the tables of costs, and of errors of served models."""
    config, repeats, schemes = (QUICK_GPT, 1, SCHEMES[:1]) if quick else (GPTConfig(), 10, SCHEMES)
    rows = [row for scheme in schemes for row in cost_rows(scheme, config, repeats)]
    timed = ["lowering time"]
    yield ResultTable.of("costs", "The demo's GPT, ours over qwix's", _COST_HEADER, rows, timed, _COST_NOTES)
    title = "The error of logits, and bytes of the parameters over float32"
    yield ResultTable.of("errors", title, _ERROR_HEADER, [error_row(scheme, config) for scheme in schemes])


def training_tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the losses of the trained GPT in float32 and quantized, and the divergence of its predictions."""
    seeds, steps, config = (range(1), 2, QUICK_GPT) if quick else (range(2), 1500, GPTConfig())
    runs = [train(seed, steps=steps, config=config) for seed in seeds]
    rows = loss_rows(runs, most=2 if quick else None)
    yield ResultTable.of("losses", f"Validation loss after {steps} steps in float32", _LOSS_HEADER, rows)
    rows = [divergence_row(scheme, runs) for scheme in (SCHEMES[:1] if quick else SCHEMES)]
    yield ResultTable.of("divergence", "How far the predictions are from float32", _DIVERGENCE_HEADER, rows)
    title = "Validation loss in int4/128 for calibration data, 128 windows of the training text"
    yield ResultTable.of("calibrated", title, _CALIBRATED_HEADER, calibrated_rows(runs))


_COST_NOTES = (
    "Above 1: ours show a nan in any input, which qwix's maximum loses on a CPU, and XLA:CPU does not fuse the search.",
    "Above 1 with qwix's default: ours differentiate at the rounded operands, as the row before does; by default qwix "
    "does at the operands before rounding, which spares it the numbers that the integers stand for.",
    "Operations above 1 in 4 bits: ours take apart numbers that are stored two to a byte, with a zero point; qwix has "
    "one number to a byte on a CPU, and no zero point.",
)
_COST_HEADER = ["format", "program", "operations", "flops", "bytes", "temporaries", "lowering time"]
_ERROR_HEADER = ["format", "error of logits", "qwix's error", "parameter bytes", "qwix's bytes"]
_LOSS_HEADER = ["library", "quantized", "loss over float32, by seed", "bytes of these weights over float32"]
_CALIBRATED_HEADER = ["by", "loss over float32, by seed", "of the rise of nearest that is gone"]
_DIVERGENCE_HEADER = ["format", "divergence from float32, by seed", "qwix's"]


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


def loss_rows(runs: Sequence[Trained], most: int | None = None) -> list[list[str]]:
    """Makes the rows of validation losses of the example's run, in float32 and with at most `most` quantized models."""
    rows = [["", "float32", ", ".join(f"{run.loss:.4f} bits" for run in runs), ""]]
    for (library, name), served in list(contestants(runs[0].config).items())[:most]:
        rises = ", ".join(f"{100 * run.rise(served):+.2f} %" for run in runs)
        size = f"{quantized_bytes(served, runs[0].params):.3f}" if library == "jmp_policy" else ""
        rows.append([library, name, rises, size])
    return rows


def calibrated_rows(runs: Sequence[Trained], policy: str = "int4/128_from_float32") -> list[list[str]]:
    """Makes the rows of losses with weights rounded for calibration data."""
    nearest = [run.rise(ours(run.config, policy)) for run in runs]
    rows = []
    for calibrate in (gptq, awq):
        rises = [run.rise(run.calibrated(calibrate, policy)) for run in runs]
        gone = [1 - rise / before for rise, before in zip(rises, nearest, strict=True)]
        texts = ([f"{100 * rise:+.2f} %" for rise in rises], [f"{100 * share:.0f} %" for share in gone])
        rows.append([calibrate.__name__, *map(", ".join, texts)])
    return rows


def divergence_row(scheme: Scheme, runs: Sequence[Trained]) -> list[str]:
    """Measures the divergence of the predictions of the trained models from float32."""
    models = both(scheme, runs[0].config)
    return [scheme.name, *(", ".join(f"{run.divergence(served):.2e}" for run in runs) for served in models)]


if __name__ == "__main__":
    main()
