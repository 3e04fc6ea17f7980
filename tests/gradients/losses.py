"""Losses whose gradients come about in different ways: a law over `LOSSES` holds for each of them.

Each is a function of parameters and a batch `x`, `(8, 4)`, of which each device has a part.
"""

import jax
import jax.numpy as jnp
from jax import lax

HALF = jnp.bfloat16
SIZES = {
    "w": (4, 4),
    "v": (4, 4),
    "b": (4,),
    "ws": (3, 4, 4),
    "table": (4, 4),
    "kernel": (3, 4, 3, 3),
    "square": (2, 2),
}


def finish(h):
    return jnp.mean(jnp.square(h.astype(jnp.float32)))


def dense(p, x):
    return finish(x @ p["w"].astype(HALF) + p["b"].astype(HALF))


def stored_in_half(p, x):
    return finish(jnp.tanh(x @ p["w"]) + p["b"])


def carried_in_swapped_places(p, x):
    """The gradient of the one weight is the carry of the other in every second iteration."""

    def step(carry, _):
        a, b, h = carry
        return (b, a, jnp.tanh(h @ a) @ b), None

    return finish(lax.scan(step, (p["w"].astype(HALF), jnp.eye(4, dtype=HALF), x), length=3)[0][2])


def scaled_and_masked(p, x):
    mask = jnp.tril(jnp.ones((4, 4), HALF))
    return finish(x @ jnp.where(mask > 0, p["w"].astype(HALF) * mask * p["b"].astype(HALF)[0], 0))


def cut_and_joined(p, x):
    w = p["w"].astype(HALF)
    w = jnp.concatenate([lax.dynamic_slice(w, (2, 0), (2, 4)), jnp.pad(w[:2], ((0, 0), (0, 0)))])
    return finish(x @ w[::-1].T)


def summed_of_a_matmul(p, x):
    """A gradient for each example, which are then summed."""
    return finish(jnp.einsum("bij,bjk->bik", x.reshape(8, 2, 2), jnp.broadcast_to(p["square"].astype(HALF), (8, 2, 2))))


def convolved(p, x):
    images = x[:, :, None, None] * jnp.ones((1, 1, 4, 4), HALF)
    return finish(lax.conv_general_dilated(images, p["kernel"].astype(HALF), (1, 1), "SAME"))


def look_up(table, x):
    return table[jnp.abs(x[:, 0]).astype(jnp.int32) % 4]


@jax.custom_vjp
def custom_matmul(w, x):
    return x @ w


custom_matmul.defvjp(
    lambda w, x: (x @ w, (w, x)), lambda saved, ct: (jnp.clip(saved[1].T @ ct, -1, 1), ct @ saved[0].T)
)


def scan_rematerialized(p, x):
    body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w.astype(HALF)), None))
    return finish(lax.scan(body, x, p["ws"])[0])


def behind_a_barrier(p, x):
    w, b = lax.optimization_barrier((p["w"].astype(HALF), p["b"].astype(HALF)))
    return finish(x @ w + b)


def used_in_each_iteration(p, x):
    w = p["w"].astype(HALF)
    return finish(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0])


def branched(p, x):
    w = p["w"].astype(HALF)
    return finish(lax.cond(p["b"][0] > 0, lambda h: jnp.tanh(h @ w), lambda h: h * 2, x))


def positioned(p, x):
    return finish(jnp.tanh(x[:, :, None] * x[:, None, :] + p["table"].astype(HALF)[jnp.arange(4)][None]))


LOSSES = {
    "dense": dense,
    "stored in half": stored_in_half,
    "scanned": lambda p, x: finish(lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(HALF)), None), x, p["ws"])[0]),
    "scanned and rematerialized": scan_rematerialized,
    "used in each iteration": used_in_each_iteration,
    "carried in swapped places": carried_in_swapped_places,
    "branched": branched,
    "embedded": lambda p, x: finish(look_up(p["table"].astype(HALF), x) * x),
    "tied": lambda p, x: finish(look_up(p["table"].astype(HALF), x) @ p["table"].astype(HALF).T),
    "positioned": positioned,
    "convolved": convolved,
    # the product of the weights has a gradient that is summed over the batch, and theirs are made of that
    "factorized": lambda p, x: finish(
        x @ (p["w"].astype(HALF) @ p["v"].astype(HALF) * jnp.tril(jnp.ones((4, 4), HALF)))
    ),
    "scaled and masked": scaled_and_masked,
    "cut and joined": cut_and_joined,
    "mapped": lambda p, x: jnp.mean(jax.vmap(dense, (None, 0))(p, x)),
    "summed of a matmul": summed_of_a_matmul,
    "jitted": lambda p, x: finish(jax.jit(lambda w, h: jnp.tanh(h @ w.astype(HALF)))(p["w"], x)),
    "derivatives of its own": lambda p, x: finish(jnp.tanh(custom_matmul(p["w"].astype(HALF), x))),
    "behind a barrier": behind_a_barrier,
}


def make_arguments(loss, names=tuple(SIZES)):
    """Random parameters and a random batch."""
    keys = jax.random.split(jax.random.key(0), len(names) + 1)
    dtype = HALF if loss is stored_in_half else jnp.float32
    params = {name: jax.random.normal(key, SIZES[name], dtype) for name, key in zip(names, keys[1:], strict=True)}
    return params, jax.random.normal(keys[0], (8, 4), HALF)
