"""Products of square matrices, whose speed is the ceiling of everything else, and how each format multiplies."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks._gpu_models import Work


@dataclasses.dataclass(frozen=True)
class Product:
    """A way to multiply: the dtypes of the matrices and of the product, and of the scales of blocks, if it has them."""

    dtype: str
    result: str
    precision: lax.Precision = lax.Precision.DEFAULT
    block_size: int | None = None
    scale_dtype: str | None = None


PRODUCTS = {
    "bfloat16": Product("bfloat16", "bfloat16"),
    "float32": Product("float32", "float32", lax.Precision.HIGHEST),
    "TF32": Product("float32", "float32", lax.Precision.HIGH),
    "float16": Product("float16", "float16"),
    "float8_e4m3fn": Product("float8_e4m3fn", "bfloat16"),
    "int8": Product("int8", "int32"),
    "mxfp8": Product("float8_e4m3fn", "bfloat16", block_size=32, scale_dtype="float8_e8m0fnu"),
    "nvfp4": Product("float4_e2m1fn", "bfloat16", block_size=16, scale_dtype="float8_e4m3fn"),
}


def multiply(product: Product, size: int) -> Work:
    """The product of two square matrices of random numbers: of zeros it would take less power, and so less time."""
    operands = lambda: (None, *_operands(product.dtype, size), *_scales(product, size))
    return Work(jax.jit(_multiply(product)), operands, flops=2 * size**3)


def _multiply(product: Product) -> Callable[..., tuple[None, jax.Array]]:
    if product.block_size is not None:
        return _multiply_blocks(product.result)

    def step(_: None, left: jax.Array, right: jax.Array) -> tuple[None, jax.Array]:
        if product.dtype.startswith("float8"):
            # XLA makes one float8 matmul of upcast, scale and multiply where the device has one.
            left, right = (x.astype(product.result) * jnp.ones((), product.result) for x in (left, right))
        result = jnp.dtype(product.result)
        return None, lax.dot(left, right, precision=product.precision, preferred_element_type=result)

    return step


def _multiply_blocks(result: str) -> Callable[..., tuple[None, jax.Array]]:
    multiply = functools.partial(
        lax.scaled_dot,
        dimension_numbers=(((1,), (1,)), ((), ())),  # the blocks of both lie along their second axis
        preferred_element_type=jnp.dtype(result),
    )
    return lambda _, left, right, *scales: (None, multiply(left, right, lhs_scale=scales[0], rhs_scale=scales[1]))


def _scales(product: Product, size: int) -> list[jax.Array]:
    """A scale for each block of both operands, if there are blocks."""
    if product.block_size is None:
        return []
    return [jnp.ones((size, size // product.block_size), product.scale_dtype)] * 2


def _operands(dtype: str, size: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    if jnp.issubdtype(dtype, jnp.integer):
        return [jax.random.randint(key, (size, size), -127, 128, dtype) for key in keys]
    return [jax.random.normal(key, (size, size)).astype(dtype) for key in keys]
