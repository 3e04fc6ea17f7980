"""Seconds of `import jmp_policy`, against `import jax`, and other libraries that are imported for mixed precision.

Run from the root of the repository:

    python -m benchmarks.imports [--quick]

Each import has a process of its own, which imports JAX before. Its ratio is the time of both imports over JAX alone in
that process. All imports alternate in each round. The first round, which writes bytecode as pip does, is not counted.
The table has medians over rounds.
"""

import dataclasses
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks._results import ResultTable, run_alone

MODULES = {
    "jax": "jax",
    "jmp_policy": "jmp_policy",
    "jax, flax and optax": "optax, flax.linen, flax.nnx",
    "jmp_policy, with optim, linen and nnx": "jmp_policy.optim, jmp_policy.linen, jmp_policy.nnx",
    "jmp": "jmp",
    "mixed-precision-for-jax": "mpx",
    "qwix": "qwix",
    "Keras 3 on JAX": "keras",
}
"""What is imported, by the name of its library."""

QUICK = ("jax", "jmp_policy", "jmp")

_PROGRAM = """
import sys, time
start = time.process_time()
import jax
middle = time.process_time()
of_jax = set(sys.modules)
import {module}
print(time.process_time() - start, middle - start, *(set(sys.modules) - of_jax))
"""


@dataclasses.dataclass(frozen=True)
class Import:
    """An import in a process of its own: the process time with JAX and of JAX, and the modules loaded after JAX."""

    seconds: float
    of_jax: float
    modules: frozenset[str]


def tables(quick: bool) -> Iterator[ResultTable]:
    """The only table; a quick run has fewer libraries, and three rounds instead of seven."""
    names = [name for name in (QUICK if quick else MODULES) if _is_installed(MODULES[name])]
    with tempfile.TemporaryDirectory() as bytecode:
        count = 1 + (3 if quick else 7)
        rounds = [{name: measure(MODULES[name], bytecode) for name in names} for _ in range(count)][1:]
    yield import_table(rounds, [name for name in (QUICK if quick else MODULES) if name not in names])


def measure(module: str, bytecode: str) -> Import:
    """Imports a module in a new process; the folder `bytecode` has that of all that was imported before."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),  # the child finds the same modules
        "PYTHONPYCACHEPREFIX": bytecode,
        "PYTHONDONTWRITEBYTECODE": "",
        "KERAS_BACKEND": "jax",
    }
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM.format(module=module)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    seconds, of_jax, *modules = done.stdout.splitlines()[-1].split()
    return Import(float(seconds), float(of_jax), frozenset(modules))


def import_table(rounds: Sequence[dict[str, Import]], missing: Sequence[str] = ()) -> ResultTable:
    """The table of rounds, each with the imports of all libraries but for the `missing` ones."""
    rows = []
    for name in rounds[0]:
        seconds = statistics.median(each[name].seconds for each in rounds)
        ratio = statistics.median(each[name].seconds / each[name].of_jax for each in rounds)
        rows.append((name, f"{ratio:.2f}", f"{1000 * seconds:.0f}", str(len(rounds[0][name].modules))))
    rows += [(name, *["not installed"] * 3) for name in missing]
    header = ("import", "over import jax", "ms of process time", "modules that jax does not load")
    notes = (
        "Each loads JAX, whose time is in it.",
        "jmp_policy loads Flax and optax when they are first asked for: `jmp_policy.linen`, `jmp_policy.optim`. "
        "The row with all of them is to be compared with that of jax, flax and optax.",
    )
    return ResultTable("imports", "Imports", header, tuple(rows), timed=header[1:3], notes=notes)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(re.split("[.,]", module)[0]) is not None


if __name__ == "__main__":
    run_alone(__doc__, tables)
