"""Times of matrix products, and of the forward and backward pass of a perceptron, in each dtype."""

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.stages import Compiled

from ..._base import PyTree

Key = TypeVar("Key", bound=Hashable)
Call = Callable[[], PyTree]

REFERENCE = "float32 highest"
HALF_DTYPES = ("bfloat16", "float16")

# Enough turns that each call has a quiet moment on a busy machine, and few enough that the doctor is quick.
TURNS = 25
FEWEST_TURNS = 6
MOST_SECONDS = 3.0


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
      multiplied_in: the dtype in which the compiled program multiplies; `None` where its text does not tell.
    """

    kind: MatmulKind
    teraflops: float | None
    speedup: float
    multiplied_in: str | None = None


@dataclasses.dataclass(frozen=True)
class Speedup:
    """How many times as fast as float32 something is: larger is better.

    Attributes:
      value: the ratio of the shortest times.
      low: the smallest such ratio of a third of the turns.
      high: the largest.
    """

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a forward and backward pass.

    Attributes:
      seconds: the shortest of all turns.
      speedup: relative to the same pass in float32.
      multiplied_in: how many of its matrix products the compiled program multiplies in which dtype; empty where its
        text does not tell.
    """

    seconds: float
    speedup: Speedup
    multiplied_in: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the measured arrays are.

    Attributes:
      matrix: the side of the matrices.
      rows: the number of inputs of the perceptron.
      width: their size; the hidden layer is four times as wide.
    """

    matrix: int
    rows: int
    width: int


def choose_sizes(platform: str) -> Sizes:
    """Sizes that keep a device busy for milliseconds.

    The perceptron of a CPU is that of a small transformer. A larger one takes longer than a busy machine stays quiet.
    """
    return Sizes(1024, 1024, 256) if platform == "cpu" else Sizes(8192, 8192, 4096)


def measure_matmuls(kinds: Iterable[MatmulKind] = MATMULS, *, size: int) -> list[MatmulRate]:
    """Times square matrix products on the default device.

    Args:
      kinds: what to measure; the reference, `MATMULS[0]`, among them.
      size: the side of the matrices.

    Returns:
      A rate for each kind, in the same order.
    """
    kinds = list(kinds)
    prepared = {kind: _prepare_matmul(kind, size) for kind in kinds}
    calls = {kind: found[0] for kind, found in prepared.items() if found is not None}
    best = {kind: min(seconds) for kind, seconds in time_in_turns(calls).items()}
    reference = next(seconds for kind, seconds in best.items() if kind.name == REFERENCE)
    rates = []
    for kind, found in prepared.items():
        if found is None:
            rates.append(MatmulRate(kind, None, 0.0))
        else:
            products = list_products(found[1])
            rate = 2 * size**3 / best[kind] / 1e12
            rates.append(MatmulRate(kind, rate, reference / best[kind], products[0] if len(products) == 1 else None))
    return rates


def measure_steps(rows: int, width: int, dtypes: Iterable[str] = ("float32", *HALF_DTYPES)) -> dict[str, StepTime]:
    """Times what mixed precision is for: the forward and backward pass of a perceptron over float32 parameters.

    Unlike a matmul alone it has the casts of the parameters and the elementwise operations of a real step.

    Args:
      rows: the number of inputs.
      width: their size; the hidden layer is four times as wide.
      dtypes: compute dtypes, float32 among them.

    Returns:
      Times by compute dtype.
    """
    prepared = {dtype: _prepare_step(dtype, rows, width) for dtype in dtypes}
    seconds = time_in_turns({dtype: call for dtype, (call, _) in prepared.items()})
    return {
        dtype: StepTime(
            min(seconds[dtype]),
            compare_times(seconds["float32"], seconds[dtype]),
            dict(Counter(list_products(compiled))),
        )
        for dtype, (_, compiled) in prepared.items()
    }


def compare_times(reference: Sequence[float], seconds: Sequence[float]) -> Speedup:
    """How many times as fast as a reference something is, and how sure that is.

    Shortest times are compared: they are what the device can do, not what else it was busy with. Each third of the
    turns gives a ratio of its own, and where these differ much, the machine was too busy to tell.

    Args:
      reference: the seconds of each turn.
      seconds: the same of what is compared; three turns at least.

    >>> compare_times([2.0, 2.0, 2.0, 9.0], [1.0, 1.0, 1.6, 1.0])
    Speedup(value=2.0, low=1.25, high=2.0)
    """
    thirds = [min(reference[start::3]) / min(seconds[start::3]) for start in range(3)]
    return Speedup(min(reference) / min(seconds), min(thirds), max(thirds))


def time_in_turns(calls: Mapping[Key, Call], clock: Callable[[], float] = time.perf_counter) -> dict[Key, list[float]]:
    """The seconds of each call, turn by turn.

    The calls take turns, so that a busy machine slows all of them alike, and each turn begins with another one.

    Args:
      calls: what to time.
      clock: tells the seconds.
    """
    seconds = {key: [] for key in calls}
    order, start = list(calls), clock()
    for turn in range(TURNS):
        if turn >= FEWEST_TURNS and clock() - start > MOST_SECONDS:
            break
        for key in order:
            begin = clock()
            jax.block_until_ready(calls[key]())
            seconds[key].append(clock() - begin)
        order = order[1:] + order[:1]
    return seconds


def _prepare_matmul(kind: MatmulKind, size: int) -> tuple[Call, Compiled] | None:
    """The product, compiled and run once; `None` if the device has no such product."""

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        if kind.dtype.startswith("float8"):
            # The pattern that XLA turns into a float8 product where there is one: widen, scale, multiply.
            left, right = (x.astype(kind.accumulator) * jnp.ones((), kind.accumulator) for x in (left, right))
        return lax.dot(left, right, precision=kind.precision, preferred_element_type=jnp.dtype(kind.accumulator))

    try:
        matrix = jnp.ones((size, size), kind.dtype)
        return _compile(product, matrix, matrix)
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None


def _prepare_step(dtype: str, rows: int, width: int) -> tuple[Call, Compiled]:
    """The gradient of a perceptron of two layers, compiled and run once."""

    def loss_fn(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        expand, contract = (w.astype(dtype) for w in params)
        y = x + jax.nn.gelu(x @ expand) @ contract
        return jnp.square(y.astype(jnp.float32)).mean()

    params = jnp.full((width, 4 * width), 0.01), jnp.full((4 * width, width), 0.01)
    return _compile(jax.grad(loss_fn), params, jnp.ones((rows, width), dtype))


def _compile(function: Callable[..., PyTree], *args: PyTree) -> tuple[Call, Compiled]:
    compiled = jax.jit(function).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    return lambda: compiled(*args), compiled


_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "s8": "int8",
    "s32": "int32",
}

_VALUE = re.compile(r"%?([\w.-]+) = (\w+)\[")
_PRODUCT = re.compile(r" (?:dot|convolution|custom-call)\((?:\w+\[[^ ]* )?%?([\w.-]+), (?:\w+\[[^ ]* )?%?([\w.-]+)")
_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul)[^"]*"')  # of cuBLAS, hipBLASLt, oneDNN


def list_products(compiled: Compiled) -> list[str]:
    """The dtype that each matrix product of a compiled program reads, where the program tells.

    >>> import jax, jax.numpy as jnp
    >>> matrix = jnp.ones((64, 64))
    >>> list_products(jax.jit(jnp.matmul).lower(matrix, matrix).compile())
    ['float32']
    """
    return read_products(compiled.as_text() or "")


def read_products(text: str) -> list[str]:
    """The dtypes that the matrix products of an HLO module read; a product of two dtypes is left out.

    >>> read_products("%a = bf16[8,8]{1,0} parameter(0)" + chr(10) + "ROOT %c = f32[8,8]{1,0} dot(%a, %a)")
    ['bfloat16']
    """
    dtypes = dict(_VALUE.findall(text))
    found = []
    for line in text.splitlines():
        match = _PRODUCT.search(line)
        if match is None or ("custom-call(" in line and not _LIBRARY.search(line)):
            continue
        operands = {_DTYPES.get(dtypes.get(name, "")) for name in match.groups()}
        if len(operands) == 1 and None not in operands:
            found += operands
    return [dtype for dtype in found if dtype is not None]
