"""The page of results, made of the files of results alone."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from benchmarks import _harness, _plots
from benchmarks._results import ResultTable
from benchmarks._suites import SUITES

INTRODUCTION = """# Results

`python -m benchmarks` made this page of the files in `benchmarks/results`: edit none of it by hand. What each benchmark
does, what its columns mean and what we make of them is in [the method](README.md). Columns of seconds, and of ratios of
seconds, differ from run to run, and are named below their tables; all other cells repeat exactly for the same versions
on the same device."""

COMPILED = {"TPU": "compiled-tpu.json", "GPU": "compiled-gpu.json"}
"""The files of `benchmarks.compiled`, by what they were compiled for."""

_SELECT = "Ours skips a bad step by a select, where the step by hand has a `lax.cond`: flops above 1 are the selects'."
_ONE_TOKEN = (
    "One token: one position of each of 8 sequences, without a cache, by a GPT of one block of width 4096 (201 M"
    " weights in layers). All others: 8 sequences of 256 tokens, by two blocks of width 768."
)
_BLOCKS_IN_A_LOOP = (
    "XLA counts the operations and bytes of a loop for one turn. The forward pass of formats with blocks of inputs"
    " (`int4/128, int8 inputs` and `e4m3/128, e4m3 inputs`) has a loop over the blocks: its flops and bytes cannot be"
    " compared. One token is without a loop."
)
COMPILED_NOTES = {
    ("TPU", "zero_cost"): (
        _SELECT,
        "Temporaries above 1 over by hand, in the GPT, are fewer than those of the step without a check. The peak, with"
        " arguments and results, is below 1 over both.",
    ),
    ("GPU", "zero_cost"): (
        _SELECT,
        "Temporaries and peak above 1, in the GPT: Triton's products of so few numbers split their sums into up to"
        " eight parts, which XLA adds up inside of what reads them next. That is the check for us, and all parts wait"
        " for its answer; before a `lax.cond` their sums are written down. In the next table cuBLAS computes products.",
    ),
    ("TPU", "optimizer"): (
        "`jmp` skips by a select as well; `optim.minimize`, which never has float32 gradients, is below it.",
    ),
    ("GPU", "optimizer"): (
        "All that skip by a select access the same; the steps by hand, whose `lax.cond` copies, access more.",
    ),
    ("TPU", "int8"): (_ONE_TOKEN, _BLOCKS_IN_A_LOOP),
    ("GPU", "int8"): (
        _ONE_TOKEN,
        _BLOCKS_IN_A_LOOP,
        "XLA writes dequantized weights in bfloat16 before a product reads them, ours and qwix's. So of one token,"
        " weights alone in blocks move more bytes than bfloat16. With a scale per output, ours are not dequantized.",
    ),
    **dict.fromkeys(
        [(device, "small_state") for device in COMPILED],
        ("XLA counts the bytes of a loop for one turn: those of `quantize_state` cannot be compared.",),
    ),
}
"""What a reader has to know of tables of `benchmarks.compiled`, by device and name."""

NOT_MEASURED = "Not measured."


def write_report(root: pathlib.Path) -> str:
    """Writes `RESULTS.md` and its plots, and says where."""
    plots = _plots.draw_plots(_read_suites(root), root / "plots")
    (root / "RESULTS.md").write_text(make_report(root), encoding="utf-8")
    return f"{root / 'RESULTS.md'} and {len(plots)} plots"


def make_report(root: pathlib.Path) -> str:
    """The page, of the files in a folder."""
    parts = [INTRODUCTION]
    for path in _harness.find_results(root):
        suites = _harness.read_results(path)["suites"]
        machines = list(dict.fromkeys(map(_describe_machine, suites.values())))
        parts += [f"**{_name_machine(machines, machine)}** is {machine}." for machine in machines]
        parts += _describe_suites(suites, machines)
    for device, name in COMPILED.items():
        parts += _describe_compiled(device, root / "results" / name)
    parts += _describe_gpus(root)
    return "\n\n".join(parts) + "\n"


def _read_suites(root: pathlib.Path) -> dict[str, Any]:
    """Writes the measurements of the suites on a CPU."""
    return _harness.read_results(root / "results" / "cpu.json")["suites"]


def _describe_suites(suites: dict[str, Any], machines: list[str]) -> Iterator[str]:
    """A section for each suite."""
    for name, question in SUITES.items():
        yield f"## {name}"
        yield f"{question} (`python -m benchmarks --only {name}`)"
        measured = suites.get(name)
        if measured is None:
            yield NOT_MEASURED
            continue
        yield _describe_run(measured, _name_machine(machines, _describe_machine(measured)))
        for kept in measured["tables"]:
            made = ResultTable.from_dict(kept)
            yield f"**{made.title}**"
            yield made.to_markdown() + (f"\n\nDiffers from run to run: {', '.join(made.timed)}." if made.timed else "")
            if (name, made.name) in _plots.PLOTS and not measured["quick"]:
                plot = _plots.PLOTS[name, made.name]
                yield f"![{plot.description}](plots/{plot.file})"


def _describe_machine(measured: dict[str, Any]) -> str:
    """Returns the machine and the versions of a suite's run."""
    device = measured["device"]
    versions = ", ".join(f"{library} {version}" for library, version in measured["versions"].items())
    return f"{device['kind']}, {device['cores']} cores, with {versions}"


