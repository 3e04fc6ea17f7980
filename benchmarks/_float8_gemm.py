"""The times of matrix products and of a transformer block in floating point of 8 and 4 bits, on an accelerator."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._float8_contestants import BFLOAT16, OURS, case
from benchmarks._float8_models import Block
from benchmarks._gemm import NUMBERS, SIZES, Calls, call_seconds
from jmp_policy import quant

BLOCK = (8, 2048, 4096)
"""The shape of the input of the transformer block: batch, length, width."""


def products(size: int, *, trains: bool) -> Calls:
    """The product of two square matrices in bfloat16 and in our formats, or with its gradients and next state."""
    keys = jax.random.split(jax.random.key(0), 3)
    left, right, cotangent = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    made: Calls = {}
    for name in (BFLOAT16, *OURS):
        format = OURS.get(name)
        state = quant.float8_state(format) if name == "delayed" else None
        operands = (left, right, state)
        made[name] = (_trained(format), (cotangent, *operands)) if trains else (_product(format), operands)
    return made


def product_rows(sizes: Sequence[int] = SIZES) -> list[list[str]]:
    """Rows for each size, forward and with gradients: milliseconds in bfloat16, and the others' times over it."""
    return [
        _row([f"{size}", program], products(size, trains=trains))
        for size in sizes
        for program, trains in (("forward", False), ("training", True))
    ]


def block_rows(shape: tuple[int, ...] = BLOCK) -> list[list[str]]:
    """The same of the transformer block."""
    cases = {name: case(name, Block, shape) for name in (BFLOAT16, *OURS)}
    programs = {
        "forward": {name: each.forward() for name, each in cases.items()},
        "training": {name: each.training() for name, each in cases.items()},
    }
    as_calls = lambda made: {name: (program.step, program.args) for name, program in made.items()}
    return [_row(["block", name], as_calls(made)) for name, made in programs.items()]


def _product(format: str | None) -> Any:
    return jax.jit(lambda left, right, state: quant.dot_general(left, right, NUMBERS, quantization=format, state=state))


def _trained(format: str | None) -> Any:
    product = _product(format)

    def run(cotangent: jax.Array, *operands: Any) -> Any:
        out, pull = jax.vjp(product, *operands)
        return out, pull(cotangent)

    return jax.jit(run)


def _row(cells: list[str], made: Calls) -> list[str]:
    whole, *others = call_seconds(made).values()
    return [*cells, f"{1e3 * whole:.3f}", *(f"{other / whole:.2f}" for other in others)]
