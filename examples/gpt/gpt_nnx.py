"""The byte-level GPT in Flax nnx, written without a thought about dtypes, and its training."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jmp_policy as jmp

from .devices import shard_channels, shard_rows, shard_state
from .model import OBSERVED, GPTConfig, TrainerConfig, causal_attention, cross_entropy, make_optimizer, split_windows


class SelfAttention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.heads = config.heads
        self.qkv = nnx.Linear(config.width, 3 * config.width, use_bias=False, rngs=rngs)
        self.project = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, length, width)` to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, self.heads, 3 * width // self.heads)
        attended = causal_attention(*jnp.split(shard_rows(qkv, None, "tensor"), 3, axis=-1))
        return self.project(attended.reshape(batch, length, width))


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each on a normalized copy of the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = SelfAttention(config, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.expand = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.contract = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, length, width)` to the same shape."""
        x = shard_rows(x + self.attention(self.attention_norm(x)))
        return shard_rows(x + self.contract(nnx.gelu(self.expand(self.mlp_norm(x)))))


class GPT(nnx.Module):
    """A byte-level GPT with learned positions; the output layer shares the table of the embedding."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        initializer = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(config.vocabulary, config.width, embedding_init=initializer, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, embedding_init=initializer, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.depth)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps integers `(batch, length)` to logits `(batch, length, vocabulary)` of the next token."""
        x = shard_rows(shard_channels(self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def loss_fn(model: GPT, windows: jax.typing.ArrayLike) -> jax.Array:
    """Returns the loss of a model on uint8 windows `(batch, context + 1)`."""
    inputs, targets = split_windows(windows)
    return cross_entropy(model(inputs), targets)


class Trainer:
    """The GPT with its optimizer: the methods are those of `gpt_linen.Trainer`."""

    def __init__(self, config: TrainerConfig):
        self.model = jmp.with_policy(GPT, config.policy)(config.model, rngs=nnx.Rngs(config.seed))
        self.optimizer = jmp.nnx.Optimizer(self.model, make_optimizer(config), wrt=nnx.Param)

        def compute_grads(
            model: GPT, optimizer: jmp.nnx.Optimizer, windows: jax.typing.ArrayLike
        ) -> tuple[jax.Array, nnx.State]:
            grad_fn = jmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer, reduce_dtype=config.reduce_dtype)
            return grad_fn(model, windows)

        def train_step(model: GPT, optimizer: jmp.nnx.Optimizer, windows: jax.typing.ArrayLike) -> jax.Array:
            loss, grads = compute_grads(model, optimizer, windows)
            optimizer.update(model, grads)
            for part in (model, optimizer):
                nnx.update(part, shard_state(nnx.state(part)))
            return loss

        self._find = jmp.optim.find_origin(loss_fn, self.optimizer.tx)
        self._train_step = nnx.jit(train_step)
        self._observe = nnx.jit(jmp.numerics.collect(lambda *args: compute_grads(*args)[1], of=OBSERVED))

    def step(self, windows: jax.typing.ArrayLike) -> jax.Array:
        """Trains on uint8 windows; returns the loss."""
        return self._train_step(self.model, self.optimizer, windows)

    def loss_fn(self, params: Any, windows: jax.typing.ArrayLike) -> jax.Array:
        """Returns the loss of given parameters."""
        graphdef, _, others = nnx.split(self.model, nnx.Param, ...)
        return _pure_loss_fn(graphdef, params, others, windows)

    def audit(self, windows: jax.typing.ArrayLike) -> jmp.numerics.AuditReport:
        """Audits the train step without running it."""
        return jmp.numerics.audit(self._train_step)(self.model, self.optimizer, windows)

    def assert_locked(self, path: Path, windows: jax.typing.ArrayLike) -> None:
        """Asserts that the train step has the dtypes of a lock file, as on an NVIDIA GPU."""
        jmp.numerics.assert_locked(path, self._train_step, platform="cuda")(self.model, self.optimizer, windows)

    def judge(self, windows: jax.typing.ArrayLike, scale: jmp.LossScale) -> jmp.optim.Verdict:
        """Finds the fault of the step that was just skipped."""
        return self._find.verdict(self.model, self.opt_state._replace(loss_scale=scale), windows)

    def watch(self, windows: jax.typing.ArrayLike) -> None:
        """Notes the range of a batch that was good."""
        self._find.watch(windows)

    def observe(self, windows: jax.typing.ArrayLike) -> jmp.numerics.Stats:
        """Measures the matmuls and gradients of the step."""
        return self._observe(self.model, self.optimizer, windows)[1]

    @property
    def params(self) -> nnx.State:
        """The parameters."""
        return nnx.state(self.model, nnx.Param)

    @property
    def opt_state(self) -> Any:
        """The state of the optimizer."""
        return self.optimizer.opt_state

    @property
    def state(self) -> tuple[nnx.State, nnx.State]:
        """The variables of the model and the optimizer."""
        return nnx.state(self.model), nnx.state(self.optimizer)

    @state.setter
    def state(self, state: tuple[nnx.State, nnx.State]) -> None:
        nnx.update(self.model, state[0])
        nnx.update(self.optimizer, state[1])


@functools.partial(jax.jit, static_argnums=0)
def _pure_loss_fn(graphdef: nnx.GraphDef, params: Any, others: nnx.State, windows: jax.typing.ArrayLike) -> jax.Array:
    return loss_fn(nnx.merge(graphdef, params, others), windows)
