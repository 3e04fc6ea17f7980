"""Losses whose gradients come about in different ways: a law that takes `any_loss` holds for each of them.

Each is a function of parameters and a batch `x`, `(8, 4)`, of which each device has a part. `SIZES` says what the
parameters are: shapes, in float32 where no dtype stands.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
from jax import lax

HALF = jnp.bfloat16


def finish(h):
    return jnp.mean(jnp.square(h.astype(jnp.float32)))


def dense(p, x):
    return finish(x @ p["w"].astype(HALF) + p["b"].astype(HALF))


def stored_in_half(p, x):
    return finish(jnp.tanh(x @ p["w"]) + p["b"])


def scanned(p, x):
    return finish(lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(HALF)), None), x, p["ws"])[0])


def scanned_in_half(p, x):
    return finish(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["ws"])[0])


def used_in_each_turn(p, x):
    w = p["w"].astype(HALF)
    return finish(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0])


def carried_in_swapped_places(p, x):
    """The gradient of the one weight is the carry of the other in every second turn."""

    def turn(carry, _):
        a, b, h = carry
        return (b, a, jnp.tanh(h @ a) @ b), None

    weights = p["w"].astype(HALF), jnp.eye(4, dtype=HALF)
    return finish(lax.scan(turn, (*weights, x), length=3)[0][2])


def scanned_and_rematerialized(p, x):
    turn = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w.astype(HALF)), None))
    return finish(lax.scan(turn, x, p["ws"])[0])


def branched(p, x):
    w = p["w"].astype(HALF)
    return finish(lax.cond(p["b"][0] > 0, lambda h: jnp.tanh(h @ w), lambda h: h * 2, x))


def embedded(p, x):
    return finish(p["table"].astype(HALF)[jnp.abs(x[:, 0]).astype(jnp.int32) % 4] * x)


def tied(p, x):
    table = p["table"].astype(HALF)
    return finish(table[jnp.abs(x[:, 0]).astype(jnp.int32) % 4] @ table.T)


def positioned(p, x):
    places = p["table"].astype(HALF)[jnp.arange(4)]
    return finish(jnp.tanh(x[:, :, None] * x[:, None, :] + places[None]))


def convolved(p, x):
    images = x[:, :, None, None] * jnp.ones((1, 1, 4, 4), HALF)
    return finish(lax.conv_general_dilated(images, p["kernel"].astype(HALF), (1, 1), "SAME"))


def factorized(p, x):
    """The product of the weights has a gradient that is summed over the batch, and theirs are made of that."""
    return finish(x @ (p["w"].astype(HALF) @ p["v"].astype(HALF) * jnp.tril(jnp.ones((4, 4), HALF))))


def scaled_and_masked(p, x):
    mask = jnp.tril(jnp.ones((4, 4), HALF))
    w = jnp.where(mask > 0, p["w"].astype(HALF) * mask * p["b"].astype(HALF)[0], 0)
    return finish(x @ w)


def cut_and_joined(p, x):
    w = p["w"].astype(HALF)
    w = jnp.concatenate([lax.dynamic_slice(w, (2, 0), (2, 4)), jnp.pad(w[:2], ((0, 0), (0, 0)))])
    return finish(x @ w[::-1].T)


def one_example(p, x):
    return finish(jnp.tanh(x @ p["w"].astype(HALF)) + p["b"].astype(HALF))


def mapped(p, x):
    return jnp.mean(jax.vmap(one_example, (None, 0))(p, x))


def summed_of_a_matmul(p, x):
    """A gradient for each example, which are then summed."""
    pairs = x.reshape(8, 2, 2)
    weights = jnp.broadcast_to(p["square"].astype(HALF), (8, 2, 2))
    return finish(jnp.einsum("bij,bjk->bik", pairs, weights))


def jitted(p, x):
    return finish(jax.jit(lambda w, h: jnp.tanh(h @ w.astype(HALF)))(p["w"], x))


@jax.custom_vjp
def custom_matmul(w, x):
    return x @ w


def pull_back(saved, ct):
    w, x = saved
    return jnp.clip(x.T @ ct, -1, 1), ct @ w.T


custom_matmul.defvjp(lambda w, x: (x @ w, (w, x)), pull_back)


def with_derivatives_of_its_own(p, x):
    return finish(jnp.tanh(custom_matmul(p["w"].astype(HALF), x)))


def behind_a_barrier(p, x):
    w, b = lax.optimization_barrier((p["w"].astype(HALF), p["b"].astype(HALF)))
    return finish(x @ w + b)


SIZES = {
    "w": (4, 4), "v": (4, 4), "b": (4,), "ws": (3, 4, 4), "table": (4, 4), "kernel": (3, 4, 3, 3), "square": (2, 2),
}  # fmt: skip
IN_HALF = stored_in_half, scanned_in_half
LOSSES = [
    dense, stored_in_half, scanned, scanned_in_half, used_in_each_turn, carried_in_swapped_places,
    scanned_and_rematerialized, branched, embedded, tied, positioned, convolved, factorized, scaled_and_masked,
    cut_and_joined, mapped, summed_of_a_matmul, jitted, with_derivatives_of_its_own, behind_a_barrier,
]  # fmt: skip


def make_arguments(loss):
    """Random parameters that a loss reads, and a random batch."""
    used = [name for name in SIZES if f'"{name}"' in _source(loss)]
    keys = jax.random.split(jax.random.key(0), len(used) + 1)
    dtype = HALF if loss in IN_HALF else jnp.float32
    params = {name: jax.random.normal(key, SIZES[name], dtype) for name, key in zip(used, keys[1:], strict=True)}
    return params, jax.random.normal(keys[0], (8, 4), HALF)


@functools.cache
def _source(loss):
    return inspect.getsource(one_example if loss is mapped else loss)
