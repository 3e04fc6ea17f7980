"""Costs of sharded training at scale: bytes gathered and reduced in a step, state of a device, size of a checkpoint.

    JAX_PLATFORMS=cpu python -m benchmarks.scale            # all models, formats and meshes
    JAX_PLATFORMS=cpu python -m benchmarks.scale compare    # the programs for eight devices that are not there, and are

Nothing runs, and no device need exist: each step is traced for an `AbstractMesh`, and its collectives in `shard_map`
are counted. For eight devices the same program is lowered for CPU devices, and the texts must be the same.
"""

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from benchmarks._results import ResultTable, print_tables
from benchmarks._scale_model import AXES, GPT, Format, make_step
from jmp_policy import numerics
from jmp_policy.report import format_bytes

FORMATS = {
    "float32": Format("float32"),
    "bf16, reduced in float32": Format("params=float32,compute=bfloat16,output=float32,reduce=float32"),
    "bf16, reduced in bf16": Format("params=float32,compute=bfloat16,output=float32,reduce=bfloat16"),
    "float8": Format("params=float32,compute=bfloat16,output=float32,reduce=float32", "float8"),
}
"""By name. Parameters and the moments of AdamW are float32 in all of them."""

MODELS = {"1.3 B": GPT(24, 2048), "6.7 B": GPT(32, 4096), "13 B": GPT(40, 5120), "70 B": GPT(86, 8192),
          "175 B": GPT(96, 12288), "407 B": GPT(126, 16384)}  # fmt: skip

SCALES = [("1.3 B", (2, 4)), ("1.3 B", (32, 8)), ("6.7 B", (4, 16)), ("13 B", (4, 32)), ("70 B", (8, 64)),
          ("175 B", (4, 256)), ("407 B", (8, 512))]  # fmt: skip
"""The models, and on how many devices along the axes data and fsdp."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """Bytes of a step.

    Attributes:
      gathered: of the whole arrays that a device gathers.
      reduced: of the arrays that a device gives into sums of gradients.
      sent: bytes that a device sends to its neighbors, if all collectives go around rings.
      state: of the parameters, moments, scales and counters that a device has.
      checkpoint: of all state, each number once.
    """

    gathered: int
    reduced: int
    sent: int
    state: int
    checkpoint: int


def measure(gpt: GPT, format: Format, shape: tuple[int, int]) -> Figures:
    """Counts the bytes of a model's step on a mesh that is not there."""
    step, args = make_step(gpt, format, make_abstract_mesh(shape))
    report = numerics.collectives(step)(*args)
    state = jax.tree.leaves(args[:2])
    count_bytes = lambda shape, dtype: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return Figures(
        report.total_bytes(kind="all-gather"),
        report.total_bytes(gradients=True),
        report.total_moved_bytes(),
        sum(count_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in state),
        sum(count_bytes(leaf.shape, leaf.dtype) for leaf in state),
    )


def write_program(gpt: GPT, format: Format, mesh: Mesh | AbstractMesh) -> str:
    """The StableHLO of a model's step on the CPUs of a mesh, whether they are there or not."""
    step, args = make_step(gpt, format, mesh)
    return step.trace(*args).lower(lowering_platforms=("cpu",)).as_text()


def compare() -> list[str]:
    """The formats whose program for eight devices is not, letter by letter, that for eight which are not there.

    Of the smallest model. This process must not have used a CPU before.
    """
    jax.config.update("jax_num_cpu_devices", 8)
    model, shape = SCALES[0]
    types = (AxisType.Auto,) * len(AXES)
    meshes = jax.make_mesh(shape, AXES, devices=jax.devices("cpu"), axis_types=types), make_abstract_mesh(shape)
    is_same = lambda format: len({write_program(MODELS[model], format, mesh) for mesh in meshes}) == 1
    return [name for name, format in FORMATS.items() if not is_same(format)]


def make_abstract_mesh(shape: tuple[int, int]) -> AbstractMesh:
    """A mesh of devices that need not be there."""
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_table(columns: Mapping[tuple[str, tuple[int, int]], Mapping[str, Figures]]) -> ResultTable:
    """A row for each figure and format, a column for each model on its mesh; formats that agree share a row."""
    rows: list[list[str]] = []
    for field in dataclasses.fields(Figures):
        names: dict[tuple[str, ...], list[str]] = {}
        for name in FORMATS:
            cells = (format_bytes(getattr(figures[name], field.name)) for figures in columns.values())
            names.setdefault(tuple(cells), []).append(name)
        rows += [[field.name, "; ".join(shared), *cells] for cells, shared in names.items()]
    header = [f"{model}, {data} x {fsdp}" for model, (data, fsdp) in columns]
    notes = [
        "Parameters and moments are float32 in all formats. gathered: whole arrays that a device gets. reduced: "
        "arrays that it gives into sums of gradients. sent: what it sends if each collective goes around a ring. "
        "state: parameters, moments, scales and counters of a device.",
        "Counted in the traced program, before XLA's passes. Formats that agree share a row.",
    ]
    title = "Bytes of a device in a training step of a GPT, by model and devices along data x fsdp"
    return ResultTable.of("bytes", title, ["bytes", "format", *header], rows, notes=notes)


def tables(quick: bool) -> Iterator[ResultTable]:
    """Returns the costs of each model on its mesh. The largest trace comes first: the peak of memory is its own."""
    import resource  # which Windows has not

    columns: dict[tuple[str, tuple[int, int]], dict[str, Figures]] = {}
    took: list[list[str]] = []
    for model, shape in SCALES[:1] if quick else reversed(SCALES):
        gpt, figures = MODELS[model], {}
        for name, format in FORMATS.items():
            began, worked = time.perf_counter(), time.process_time()
            figures[name] = measure(gpt, format, shape)
            times = [f"{time.perf_counter() - began:.1f}", f"{time.process_time() - worked:.1f}"]
            peak = format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            if not columns:
                took.append([f"{gpt.parameters:,}", f"{shape[0] * shape[1]:,}", name, *times, peak])
            print(model, shape, name, *times, peak, flush=True)
        columns[model, shape] = figures
    yield make_table({scale: columns[scale] for scale in SCALES if scale in columns})
    timed = ["seconds", "process seconds", "peak of memory so far"]
    header = ["parameters", "devices", "format", *timed]
    yield ResultTable.of("traces", "What the tracing of the largest took", header, took, timed)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model")
    options = parser.parse_args(argv)
    subprocess.run([sys.executable, "-m", "benchmarks.scale", "compare"], check=True)
    print_tables(tables(options.quick))


if __name__ == "__main__":
    if sys.argv[1:] == ["compare"]:
        different = compare()
        sys.exit(f"Other programs on eight devices: {', '.join(different)}" if different else None)
    main()
