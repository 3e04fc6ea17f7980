"""The byte-level GPT in Flax linen, as free of dtypes as the one in nnx, and its training: what a user writes."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, struct

import jmp_policy as jmp
from jmp_policy._base import PyTree
from jmp_policy.numerics import AuditReport, Provenance, Stats, audit, collect, first_nonfinite

from ._gpt import OBSERVED, GPTConfig, TrainerConfig, causal_attention, cross_entropy, make_optimizer, split_windows
from ._sharding import shard_channels, shard_rows, shard_state


class SelfAttention(nn.Module):
    """Causal self-attention."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, length, width)` to the same shape."""
        batch, length, width = x.shape
        heads = self.config.heads
        qkv = nn.Dense(3 * width, use_bias=False, name="qkv")(x).reshape(batch, length, heads, 3 * width // heads)
        attended = causal_attention(*jnp.split(shard_rows(qkv, None, "tensor"), 3, axis=-1))
        return nn.Dense(width, use_bias=False, name="project")(attended.reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normalised copy of the residual stream."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, length, width)` to the same shape."""
        width = self.config.width
        x = shard_rows(x + SelfAttention(self.config, name="attention")(nn.LayerNorm(name="attention_norm")(x)))
        expanded = nn.Dense(4 * width, name="expand")(nn.LayerNorm(name="mlp_norm")(x))
        return shard_rows(x + nn.Dense(width, name="contract")(nn.gelu(expanded)))


class GPT(nn.Module):
    """A byte-level GPT with learned positions; the output layer shares the table of the embedding."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps integers `(batch, length)` to logits `(batch, length, vocabulary)` of the next token."""
        config = self.config
        initializer = nn.initializers.normal(0.02)
        embed = nn.Embed(config.vocabulary, config.width, embedding_init=initializer, name="embed")
        positions = nn.Embed(config.context, config.width, embedding_init=initializer, name="positions")
        x = shard_rows(shard_channels(embed(tokens) + positions(jnp.arange(tokens.shape[1]))))
        for index in range(config.depth):
            x = Block(config, name=f"blocks_{index}")(x)
        return embed.attend(nn.LayerNorm(name="norm")(x))


class TrainState(jmp.linen.TrainState):
    """The state of a training, which knows how its gradients are summed over devices."""

    reduce_dtype: np.dtype | None = struct.field(pytree_node=False, default=None)


class LinenTrainer:
    """A `Trainer` of the GPT in linen."""

    def __init__(self, config: TrainerConfig):
        model = jmp.with_policy(GPT(config.model), config.policy)
        tokens = jnp.zeros((1, config.model.context), jnp.int32)
        variables = jax.jit(model.init)(jax.random.key(config.seed), tokens)  # with the state of float8 layers, if any
        tx, reduce_dtype = make_optimizer(config), config.reduce_dtype
        state = TrainState.create(apply_fn=model.apply, params=variables, tx=tx, reduce_dtype=reduce_dtype)
        # Flax begins to count with a Python integer; the array of the next step would have the step compiled again.
        self.state = state.replace(step=jnp.zeros((), jnp.int32))

    def step(self, windows: jax.typing.ArrayLike) -> jax.Array:
        """Trains on one batch; returns its loss."""
        self.state, loss = _train_step(self.state, windows)
        return loss

    def loss_fn(self, params: PyTree, windows: jax.typing.ArrayLike) -> jax.Array:
        """The loss of given parameters."""
        return _loss_fn({**self.state.params, "params": params}, self.state.apply_fn, windows)

    def audit(self, windows: jax.typing.ArrayLike) -> AuditReport:
        """Audits the step, without running it."""
        return audit(_train_step)(self.state, windows)

    def find_origin(self, windows: jax.typing.ArrayLike, scale: jmp.LossScale) -> Provenance:
        """Finds what made the gradients of a step not finite."""
        return _find_origin(self.state, scale, windows)

    def observe(self, windows: jax.typing.ArrayLike, where: str = "matmuls") -> Stats:
        """Measures operations and gradients of the step."""
        return _observe(self.state, windows, where)

    @property
    def params(self) -> PyTree:
        """The parameters."""
        return self.state.params["params"]

    @property
    def opt_state(self) -> PyTree:
        """The state of the optimizer."""
        return self.state.opt_state


@functools.partial(jax.jit, static_argnums=1)
def _loss_fn(variables: PyTree, apply_fn: Callable[..., jax.Array], windows: jax.typing.ArrayLike) -> jax.Array:
    inputs, targets = split_windows(windows)
    return cross_entropy(apply_fn(variables, inputs), targets)


@functools.partial(jax.jit, donate_argnums=0)
def _train_step(state: TrainState, windows: jax.typing.ArrayLike) -> tuple[TrainState, jax.Array]:
    loss, grads = _compute_grads(state, windows)
    return shard_state(state.apply_gradients(grads=grads)), loss


@functools.partial(jax.jit, static_argnums=2)
def _observe(state: TrainState, windows: jax.typing.ArrayLike, where: str) -> Stats:
    _, stats = collect(lambda *args: _compute_grads(*args)[1], where=where, of=OBSERVED)(state, windows)
    return stats


@jax.jit
def _find_origin(state: TrainState, scale: jmp.LossScale, windows: jax.typing.ArrayLike) -> Provenance:
    def compute_grads(params: PyTree, windows: jax.typing.ArrayLike) -> tuple[jax.Array, PyTree]:
        return jmp.value_and_grad(_loss_fn, loss_scale=scale)(params, state.apply_fn, windows)

    _, provenance = first_nonfinite(compute_grads)(state.params, windows)
    return provenance


def _compute_grads(state: TrainState, windows: jax.typing.ArrayLike) -> tuple[jax.Array, PyTree]:
    grad_fn = jmp.value_and_grad(_loss_fn, loss_scale=state, reduce_dtype=state.reduce_dtype)
    return grad_fn(state.params, state.apply_fn, windows)
