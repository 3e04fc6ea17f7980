"""The loss that every contestant minimises."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy in float32, whatever the dtype of the logits."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def cross_entropy_of(apply: Callable[..., Any]) -> Callable[..., Any]:
    """The loss `(params, variables, (x, labels)) -> (loss, variables)` of a model in functional form."""

    def loss_fn(params: Any, variables: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        x, labels = batch
        logits, variables = apply(params, variables, x)
        return cross_entropy(logits, labels), variables

    return loss_fn
