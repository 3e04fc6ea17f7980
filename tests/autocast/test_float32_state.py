"""Programs with float32 state around matmuls: autocast is as accurate as casting the operands of the matmuls by hand.

A program is a function of float32 arrays and of `mm`, which multiplies two of them. By hand, `mm` casts its operands to
half precision, and JAX's promotion decides the rest: half precision with float32 is float32.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax

import jmp_policy as jmp

HALVES = ["bfloat16", "float16"]
SEEDS = 4
FACTOR = 2
"""How much larger the error of autocast may be, which rounds in other places, and perhaps in two instead of one."""

UNITS = 4
"""How many units of float32, of the size of the values, the error of autocast may be larger beside that.

The reference is float32 as well, and XLA fuses it in another way: each operation after a matmul may be a unit off. So a
state of 100 with an update of 1 may lose 5e-5 of the update, and a state rounded to half precision loses 2e-2 or more.
"""


class Program(NamedTuple):
    fun: Callable
    given: dict[str, tuple]  # the shape of each array beside `w` and `x`, with its mean and deviation if not 0 and 1
    has_gradient: bool


PROGRAMS: dict[str, Program] = {}
WEIGHT, INPUT = ((8, 8), 0, 0.35), ((4, 8),)
STATE = ((4, 8),)
ROWS = np.array([2, 0, 2, 1])
IS_KEPT = np.arange(32).reshape(4, 8) % 3 > 0


def program(has_gradient=True, **given):
    def register(fun):
        PROGRAMS[fun.__name__.replace("_", " ")] = Program(fun, given, has_gradient)
        return fun

    return register


@program(s=STATE)
def update(mm, w, x, s):
    return s + mm(x, w)


@program(t=((4, 1), 86400, 3600))
def timestamps(mm, w, x, t):
    age = t - 86000
    return jnp.exp(-jax.nn.sigmoid(mm(x, w)) * jnp.abs(age) / 3600), age


def rotate(q, cos, sin):
    left, right = jnp.split(q, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


@program()
def rotary_embedding_of_late_positions(mm, w, x):
    position = jnp.arange(4, dtype=jnp.float32) + 5000
    angle = position[:, None] * 100.0 ** (-jnp.arange(4, dtype=jnp.float32) / 4)
    return rotate(mm(x, w), jnp.cos(angle), jnp.sin(angle))


@program(target=((4, 8), 100, 1))
def differences_from_targets(mm, w, x, target):
    difference = mm(x, w) - (target - 100)
    return difference, jnp.where(jnp.abs(difference) < 1, 0.5 * difference**2, jnp.abs(difference) - 0.5)


@program(reward=((4,), 100, 1), value=((4,), 100, 1))
def td_error(mm, w, x, reward, value):
    v = mm(x, w[:, 0])
    return reward + 0.99 * v - value, reward + 0.99 * lax.stop_gradient(value) - v


@program(count=((), 16000, 1), mean=((8,), 100, 1), square=((8,), 9, 1))
def running_moments(mm, w, x, count, mean, square):
    h = mm(x, w)
    count = count + 4
    difference = jnp.mean(h, 0) - mean
    return count, mean + difference * 4 / count, square + (jnp.mean((h - mean) ** 2, 0) - square) / count


@program(momentum=((8, 8), 0, 0.1))
def momentum(mm, w, x, momentum):
    momentum = 0.9 * momentum + jax.grad(lambda w: jnp.mean((jnp.tanh(mm(x, w)) - x) ** 2))(w)
    return w - 0.01 * momentum, momentum


@program(place=((4, 8), 10, 1), speed=STATE)
def leapfrog(mm, w, x, place, speed):
    def turn(carry, _):
        place, speed = carry
        speed = speed - 0.01 * mm(place, w)
        place = place + 0.01 * speed
        return (place, speed), jnp.sum(speed**2)

    return lax.scan(turn, (place, speed), None, length=16)


@program(has_gradient=False, s=((4, 8), 100, 1))  # JAX does not differentiate it in reverse
def while_loop(mm, w, x, s):
    turn = lambda carry: (carry[0] + 1, carry[1] + 0.01 * mm(x, w))
    return lax.while_loop(lambda carry: carry[0] < 8, turn, (0, s))[1]


@program(s=((4, 8), 100, 1))
def cond(mm, w, x, s):
    return lax.cond(s[0, 0] > 100, lambda s: s + mm(x, w), lambda s: s - mm(x, w), s)


@program(s=((4, 8), 100, 1))
def where(mm, w, x, s):
    return jnp.where(IS_KEPT, s, mm(x, w))


@program(buffer=((6, 8), 100, 1))
def replay_buffer(mm, w, x, buffer):
    buffer = buffer.at[np.array([1, 4, 5, 2])].set(mm(x, w).astype(jnp.float32))
    return buffer, buffer[np.array([0, 1, 3, 5])] - 100


@program(s=((4, 8), 100, 1))
def concatenate(mm, w, x, s):
    return jnp.concatenate([s, mm(x, w)], -1), jnp.stack([mm(x, w), s])


@program(s=((4, 8), 100, 1))
def segment_sum(mm, w, x, s):
    return jax.ops.segment_sum(s + mm(x, w), ROWS, 3), jax.ops.segment_sum(mm(x, w) * s, ROWS, 3)


@program(s=((4, 8), 100, 1))
def vmap(mm, w, x, s):
    return jax.vmap(lambda x, s: s + mm(x, w))(x, s)


@program(s=((4, 8), 100, 1))
def jit(mm, w, x, s):
    return jax.jit(lambda s, h: s * 0.999 + h)(s, mm(x, w)), jax.jit(lambda s: s + mm(x, w))(s)


@program(s=((4, 8), 10, 1))
def remat(mm, w, x, s):
    return jax.checkpoint(lambda s, x: s + 0.1 * jnp.tanh(s * mm(x, w)))(s, x)


class Collection(nn.Module):
    """Averages in a variable collection."""

    @nn.compact
    def __call__(self, h):
        average = self.variable("averages", "mean", jnp.zeros, 8)
        count = self.variable("averages", "count", jnp.zeros, ())
        count.value = count.value + 1
        average.value = average.value + (jnp.mean(h, 0) - average.value) / count.value
        return h - average.value


@program(mean=((8,), 100, 1), count=((), 1000, 1))
def variable_collection(mm, w, x, mean, count):
    averages = {"averages": {"mean": mean, "count": count}}
    return Collection().apply(averages, mm(x, w), mutable="averages")


@program(total=((4, 8), 100, 1))
def nnx_variable(mm, w, x, total):
    class Total(nnx.Module):
        def __init__(self):
            self.total = nnx.Variable(total)

        def __call__(self, h):
            self.total[...] = self.total[...] * 0.99 + h
            return h * self.total[...]

    model = Total()
    return model(mm(x, w)), model.total[...]


@program(grid=((1, 4, 4, 2), 100, 1), kernel=((3, 3, 2, 2), 0, 0.3))
def convolution_of_a_grid(mm, w, x, grid, kernel):
    convolve = lambda left, right: lax.conv_general_dilated(
        left, right, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return grid + 0.1 * mm(grid - 100, kernel, convolve)


def multiply_by_hand(half):
    def mm(left, right, product=jnp.matmul):
        return product(left.astype(half), right.astype(half))

    return mm


def multiply(left, right, product=jnp.matmul):
    return product(left, right)


@program(logits=STATE, s=((4, 8), 100, 1))
def softmax_of_float32(mm, w, x, logits, s):
    return jax.nn.softmax(logits) * s + mm(x, w)


@program(raw=STATE, b=STATE)
def softplus_of_float32(mm, w, x, raw, b):
    return jax.nn.softplus(raw) * x, b * jax.nn.softplus(raw + mm(x, w)), 3.0 * jax.nn.elu(raw)


@program(s=((4, 8), 100, 1))
def norm_of_a_state(mm, w, x, s):
    normed = nn.LayerNorm().apply({"params": {"scale": jnp.ones(8), "bias": jnp.zeros(8)}}, s)
    return jax.nn.standardize(s) + s, normed + s, mm(normed, w)


@program(s=((4, 8), 100, 1))
def state_of_one_batch(mm, w, x, s):
    return s[None] + mm(x, w)[None], jax.vmap(lambda s: s + mm(x, w))(s[None])


@program(r=((2, 8), 100, 1))
def computed_rows(mm, w, x, r):
    return jnp.max(r, 0) + mm(x, w), (r[0] - r[1]) * 100 + mm(x, w), mm(x, w) - r[0]


@functools.cache
def draw_normals():
    """Draws the elements of all arrays of a program, and of the cotangents of its outputs, for each seed."""
    keys = jax.random.split(jax.random.key(0), SEEDS)
    return np.asarray(jax.vmap(lambda key: jax.random.normal(key, (2, 1024)))(keys))


def cut(normals, shapes):
    """Cuts normal numbers into arrays of these shapes."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    assert ends[-1] <= len(normals)
    pairs = zip(shapes, ends, strict=True)
    return [normals[end - math.prod(shape) : end].reshape(shape) for shape, end in pairs]