def _name_machine(machines: list[str], machine: str) -> str:
    """Returns the name of a machine on the page, since many suites have the same."""
    return f"Machine {machines.index(machine) + 1}"


def _describe_run(measured: dict[str, Any], machine: str) -> str:
    """When and where a suite ran, how long it took, and whether it failed."""
    size = " at small sizes" if measured["quick"] else ""
    took = f"{measured['seconds']:.0f} s, {measured.get('process_seconds', 0):.0f} s of them process time"
    said = f"Measured{size} on {measured['date']} on {machine.lower()}, in {took}."
    if not measured.keys() & {"error", "missing"}:
        return said
    outcome = _harness.describe_outcome(measured)
    return f"{outcome[0].upper()}{outcome[1:]}. {said}"


def _describe_compiled(device: str, path: pathlib.Path) -> Iterator[str]:
    """Writes the analysis of programs by the compilers of devices that are not present."""
    yield f"## Compiled for a {device}"
    yield (
        f"What XLA says of programs that it compiled for a {device} which is not there; nothing ran "
        f"(`python -m benchmarks.compiled {device.lower()} --json benchmarks/results/{path.name}`)."
    )
    if not path.exists():
        yield NOT_MEASURED
        return
    for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        origin = run["origin"]
        versions = ", ".join(f"{name} {origin[name]}" for name in origin if name not in ("target", "sources"))
        yield f"Compiled on {run['date']} for {origin['target']}, with {versions}."
        for made in map(ResultTable.from_dict, run["tables"]):
            notes = (*made.notes, *COMPILED_NOTES.get((device, made.name), ()))
            yield f"**{made.title}**"
            yield dataclasses.replace(made, notes=notes).to_markdown()


def _describe_gpus(root: pathlib.Path) -> Iterator[str]:
    """Writes the measurements of `benchmarks.gpu`."""
    from benchmarks.gpu import read_results, write_report as write_gpu_report

    yield "## On a GPU"
    yield "Times of steps and of products on a GPU (`python -m benchmarks.gpu`)."
    ours = {"cpu.json", *COMPILED.values()}
    paths = [path for path in sorted((root / "results").glob("*.json")) if path.name not in ours]
    paths = [path for path in paths if not path.stem.endswith(("-suites", "-tiny"))]
    if not paths:
        yield NOT_MEASURED
    for path in paths:
        yield write_gpu_report(read_results(path)).rstrip().replace("# ", "### ", 1)
