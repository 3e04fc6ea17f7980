"""Costs of AdamW with its moments in 8 bits: `optim.quantize_state`.

Run from the root of the repository:

    python -m benchmarks.small_state [--quick]

Makes one table: bytes of state and of temporaries, and process time, of an update; programs take turns.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmp
from benchmarks._compiled import count_bytes, count_parameters, traffic
from benchmarks._measure import median_seconds
from benchmarks._optimizer_updates import ADAMW
from benchmarks._programs import Program
from benchmarks._results import ResultTable, run_alone

SIZES = 1024, 10
"""Width and depth of 10.5 million parameters."""

NOTES = (
    "AdamW alone is the fastest, and keeps four times the state: numbers are read, rounded and written in pieces "
    "here, and no whole float32 moment is ever alive. `cast_state` widens the moments before the optimizer runs, "
    "and XLA:CPU writes them down.",
    "Time is process time, in which all take turns.",
)


def tables(quick: bool) -> Iterator[ResultTable]:
    """Returns the state, temporaries and time of an update."""
    sizes, repeats = ((64, 2), 1) if quick else (SIZES, 20)
    optimizers, params = small_state_optimizers(), describe_params(*sizes)
    seconds = update_seconds(list(optimizers.values()), params, repeats)
    count = count_parameters(params)
    rows = []
    for (name, tx), taken in zip(optimizers.items(), seconds, strict=True):
        state = count_bytes(jax.eval_shape(tx.init, params)) / count
        temporaries = traffic(update_program(tx, params)).temporaries / count
        rows.append([name, f"{state:.3f}", f"{temporaries:.3f}", f"{taken / seconds[0]:.2f}"])
    header = ["optimizer", "state, bytes each", "temporaries, bytes each", "time over adamw"]
    yield ResultTable.of("updates", f"An update of {count:,} parameters", header, rows, ["time over adamw"], NOTES)


def small_state_optimizers() -> dict[str, optax.GradientTransformation]:
    """AdamW with moments of fewer and fewer bits, by name."""
    return {
        "adamw": ADAMW,
        "cast_state, bfloat16": jmp.optim.cast_state(ADAMW, mu_dtype="bfloat16", nu_dtype="bfloat16"),
        "quantize_state": jmp.optim.quantize_state(ADAMW),
        "quantize_state, stochastic": jmp.optim.quantize_state(ADAMW, stochastic=jax.random.key(0)),
    }


def describe_params(width: int, depth: int) -> dict[str, Any]:
    """Shapes of float32 parameters: square matrices, each with a vector."""
    shapes = {"w": (width, width), "b": (width,)}
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return {f"layer{index}": layer for index in range(depth)}


def update_program(tx: optax.GradientTransformation, params: Any) -> Program:
    """From gradients to updates, which take their place, as they do in a training step; the state is donated, too."""
    return Program(jax.jit(tx.update, donate_argnums=(0, 1)), (params, jax.eval_shape(tx.init, params), params))


def update_seconds(optimizers: Sequence[optax.GradientTransformation], params: Any, repeats: int) -> list[float]:
    """The process time of an update by each, a median over repeats in which all take turns."""
    return median_seconds([_runner(tx, params) for tx in optimizers], repeats, time.process_time)


def _runner(tx: optax.GradientTransformation, shapes: Any) -> Callable[[], None]:
    """A function that makes the next update, having made the first, which compiles."""
    params = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), shapes)
    carry: list[Any] = [jax.tree.map(lambda leaf: leaf / 100, params), tx.init(params)]
    step = update_program(tx, shapes).step

    def run() -> None:
        carry[:] = jax.block_until_ready(step(*carry, params))  # the updates are the gradients of the next one

    run()
    return run


if __name__ == "__main__":
    run_alone(__doc__, tables)
