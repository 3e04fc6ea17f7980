"""A bidirectional LSTM that gives each word of a sentence a tag, in linen."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn


class Tagger(nn.Module):
    """`(batch, length)` tokens, and the lengths of the sentences, to logits of tags."""

    vocabulary: int
    tags: int
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        forward, backward = (nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype)) for _ in range(2))
        x = nn.Bidirectional(forward, backward)(x, seq_lengths=lengths)
        return nn.Dense(self.tags, dtype=self.dtype)(x)


def loss_fn(apply_fn: Callable[..., Any], variables: Any, batch: Any) -> tuple[jax.Array, Any]:
    """The mean cross-entropy of the tags of the words that there are."""
    tokens, tags, lengths = batch["tokens"], batch["tags"], batch["lengths"]
    logits = apply_fn(variables, tokens, lengths)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tags)
    words = jnp.arange(tokens.shape[1]) < lengths[:, None]
    return jnp.sum(losses, where=words) / jnp.sum(lengths), {}
