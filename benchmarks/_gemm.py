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

_NUMBERS = (((1,), (0,)), ((), ()))


def products(size: int) -> dict[str, tuple[Callable[..., jax.Array], tuple[Any, ...]]]:
    """The product of two square matrices in bfloat16, the right one as it is or quantized before, and its operands."""
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    made = {"bfloat16": (jax.jit(jnp.dot), (left, right))}
    for name, format in FORMATS.items():
        weight = jax.jit(quant.quantize_array, static_argnums=1)(right, format)
        made[name] = (jax.jit(lambda left, weight: quant.dot_general(left, weight, _NUMBERS)), (left, weight))
    return made


def product_seconds(size: int, repeats: int = 20, calls: int = 10) -> dict[str, float]:
    """The wall-clock time of each product, a median over interleaved repeats of several calls in a row."""
    made = products(size)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for product, operands in made.values():
        product(*operands).block_until_ready()
    for _ in range(repeats):
        for name, (product, operands) in made.items():
            start = time.perf_counter()
            results = [product(*operands) for _ in range(calls)]
            jax.block_until_ready(results)
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def product_rows(sizes: Sequence[int] = SIZES) -> list[list[str]]:
    """A row for each size: milliseconds in bfloat16, and the others' times over it."""
    rows = []
    for size in sizes:
        whole, *others = product_seconds(size).values()
        rows.append([f"{size}", f"{1e3 * whole:.3f}", *(f"{other / whole:.2f}" for other in others)])
    return rows
