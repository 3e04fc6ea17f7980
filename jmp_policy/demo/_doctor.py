"""How fast this device computes in each dtype, and the policy that follows from it."""

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .._trees import PyTree

Key = TypeVar("Key", bound=Hashable)

# A unit that computes a half format has at least twice the rate of float32; a format that XLA widens to float32
# can at best tie with it. Halfway between leaves room for the noise of a busy machine.
NATIVE_SPEEDUP = 1.5

REFERENCE = "float32 highest"
HALF_DTYPES = ("bfloat16", "float16")


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


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A policy, as `get_policy` reads it, and why."""

    policy: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was measured on a device, and what follows.

    Attributes:
      device: the device in words.
      matmuls: the rates of matrix products.
      perceptron_seconds: the time of a perceptron's forward and backward pass, by compute dtype.
      recommendation: the policy to train with.
    """

    device: str
    matmuls: list[MatmulRate]
    perceptron_seconds: dict[str, float]
    recommendation: Recommendation


def diagnose(*, half_only: bool = False) -> Diagnosis:
    """Measures the default device.

    Args:
      half_only: measure only what the recommendation depends on.
    """
    kinds = [kind for kind in MATMULS if not half_only or kind.name in (REFERENCE, *HALF_DTYPES)]
    matmuls, perceptron = measure_matmuls(kinds), measure_perceptron()
    return Diagnosis(describe_device(), matmuls, perceptron, recommend_policy(matmuls, perceptron))


def recommend_policy(matmuls: Iterable[MatmulRate], perceptron_seconds: Mapping[str, float]) -> Recommendation:
    """Chooses the policy to train with.

    bfloat16 goes before float16 where the device has both: it has the range of float32, so it needs no loss scale
    and no step is ever skipped.

    >>> half = [MatmulRate(kind, 1.0, 8.0) for kind in MATMULS if kind.name in HALF_DTYPES]
    >>> recommend_policy(half, {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5}).policy
    'mixed_bfloat16'
    """
    by_name = {rate.kind.name: rate for rate in matmuls}
    for name in HALF_DTYPES:
        if by_name[name].native:
            return Recommendation(f"mixed_{name}", _reason_for_half(name, by_name[name].speedup))
    times = ", ".join(
        f"{name} takes {perceptron_seconds[name] / perceptron_seconds['float32']:.2f} times as long as float32"
        for name in HALF_DTYPES
    )
    slower = all(perceptron_seconds[name] > perceptron_seconds["float32"] for name in HALF_DTYPES)
    return Recommendation(
        "float32",
        f"half precision {'is slower' if slower else 'gains nothing'} here: this device has no units for it, and "
        f"converts it to float32 and back (forward and backward of a perceptron: {times})",
    )


def describe_device() -> str:
    """The default device in words."""
    device = jax.devices()[0]
    count = jax.device_count()
    kind = "" if device.device_kind == device.platform else f" {device.device_kind}"
    return f"{device.platform}{kind}" + (f", {count} devices" if count > 1 else "")


def _prepare_matmul(kind: MatmulKind, size: int) -> Callable[[], PyTree] | None:
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


def _prepare_perceptron(dtype: str, width: int, rows: int) -> Callable[[], PyTree]:
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


def _best_seconds(calls: Mapping[Key, Callable[[], PyTree]], rounds: int = 25) -> dict[Key, float]:
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


def _reason_for_half(name: str, speedup: float) -> str:
    if name == "bfloat16":
        range_of_it = "it has the range of float32, so that it needs no loss scale"
    else:
        range_of_it = "its small range is what the dynamic loss scale is for"
    return f"{name} matmuls are native here, at {speedup:.1f} times the rate of float32, and {range_of_it}"
