"""What XLA adds up over devices: reductions of a compiled program, read before XLA:CPU widens those in half."""

import contextlib
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax

_REDUCTION = re.compile(
    r"= \(?(?P<shapes>[^=]*?)\)? (?P<kind>all-reduce|all-reduce-start|reduce-scatter)\((?P<rest>.*)"
)


class Reduction(NamedTuple):
    """One operand of a reduction over devices."""

    dtype: str
    shape: tuple[int, ...]
    op_name: str

    @property
    def is_backward(self):
        return "transpose(" in self.op_name


def list_reductions(fun, *args, **kwargs):
    """The reductions over devices in the program of a jitted function, after partitioning."""
    lowered = jax.jit(fun, **kwargs).lower(*args)
    # What comes out of the cache of programs is not dumped, so that these never enter it.
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 1e9)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(jax.config.update, name, before)
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        lowered.compile(compiler_options=options)
        [path] = Path(folder).glob("*after_spmd-partitioning*")
        lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for match in filter(None, map(_REDUCTION.search, lines)):
        name = re.search(r'op_name="([^"]*)"', match.string)
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", match["shapes"]):
            shape = tuple(int(size) for size in sizes.split(",") if size)
            found.append(Reduction(dtype, shape, name[1] if name else ""))
    return found
