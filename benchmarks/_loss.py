"""The loss that every contestant minimises."""

import jax
import jax.numpy as jnp
import optax


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy in float32, whatever the dtype of the logits."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()
