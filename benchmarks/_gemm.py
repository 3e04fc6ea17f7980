"""The time of a matrix product with a quantized weight, on an accelerator."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_policy import quant

SIZES = (1024, 2048, 4096, 8192, 16384)
FORMATS = {"int8": "int8", "int8 weights": "int8(activations=false)"}

NUMBERS = (((1,), (0,)), ((), ()))
"""The dimension numbers of a product of two matrices."""

Calls = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""Jitted functions and what to call them on, by name."""


def products(size: int) -> Calls:
    """Returns the matmul of two square bfloat16 matrices and its operands; the right matrix may be quantized before."""
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    made: Calls = {"bfloat16": (jax.jit(jnp.dot), (left, right))}
    for name, format in FORMATS.items():
        weight = jax.jit(quant.quantize_array, static_argnums=1)(right, format)
        made[name] = (jax.jit(lambda left, weight: quant.dot_general(left, weight, NUMBERS)), (left, weight))
    return made


def call_seconds(made: Calls, repeats: int = 20, calls: int = 10) -> dict[str, float]:
    """The wall-clock time of each function on its arguments, a median over interleaved repeats of several calls in a
    row."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for call, operands in made.values():
        jax.block_until_ready(call(*operands))
    for _ in range(repeats):
        for name, (call, operands) in made.items():
            start = time.perf_counter()
            results = [call(*operands) for _ in range(calls)]
            jax.block_until_ready(results)
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def product_rows(sizes: Sequence[int] = SIZES) -> list[list[str]]:
    """A row for each size: milliseconds in bfloat16, and the others' times over it."""
    rows = []
    for size in sizes:
        whole, *others = call_seconds(products(size)).values()
        rows.append([f"{size}", f"{1e3 * whole:.3f}", *(f"{other / whole:.2f}" for other in others)])
    return rows
