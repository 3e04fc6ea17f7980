"""Costs of `reduce_dtype`: compiled gradients of a small GPT, summed in compute dtype and in float32.

    JAX_PLATFORMS=cpu python -m benchmarks.reduce_dtype            # of a CPU, and of TPUs where `libtpu` is installed

Ratios of operations, bytes accessed and temporaries of two compiled programs. For the eight TPUs also the number of
elements that the devices reduce in each dtype, as the TPU's compiler wrote it.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jmp_policy as jmp
from benchmarks._compiled import figures
from benchmarks._results import ResultTable, print_tables
from benchmarks._targets import tpu
from examples.gpt.gpt_linen import GPT
from examples.gpt.model import GPTConfig, cross_entropy, split_windows

CONFIG = GPTConfig(width=256, depth=2, heads=4, context=128)
POLICY = jmp.get_policy("p=f32,c=bf16,o=bf16,reduce=float32")
BATCH = 16


def make_gradients(reduce_dtype: Any, config: GPTConfig) -> tuple[Callable[..., Any], Any, Any]:
    """The function that is compiled, and the shapes of its parameters and its batch."""
    model = jmp.with_policy(GPT(config), POLICY)

    def compute_loss(params: Any, windows: jax.Array) -> jax.Array:
        inputs, targets = split_windows(windows)
        logits: Any = model.apply({"params": params}, inputs)
        return cross_entropy(logits, targets)

    windows = jax.ShapeDtypeStruct((BATCH, config.context + 1), np.uint8)
    tokens = jax.ShapeDtypeStruct((1, config.context), np.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    return jmp.value_and_grad(compute_loss, loss_scale=POLICY.loss_scale(), reduce_dtype=reduce_dtype), params, windows


def compile_on(devices: list[Any], reduce_dtype: Any, config: GPTConfig = CONFIG) -> Any:
    """Compiles the gradients for devices that share the batch, and the parameters too."""
    fun, params, windows = make_gradients(reduce_dtype, config)
    mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))

    def place(leaf: Any) -> NamedSharding:
        largest = int(np.argmax(leaf.shape))
        return NamedSharding(mesh, P(*[None] * largest, "fsdp"))

    shardings = jax.tree.map(place, params), NamedSharding(mesh, P("fsdp"))
    out = NamedSharding(mesh, P()), shardings[0]
    return jax.jit(fun, in_shardings=shardings, out_shardings=out).lower(params, windows).compile()


def count_reduced(compiled: Any) -> dict[str, int]:
    """Counts the reduced elements by dtype: of all-reduces and reduce-scatters, without iterations of loops."""
    counts: dict[str, int] = {}
    pattern = re.compile(r"= (.*?) (?:all-reduce|all-reduce-start|reduce-scatter)\(")
    for shapes in pattern.findall(compiled.as_text()):
        for dtype, sizes in re.findall(r"\b(f32|bf16)\[([\d,]*)\]", shapes):
            counts[dtype] = counts.get(dtype, 0) + int(np.prod([int(n) for n in sizes.split(",") if n]))
    return counts


def list_targets() -> dict[str, list[Any] | str]:
    """The devices to compile for, or which library they need."""
    targets: dict[str, list[Any] | str] = {"a CPU": jax.devices("cpu")[:1]}
    for name, count in {"a TPU v5e": 1, "eight TPU v5e": 8}.items():
        try:
            tpu()  # which sets what its compiler would ask for, or says that there is none
        except ModuleNotFoundError:
            targets[name] = "libtpu"
            continue
        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
        targets[name] = list(devices)[:count]
    return targets


def tables(quick: bool) -> Iterator[ResultTable]:
    """Returns the costs of the gradients."""
    config = GPTConfig(width=64, depth=1, heads=4, context=32) if quick else CONFIG
    targets = {"a CPU": jax.devices("cpu")[:1]} if quick else list_targets()
    rows = [_make_row(name, devices, config) for name, devices in targets.items()]
    header = ["for", "operations", "bytes", "temporaries", "reduced without", "reduced with"]
    title = f"Gradients of a GPT of width {config.width} in bfloat16, reduced in float32 over reduced in bfloat16"
    notes = [
        "What is more is the price of sums that are not rounded: the gradients of the parameters are wider between the "
        "products that make them and their reduction."
    ]
    yield ResultTable.of("costs", title, header, rows, notes=notes)


def _make_row(name: str, devices: list[Any] | str, config: GPTConfig) -> list[str]:
    if isinstance(devices, str):
        return [name, f"not measured: needs {devices}", "", "", "", ""]
    plain, wide = (compile_on(devices, dtype, config) for dtype in (None, POLICY.reduce_dtype))
    before, after = figures(plain), figures(wide)
    names = ("flops", "bytes_accessed", "temporaries")
    ratios = [f"{getattr(after, name) / getattr(before, name):.3f}" for name in names]
    return [name, *ratios, *(_list_counts(count_reduced(compiled)) for compiled in (plain, wide))]


def _list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(counts.items())) or "none"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, on a CPU alone")
    print_tables(tables(parser.parse_args(argv).quick))


if __name__ == "__main__":
    main()
