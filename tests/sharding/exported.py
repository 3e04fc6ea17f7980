"""What a program moves between devices, as StableHLO has it for platforms that are not here."""

import re

import jax

_COLLECTIVE = re.compile(
    r'"stablehlo\.(all_reduce|all_gather|reduce_scatter)"\((?:.|\n)*?: \(tensor<((?:\d+x)*)(\w+)>\) ->'
)


def list_moved(fun, *args):
    """The collectives of a `shard_map` program in order, the same for TPUs and GPUs: kind, dtype, size of operand."""
    found = []
    for platform in ("tpu", "cuda"):  # one at a time: for both at once, JAX writes a gather twice
        text = jax.export.export(fun, platforms=[platform])(*args).mlir_module()
        found.append([(kind, dtype, _count(shape)) for kind, shape, dtype in _COLLECTIVE.findall(text)])
    assert found[0] == found[1]
    return found[0]


def _count(shape):
    count = 1
    for size in shape.split("x")[:-1]:
        count *= int(size)
    return count
