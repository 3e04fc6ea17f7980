"""The byte-level GPT in Flax linen, written without a thought about dtypes, and its training."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jmp_policy as jmp

from .devices import shard_channels, shard_rows, shard_state
from .model import OBSERVED, GPTConfig, TrainerConfig, causal_attention, cross_entropy, make_optimizer, split_windows


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
    """Attention and a two-layer perceptron, each on a normalized copy of the residual stream."""

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


class Trainer:
    """The GPT with its optimizer.

    Attributes:
      state: everything that a checkpoint must hold, a pytree of arrays. Assign it to restore a checkpoint.
    """

    def __init__(self, config: TrainerConfig):
        model = jmp.with_policy(GPT(config.model), config.policy)

        def loss_fn(variables: Any, windows: jax.typing.ArrayLike) -> jax.Array:
            inputs, targets = split_windows(windows)
            logits: Any = model.apply(variables, inputs)
            return cross_entropy(logits, targets)

        def compute_grads(state: jmp.linen.TrainState, windows: jax.typing.ArrayLike) -> tuple[jax.Array, Any]:
            grad_fn = jmp.value_and_grad(loss_fn, loss_scale=state, reduce_dtype=config.reduce_dtype)
            return grad_fn(state.params, windows)

        def train_step(
            state: jmp.linen.TrainState, windows: jax.typing.ArrayLike
        ) -> tuple[jmp.linen.TrainState, jax.Array]:
            loss, grads = compute_grads(state, windows)
            return shard_state(state.apply_gradients(grads=grads)), loss

        tokens = jnp.zeros((1, config.model.context), jnp.int32)
        variables = jax.jit(model.init)(jax.random.key(config.seed), tokens)  # includes the state of float8 layers
        state = jmp.linen.TrainState.create(apply_fn=model.apply, params=variables, tx=make_optimizer(config))
        # Flax starts with a Python integer. The array of the next step would compile the step a second time.
        self.state = state.replace(step=jnp.zeros((), jnp.int32))
        self._loss_fn, self._find = jax.jit(loss_fn), jmp.optim.find_origin(loss_fn, state.tx)
        self._train_step = jax.jit(train_step, donate_argnums=0)
        self._observe = jax.jit(jmp.numerics.collect(lambda *args: compute_grads(*args)[1], of=OBSERVED))

    def step(self, windows: jax.typing.ArrayLike) -> jax.Array:
        """Trains on uint8 windows `(batch, context + 1)`; returns the loss, a float32 scalar in nats per byte."""
        self.state, loss = self._train_step(self.state, windows)
        return loss

    def loss_fn(self, params: Any, windows: jax.typing.ArrayLike) -> jax.Array:
        """Returns the loss of given parameters: a pure and compiled function, to differentiate and look into."""
        return self._loss_fn({**self.state.params, "params": params}, windows)

    def audit(self, windows: jax.typing.ArrayLike) -> jmp.numerics.AuditReport:
        """Audits the train step without running it."""
        return jmp.numerics.audit(self._train_step)(self.state, windows)

    def assert_locked(self, path: Path, windows: jax.typing.ArrayLike) -> None:
        """Asserts that the train step has the dtypes of a lock file, as on an NVIDIA GPU."""
        jmp.numerics.assert_locked(path, self._train_step, platform="cuda")(self.state, windows)

    def judge(self, windows: jax.typing.ArrayLike, scale: jmp.LossScale) -> jmp.optim.Verdict:
        """Finds the fault of the step that was just skipped, from its batch and its scale."""
        return self._find.verdict(self.state.params, self.opt_state._replace(loss_scale=scale), windows)

    def watch(self, windows: jax.typing.ArrayLike) -> None:
        """Notes the range of a batch that was good."""
        self._find.watch(windows)

    def observe(self, windows: jax.typing.ArrayLike) -> jmp.numerics.Stats:
        """Measures the matmuls and gradients of the step, and leaves the state as it is."""
        return self._observe(self.state, windows)[1]

    @property
    def params(self) -> Any:
        """The parameters."""
        return self.state.params["params"]

    @property
    def opt_state(self) -> Any:
        """The state of the optimizer, which holds the loss scale."""
        return self.state.opt_state