def with_gradients(fun, has_gradient):
    """Returns a function that returns the outputs in float32, and the gradients of all arguments."""
    widen = lambda *arguments: jax.tree.leaves(jax.tree.map(lambda out: out.astype(jnp.float32), fun(*arguments)))

    def run(arguments, cotangents):
        if not has_gradient:
            return widen(*arguments)
        outputs, backward = jax.vjp(widen, *arguments)
        return [*outputs, *backward(cotangents)]

    return run


def measure(name):
    """Returns the errors by hand and of autocast for each half, and the size, of each output and gradient.

    Each is a norm over all seeds, so that none decides.
    """
    fun, given, has_gradient = PROGRAMS[name]
    exact = functools.partial(fun, multiply)
    cast = [jmp.autocast(exact, f"params=float32,compute={half},output=none") for half in HALVES]
    by_hand = [functools.partial(fun, multiply_by_hand(half)) for half in HALVES]

    @jax.jit
    def run(arguments, cotangents):
        outputs = [with_gradients(each, has_gradient)(arguments, cotangents) for each in (exact, *cast)]
        with jax.numpy_dtype_promotion("standard"):
            return outputs + [with_gradients(each, has_gradient)(arguments, cotangents) for each in by_hand]

    kinds = [WEIGHT, INPUT, *given.values()]
    squares = 0
    for normals in draw_normals():
        arrays = zip(cut(normals[0], [shape for shape, *_ in kinds]), kinds, strict=True)
        arguments = [scale(array, *moments) for array, (_, *moments) in arrays]
        outputs = jax.tree.leaves(jax.eval_shape(exact, *arguments))
        results = run(arguments, cut(normals[1], [out.shape for out in outputs]))
        expected, *others = ([np.asarray(leaf, np.float64) for leaf in leaves] for leaves in results)
        errors = [[leaf - right for leaf, right in zip(leaves, expected, strict=True)] for leaves in others]
        squares = squares + np.array([[np.sum(leaf**2) for leaf in leaves] for leaves in (expected, *errors)])
    size, *errors = np.sqrt(squares)
    return dict(zip(HALVES, zip(errors[2:], errors[:2], strict=True), strict=True)), size


def scale(array, mean=0.0, deviation=1.0):
    return np.asarray(mean + deviation * array, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_as_accurate_as_with_matmuls_cast_by_hand(name):
    errors, size = measure(name)
    for by_hand, found in errors.values():
        assert np.isfinite(by_hand).all()
        assert (found <= FACTOR * by_hand + UNITS * np.finfo(np.float32).eps * size).all()
