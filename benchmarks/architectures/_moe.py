"""A mixture of experts with top-k routing and a loss that balances their load, in nnx."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks._loss import cross_entropy


class Expert(nnx.Module):
    """A perceptron with one hidden layer."""

    def __init__(self, width: int, hidden: int, *, dtype: Any = None, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class MoELayer(nnx.Module):
    """Sends each token to its `top_k` experts, as far as these have capacity (GShard, Switch Transformer)."""

    def __init__(self, width: int, experts: int, top_k: int, capacity: int, *, dtype: Any = None, rngs: nnx.Rngs):
        self.top_k, self.capacity = top_k, capacity
        self.router = nnx.Linear(width, experts, use_bias=False, dtype=dtype, rngs=rngs)

        @nnx.split_rngs(splits=experts)
        @nnx.vmap
        def make_experts(rngs: nnx.Rngs) -> Expert:
            return Expert(width, 2 * width, dtype=dtype, rngs=rngs)

        self.experts = make_experts(rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps tokens `(n, width)` to the same shape, and says how unbalanced the load is."""
        probabilities = jax.nn.softmax(self.router(x))
        gates, chosen = jax.lax.top_k(probabilities, self.top_k)
        gates = gates / gates.sum(-1, keepdims=True)
        slots, first = self._slots(chosen, probabilities.shape[-1])
        combine = jnp.einsum("nk,nkec->nec", gates, slots.astype(gates.dtype))
        dispatched = jnp.einsum("nec,nd->ecd", slots.sum(1).astype(x.dtype), x)
        expert_outputs = nnx.vmap(lambda expert, x: expert(x))(self.experts, dispatched)
        load = jnp.mean(first, axis=0, dtype=probabilities.dtype)
        balance = probabilities.shape[-1] * jnp.sum(load * probabilities.mean(0))
        return jnp.einsum("nec,ecd->nd", combine, expert_outputs), balance

    def _slots(self, chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
        """The slots `(n, k, experts, capacity)` of the choices, one-hot, none where an expert is full; first picks."""
        mask = jax.nn.one_hot(chosen, experts, dtype=jnp.int32)
        by_rank = mask.swapaxes(0, 1).reshape(-1, experts)  # first choices before second ones
        position = (jnp.cumsum(by_rank, axis=0) - 1).reshape(self.top_k, -1, experts).swapaxes(0, 1)
        slots = mask[..., None] * jax.nn.one_hot(position, self.capacity, dtype=jnp.int32)
        return slots, mask[:, 0]


class MoEClassifier(nnx.Module):
    """Residual mixtures of experts, each on a normalized copy of its input, between two linear layers."""

    def __init__(
        self, features: int, classes: int, width: int, depth: int, experts: int, *, dtype: Any = None, rngs: nnx.Rngs
    ):
        self.embed = nnx.Linear(features, width, dtype=dtype, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(depth)])
        layer = lambda: MoELayer(width, experts, top_k=2, capacity=64, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layer() for _ in range(depth)])
        self.head = nnx.Linear(width, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `(n, features)` to logits, and the sum of the layers' imbalance."""
        x = self.embed(x)
        imbalance = jnp.zeros((), x.dtype)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y, balance = layer(norm(x))
            x, imbalance = x + y, imbalance + balance
        return self.head(x), imbalance


def loss_fn(model: MoEClassifier, batch: Any) -> jax.Array:
    """The cross-entropy of a batch, and a hundredth of the imbalance."""
    logits, imbalance = model(batch["features"])
    return cross_entropy(logits, batch["label"]) + 0.01 * imbalance.astype(jnp.float32)
