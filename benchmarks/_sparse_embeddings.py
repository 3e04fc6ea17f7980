"""Trains a table of embeddings under Adam in 8 bits. Most rows have a gradient once in hundreds of steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmp

TOKENS, WIDTH, BATCH = 4096, 16, 16
BLOCK = 256

_E4M3_MAX = 448.0


def sparse_contestants() -> dict[str, optax.GradientTransformation]:
    """Adam, and ways to keep its moments in 8 bits, by name."""
    adam = optax.adam(1e-2)
    quantize = functools.partial(jmp.optim.quantize_state, adam, min_size=BLOCK)
    return {
        "Adam": adam,
        "moments in e4m3, embeddings too": store_in_e4m3(adam),
        "quantize_state": quantize(),
        "quantize_state, embeddings too": quantize(where=".*"),
        "quantize_state, embeddings too, stochastic": quantize(where=".*", stochastic=jax.random.key(0)),
    }


def store_in_e4m3(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Rounds both moments of Adam to e4m3 after each step, each block of 256 numbers relative to its largest one."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, (adam, *rest) = inner.update(updates, state, params)
        adam = adam._replace(mu=jax.tree.map(_round_blocks, adam.mu), nu=jax.tree.map(_round_blocks, adam.nu))
        return updates, (adam, *rest)

    return optax.GradientTransformation(inner.init, update)


def _round_blocks(x: jax.Array) -> jax.Array:
    blocks = x.reshape(-1, min(BLOCK, x.size))
    largest = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    scale = jnp.where(largest > 0, largest / _E4M3_MAX, 1)
    return ((blocks / scale).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale).reshape(x.shape)


def train_sparse(tx: optax.GradientTransformation, seed: int, steps: int, tokens: int = TOKENS) -> tuple[float, float]:
    """Trains a table and two layers to tell a number for each token; frequencies of tokens follow Zipf's law.

    Returns:
      The largest magnitude of a weight, and the loss over all tokens by their frequencies.
    """
    draw = jax.random.split(jax.random.key(seed), 5)
    targets = jax.random.normal(draw[0], (tokens,)) / 2
    frequencies = jnp.arange(1, tokens + 1, dtype=jnp.float32) ** -1.2
    params = {
        "embed": jax.random.normal(draw[1], (tokens, WIDTH)) / 10,
        "hidden": jax.random.normal(draw[2], (WIDTH, WIDTH)) / WIDTH**0.5,
        "out": jax.random.normal(draw[3], (WIDTH,)) / WIDTH**0.5,
    }

    def predict(params: Any, drawn: jax.Array) -> jax.Array:
        return jnp.tanh(params["embed"][drawn] @ params["hidden"]) @ params["out"]

    def loss_fn(params: Any, drawn: jax.Array) -> jax.Array:
        return jnp.mean((predict(params, drawn) - targets[drawn]) ** 2)

    def step(number: jax.Array, carry: Any) -> Any:
        params, state = carry
        drawn = jax.random.categorical(jax.random.fold_in(draw[4], number), jnp.log(frequencies), shape=(BATCH,))
        updates, state = tx.update(jax.grad(loss_fn)(params, drawn), state, params)
        return optax.apply_updates(params, updates), state

    train = jax.jit(lambda carry: jax.lax.fori_loop(0, steps, step, carry))
    params, _ = train((params, tx.init(params)))
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(params))
    errors = (predict(params, jnp.arange(tokens)) - targets) ** 2
    return largest, float(jnp.average(errors, weights=frequencies))
