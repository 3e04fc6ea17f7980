"""Ways to ask whether an array is finite: the bytes that each reads and writes, and the faults that it misses.

Run from the root of the repository:

    python -m benchmarks.finite_check [--json PATH] [--quick]

Each is compiled for a million numbers, and asked about one bad number of three, in four places, alone and behind what
XLA fuses into it: a relu, through which a nan passes, and a product of large numbers that overflows.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks._results import ResultTable, print_tables

SIZE = 10**6
CHECKS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "isfinite(max(abs(x)))": lambda x: jnp.isfinite(jnp.max(jnp.abs(x))),
    "sum(x * 0) == 0": lambda x: jnp.sum(x * 0) == 0,
    "sum(x - x) == 0": lambda x: jnp.sum(x - x) == 0,
    "max of the bits of the exponent": lambda x: jnp.max(_exponent(x)) < jnp.uint32(0x7F800000),
    "isfinite(x).all()": lambda x: jnp.isfinite(x).all(),
}
DTYPES = ("float32", "bfloat16", "float16")
COLUMNS = ["check", "dtype", "accessed", "temporaries", "missed"]


def measure(check: Callable[[jax.Array], jax.Array], dtype: str) -> dict[str, float]:
    """Bytes accessed and temporaries in multiples of the array's bytes, and how many bad arrays passed for finite."""
    x = jax.ShapeDtypeStruct((SIZE,), dtype)
    compiled = jax.jit(check).lower(x).compile()
    size = SIZE * np.dtype(dtype).itemsize
    return {
        "accessed": compiled.cost_analysis()["bytes accessed"] / size,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes / size,
        "missed": sum(bool(jax.jit(lambda x, before=before: check(before(x)))(x)) for before, x in _bad_arrays(dtype)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", help="also write the tables to this file")
    parser.add_argument("--quick", action="store_true", help="one dtype")
    options = parser.parse_args(argv)
    print(f"jax {jax.__version__}, {jax.default_backend()}")
    print_tables(tables(options.quick), options.json)


def tables(quick: bool) -> Iterator[ResultTable]:
    """Returns the costs of each check, and the faults that it misses."""
    rows = []
    for name, check in CHECKS.items():
        for dtype in DTYPES[:1] if quick else DTYPES:
            rows.append((f"`{name}`", dtype, *map(_cell, measure(check, dtype).values())))
    count = len(list(_bad_arrays("float32")))
    notes = (
        f"Missed: of {count} arrays with a bad number. What misses none is sure; `all_finite` takes the cheapest of "
        "those, `isfinite(x).all()`, which reads 1.5 times what one reads that loses a nan, in half precision twice.",
        "Read on a CPU, in multiples of the array's bytes.",
    )
    title = "Ways to ask whether a million numbers are finite"
    yield ResultTable("checks", title, tuple(COLUMNS), tuple(rows), notes=notes)


def _bad_arrays(dtype: str) -> Iterator[tuple[Callable[[jax.Array], jax.Array], jax.Array]]:
    zeros = np.zeros(SIZE, dtype)
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, 1, SIZE // 2, SIZE - 1):
            x = zeros.copy()
            x[place] = bad
            yield lambda x: x, x
            if bad != -np.inf:
                yield jax.nn.relu, x
    yield lambda x: x * 4, np.full(SIZE, jnp.finfo(dtype).max / 2, dtype)


def _exponent(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & jnp.uint32(0x7F800000)


def _cell(figure: float) -> str:
    return str(figure) if isinstance(figure, int) else f"{figure:.2f}"


if __name__ == "__main__":
    main()
