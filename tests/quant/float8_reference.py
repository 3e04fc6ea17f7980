"""Training in 8-bit floating point once more, in NumPy and ml_dtypes: scales, casts, products and their transposes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jmp_policy.quant as quant

FORMATS = {"input": ml_dtypes.float8_e4m3fn, "kernel": ml_dtypes.float8_e4m3fn, "output_grad": ml_dtypes.float8_e5m2}
LARGEST = {"input": np.float32(448), "kernel": np.float32(448), "output_grad": np.float32(57344)}
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half a unit in the last place."""

TWO_AXES = functools.partial(quant.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
NHWC = ("NHWC", "HWIO", "NHWC")


def scale_from(amax: Any, name: str, otherwise: Any = 1.0, margin: int = 0) -> np.ndarray:
    """The scale by the formula of Transformer Engine, of which it is the reciprocal, in float32."""
    one, amax = np.float32(1), np.asarray(amax, np.float32)
    with np.errstate(all="ignore"):
        factor = LARGEST[name] / amax / np.float32(2**margin)
        factor = np.where((amax > 0) & np.isfinite(amax), factor, one / np.float32(otherwise))
        return np.asarray(one / factor, np.float32)


def rounded(x: Any, scale: Any, name: str) -> np.ndarray:
    """`x / scale`, saturated and rounded to 8 bits, times the scale, in float64."""
    clipped = np.clip(np.asarray(x, np.float32) / scale, -LARGEST[name], LARGEST[name])
    return clipped.astype(FORMATS[name]).astype(np.float64) * np.asarray(scale, np.float64)


def doubt(x: Any, scale: Any, name: str) -> np.ndarray:
    """How far off a rounded number may be: XLA divides by way of the reciprocal, which decides ties otherwise."""
    x = np.asarray(x, np.float32)
    above, below = (rounded(x * np.float32(1 + error), scale, name) for error in (2.0**-22, -(2.0**-22)))
    return np.abs(above - below)


def rolled(history: np.ndarray, amax: Any) -> np.ndarray:
    """A history with its newest amax, as Flax and Keras write it."""
    history = np.roll(history, -1)
    history[0] = amax
    return history


class Case(NamedTuple):
    """A product, how JAX is asked for it and how NumPy computes it."""

    shapes: tuple[tuple[int, ...], ...]  # of the left operand, of the weight and of the result
    call: Callable[..., jax.Array]  # by the package
    forward: Callable[..., np.ndarray]  # `(x, w) -> result`
    to_left: Callable[..., np.ndarray]  # `(grad, w) -> grad of x`
    to_right: Callable[..., np.ndarray]  # `(x, grad) -> grad of w`
    summed: tuple[tuple[tuple[int, ...], ...], ...]  # for each of these, the axes that a scale of a row or column spans


def contraction(equation: str, lengths: dict[str, int], call: Callable[..., jax.Array]) -> Case:
    """A case by the labels of its axes."""
    operands, out = equation.split("->")
    left, right = operands.split(",")
    turned = [(left, right, out), (out, right, left), (left, out, right)]
    sums = [tuple(tuple(i for i, a in enumerate(term) if a not in to) for term in terms) for *terms, to in turned]
    forward, to_left, to_right = (lambda a, b, e=f"{x},{y}->{to}": np.einsum(e, a, b) for x, y, to in turned)
    shapes = tuple(tuple(lengths[a] for a in term) for term in (left, right, out))
    return Case(shapes, call, forward, to_left, to_right, tuple(sums))


def convolution(size: int, window: int, stride: int, dilation: int, padding: str) -> Case:
    """A convolution of square images, by the patches under its window."""
    span = (window - 1) * dilation + 1
    places = -(-size // stride) if padding == "SAME" else (size - span) // stride + 1
    lost = max((places - 1) * stride + span - size, 0) if padding == "SAME" else 0
    pad = (lost // 2, lost - lost // 2)
    at = stride * np.arange(places)[:, None] + dilation * np.arange(window)
    rows, columns = at[:, None, :, None], at[None, :, None, :]

    def patches(x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, 0), pad, pad, (0, 0)])[:, rows, columns]

    def to_left(grad: np.ndarray, w: np.ndarray) -> np.ndarray:
        image = np.zeros((len(grad), size + sum(pad), size + sum(pad), w.shape[2]))
        np.add.at(image, (slice(None), rows, columns), np.einsum("nijo,abco->nijabc", grad, w))
        return image[:, pad[0] : pad[0] + size, pad[0] : pad[0] + size]

    return Case(
        shapes=((2, size, size, 16), (window, window, 16, 32), (2, places, places, 32)),
        call=lambda x, w, **options: quant.conv_general_dilated(
            x, w, (stride, stride), padding, rhs_dilation=(dilation, dilation), dimension_numbers=NHWC, **options
        ),
        forward=lambda x, w: np.einsum("nijabc,abco->nijo", patches(x), w),
        to_left=to_left,
        to_right=lambda x, grad: np.einsum("nijabc,nijo->abco", patches(x), grad),
        # an example has one scale, and an output feature; what is neither's is one for all
        summed=(((1, 2, 3), (0, 1, 2)), ((1, 2, 3), (0, 1, 2, 3)), ((0, 1, 2, 3), (0, 1, 2))),
    )


def fresh_state(length: int) -> dict[str, jax.Array]:
    """A state in which nothing is like anything else, and by which some numbers saturate."""
    random, state = np.random.default_rng(), {}
    for name in FORMATS:
        state[f"{name}_scale"] = jnp.asarray(random.uniform(0.5, 2, 1) / LARGEST[name], jnp.float32)
        state[f"{name}_amax_history"] = jnp.asarray(random.uniform(0.5, 4, length), jnp.float32)
    return state


@functools.partial(jax.jit, static_argnums=(0, 1))
def computed(call: Any, format: Any, x: Any, w: Any, grad: Any, state: Any) -> tuple[Any, ...]:
    """The result, both gradients and the next state."""
    out, backward = jax.vjp(lambda x, w, s: call(x, w, quantization=format, state=s), x, w, state)
    return out, *backward(grad)
