"""Functions that are certified, with their arguments and ranges, and one that checks them on random inputs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax

# Which evaluates one operation at a time: what is public compiles the whole program for each input.
from jmp_policy.contrib._certify._interpreter import FaultSearch


class Case(NamedTuple):
    """A function that is certified for all inputs in the ranges."""

    fun: Callable[..., Any]
    ranges: Any
    args: tuple[Any, ...]


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


X, LABELS = shape(3, 5), shape(3, dtype="int32")
X16 = shape(3, 5, dtype="float16")
WIDE = [(-100.0, 100.0)]


def update(tx, x=X, steps=10**6):
    """An update of an optimizer: gradients to 100, moments that gradients to 100 have, and `steps` steps."""
    state = jax.eval_shape(tx.init, x)
    ranges = jax.tree.map(lambda leaf: (0, steps) if leaf.dtype == jnp.int32 else (0, 1e4), state)

    def fun(grads, state, params):
        with jax.numpy_dtype_promotion("standard"):  # which optax needs
            return tx.update(grads, state, params)[0]

    return Case(fun, [*WIDE, ranges, *WIDE], (x, state, x))


def rms_norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def normalize_rows(x):
    norms = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return jnp.where(norms > 0, x / norms, 0.0)


def route(x):
    gates, experts = lax.top_k(jax.nn.softmax(x), 2)
    return gates / jnp.sum(gates, -1, keepdims=True), jnp.log(5 - experts.astype(x.dtype))


def select_twice(x):
    return jnp.where((x > 0) & (x < 5), jnp.exp(9 * x), 0.0) + jnp.where((x < 1) | ~(x < 9), 0.0, jnp.log(x))


def average_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def pool(x):
    return jnp.sum(nn.max_pool(x, (3,), padding="SAME") ** 2)


CASES = {
    "log_softmax of float16": Case(jax.nn.log_softmax, [(-1000.0, 1000.0)], (X16,)),
    "logsumexp": Case(lambda x: jax.nn.logsumexp(x, axis=-1), WIDE, (X,)),
    "cross entropy": Case(optax.softmax_cross_entropy_with_integer_labels, [*WIDE, (0, 4)], (X, LABELS)),
    "gradient of cross entropy": Case(jax.grad(average_loss), [*WIDE, (0, 4)], (X, LABELS)),
    "gradient of sigmoid cross entropy": Case(
        jax.grad(lambda x, y: optax.sigmoid_binary_cross_entropy(x, y).mean()), [*WIDE, (0, 1)], (X, X)
    ),
    "LayerNorm": Case(lambda x: nn.LayerNorm(use_bias=False, use_scale=False).apply({}, x), WIDE, (X,)),
    "RMS norm by hand": Case(rms_norm, WIDE, (X,)),
    "distance to the extremes": Case(
        lambda x: jnp.sqrt(jnp.max(x, -1, keepdims=True) - x) + jnp.log(x - jnp.min(x) + 1), WIDE, (X,)
    ),
    "attention": Case(jax.nn.dot_product_attention, [(-5.0, 5.0)] * 3, (shape(2, 3, 1, 4),) * 3),
    "router": Case(route, WIDE, (X,)),
    "gradient of pooling": Case(jax.grad(pool), WIDE, (shape(2, 6, 3),)),
    "silu": Case(jax.nn.silu, [(-6e4, 6e4)], (X16,)),
    "AdamW": update(optax.adamw(1e-3)),
    "scan": Case(lambda x: lax.scan(lambda c, y: (0.5 * c + y, jnp.tanh(c)), jnp.zeros(5), x), WIDE, (X,)),
    "fori_loop": Case(lambda x: lax.fori_loop(0, 9, lambda i, c: jnp.sin(c) + i.astype(c.dtype), x), WIDE, (X,)),
    "while_loop": Case(lambda x: lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: 0.5 * c, x), WIDE, (X,)),
    "cond": Case(lambda x: lax.cond(jnp.sum(x) > 0, lambda y: y * y, jnp.cos, x), WIDE, (X,)),
    "chain in jnp.where": Case(lambda x: jnp.where(x * x <= 25, 0.0, 1 / (x * x - 20)), WIDE, (X,)),
    "quotient where not zero": Case(lambda x: jnp.where(x == 0, 1.0, jnp.sin(x) / x), WIDE, (X,)),
    "two comparisons in jnp.where": Case(select_twice, WIDE, (X,)),
    "jnp.where in jnp.where": Case(
        lambda x: jnp.where(x > -5, jnp.where(x < 5, 1 / ((x + 6) * (6 - x)), 0.0), 0.0), WIDE, (X,)
    ),
    "comparison of two arrays": Case(lambda x, y: jnp.where(x > y, lax.rsqrt(x + 1), 0.0), [*WIDE, (0, 1)], (X, X)),
    "rows that are not zero": Case(normalize_rows, WIDE, (X,)),
    "clip by global norm": update(optax.clip_by_global_norm(1.0)),
}


def draw(case: Case, count: int, seed: int = 0) -> tuple[Any, ...]:
    """Draws a batch of arguments in the ranges: uniform, at the ends, and of all magnitudes."""
    rng = np.random.default_rng(seed)

    def draw_leaf(pair: Sequence[float], leaf: Any) -> np.ndarray:
        (low, high), sizes = pair, (count, *leaf.shape)
        if leaf.dtype == np.int32:
            return rng.integers(low, high, sizes, endpoint=True).astype(np.int32)
        powers = rng.choice([low, high], sizes) * 2.0 ** -rng.uniform(0, 150, sizes)
        kinds = rng.integers(0, 4, (count, *(1 for _ in leaf.shape)))
        drawn = np.select(
            [kinds == 0, kinds == 1, kinds == 2],
            [rng.uniform(low, high, sizes), rng.choice([low, high], sizes), np.clip(powers, low, high)],
            np.full(sizes, high),
        )
        return drawn.astype(leaf.dtype)

    is_pair = lambda node: isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], int | float)
    ranges = tuple(case.ranges)
    return jax.tree.map(draw_leaf, jax.tree.broadcast(ranges, case.args, is_leaf=is_pair), case.args, is_leaf=is_pair)


def find_break(fun, *args):
    """Returns the fault of the first operation that fails for these arguments, one operation at a time."""
    program = jax.make_jaxpr(fun)(*args)
    trial = FaultSearch(set())
    trial.run(program.jaxpr, program.consts, jax.tree.leaves(args))
    return trial.fault
