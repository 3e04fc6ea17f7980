"""How fast this device computes in each dtype, measured."""

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Key = TypeVar("Key", bound=Hashable)

# A unit that computes a half format has at least twice the rate of float32; a format that XLA widens to float32
# can at best tie with it. Halfway between leaves room for the noise of a busy machine.
NATIVE_SPEEDUP = 1.5

REFERENCE = "float32 highest"


@dataclasses.dataclass(frozen=True)
class MatmulKind:
    """One way to multiply matrices.

    Attributes:
      name: for people to read.
      dtype: the dtype of the matrices.
      accumulator: the dtype of the product.
      precision: the precision asked of XLA.
    """

    name: str
    dtype: str
    accumulator: str
    precision: lax.Precision = lax.Precision.DEFAULT


MATMULS = (
    MatmulKind(REFERENCE, "float32", "float32", lax.Precision.HIGHEST),
    MatmulKind("float32 default", "float32", "float32"),
    MatmulKind("bfloat16", "bfloat16", "bfloat16"),
    MatmulKind("float16", "float16", "float16"),
    MatmulKind("float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    MatmulKind("int8", "int8", "int32"),
)


@dataclasses.dataclass(frozen=True)
class MatmulRate:
    """A measured rate.

    Attributes:
      kind: what was measured.
      teraflops: 10**12 multiplications and additions a second; `None` if the device cannot do it at all.
      speedup: the rate relative to float32 at highest precision, 0 if the device cannot do it.
    """

    kind: MatmulKind
    teraflops: float | None
    speedup: float

    @property
    def native(self) -> bool:
        """Whether the device has units for this dtype: it is then faster than float32."""
        return self.kind.dtype == "float32" or self.speedup >= NATIVE_SPEEDUP


def measure_matmuls(kinds: Iterable[MatmulKind] = MATMULS, *, size: int | None = None) -> list[MatmulRate]:
    """Times square matrix products on the default device.

    Args:
      kinds: what to measure; the reference, `MATMULS[0]`, among them.
      size: the side of the matrices; by default large enough to keep the device busy.

    Returns:
      A rate for each kind, in the same order.
    """
    if size is None:
        size = 1024 if jax.default_backend() == "cpu" else 8192
    products = {kind: _prepare_matmul(kind, size) for kind in kinds}
    seconds = _best_seconds({kind: product for kind, product in products.items() if product is not None})
    reference = next(time for kind, time in seconds.items() if kind.name == REFERENCE)
    return [
        MatmulRate(kind, 2 * size**3 / seconds[kind] / 1e12, reference / seconds[kind])
        if kind in seconds
        else MatmulRate(kind, None, 0.0)
        for kind in products
    ]


def measure_perceptron(dtypes: Iterable[str] = ("float32", "bfloat16", "float16")) -> dict[str, float]:
    """Times what mixed precision is for: the forward and backward pass of a perceptron over float32 parameters.

    Unlike a matmul alone it has the casts of the parameters and the elementwise operations of a real step.

    Returns:
      Seconds by compute dtype.
    """
    width, rows = (64, 2048) if jax.default_backend() == "cpu" else (4096, 8192)
    return _best_seconds({dtype: _prepare_perceptron(dtype, width, rows) for dtype in dtypes})


def _prepare_matmul(kind: MatmulKind, size: int) -> Callable[[], Any] | None:
    """The compiled product, run once; `None` if the device has no such product."""

    @jax.jit
    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        if kind.dtype.startswith("float8"):
            # The pattern that XLA turns into a float8 product where there is one: widen, scale, multiply.
            left, right = (x.astype(kind.accumulator) * jnp.ones((), kind.accumulator) for x in (left, right))
        return lax.dot(left, right, precision=kind.precision, preferred_element_type=jnp.dtype(kind.accumulator))

    left, right = (jnp.ones((size, size), kind.dtype) for _ in range(2))
    try:
        jax.block_until_ready(product(left, right))
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None
    return lambda: product(left, right)


def _prepare_perceptron(dtype: str, width: int, rows: int) -> Callable[[], Any]:
    """The compiled gradient of a perceptron of two layers, run once."""

    def loss_fn(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        expand, contract = (w.astype(dtype) for w in params)
        y = x + jax.nn.gelu(x @ expand) @ contract
        return jnp.square(y.astype(jnp.float32)).mean()

    params = jnp.full((width, 4 * width), 0.01), jnp.full((4 * width, width), 0.01)
    x = jnp.ones((rows, width), dtype)
    gradient = jax.jit(jax.grad(loss_fn, argnums=(0, 1)))
    jax.block_until_ready(gradient(params, x))
    return lambda: gradient(params, x)


def _best_seconds(calls: Mapping[Key, Callable[[], Any]], rounds: int = 25) -> dict[Key, float]:
    """The shortest time of each call: what the device can do, not what else it was busy with meanwhile.

    The calls take turns, so that a busy machine slows all of them alike.
    """
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for key, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[key] = min(best[key], time.perf_counter() - start)
    return best
