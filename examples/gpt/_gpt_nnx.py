"""The byte-level GPT in Flax nnx, written without a thought about dtypes, and its training: what a user writes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jmp_policy as jmp
from jmp_policy._base import PyTree
from jmp_policy.numerics import AuditReport, Provenance, Stats, audit, collect, first_nonfinite

from ._gpt import OBSERVED, GPTConfig, TrainerConfig, causal_attention, cross_entropy, make_optimizer, split_windows
from ._sharding import shard_channels, shard_rows, shard_state


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
    """Attention and a two-layer perceptron, each on a normalised copy of the residual stream."""

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


class Optimizer(jmp.nnx.Optimizer):
    """The optimizer of a training, which knows how gradients are summed over devices."""

    reduce_dtype: np.dtype | None = None


class NnxTrainer:
    """A `Trainer` of the GPT in nnx."""

    def __init__(self, config: TrainerConfig):
        model_class = jmp.with_policy(GPT, config.policy)
        self.model = model_class(config.model, rngs=nnx.Rngs(config.seed))
        self.optimizer = Optimizer(self.model, make_optimizer(config), wrt=nnx.Param)
        self.optimizer.reduce_dtype = config.reduce_dtype

    def step(self, windows: jax.typing.ArrayLike) -> jax.Array:
        """Trains on one batch; returns its loss."""
        return _train_step(self.model, self.optimizer, windows)

    def loss_fn(self, params: PyTree, windows: jax.typing.ArrayLike) -> jax.Array:
        """The loss of given parameters."""
        graphdef, _, others = nnx.split(self.model, nnx.Param, ...)
        return _pure_loss_fn(graphdef, params, others, windows)

    def compute_logits(self, params: PyTree, windows: jax.typing.ArrayLike) -> jax.Array:
        """The logits of given parameters, in the dtype in which the policy returns them."""
        graphdef, _, others = nnx.split(self.model, nnx.Param, ...)
        return _compute_logits(graphdef, params, others, windows)

    def audit(self, windows: jax.typing.ArrayLike) -> AuditReport:
        """Audits the step, without running it."""
        return audit(_train_step)(self.model, self.optimizer, windows)

    def find_origin(self, windows: jax.typing.ArrayLike, scale: jmp.LossScale) -> Provenance:
        """Finds what made the gradients of a step not finite."""
        return _find_origin(self.model, scale, windows)

    def observe(self, windows: jax.typing.ArrayLike, where: str = "matmuls") -> Stats:
        """Measures operations and gradients of the step."""
        return _observe(self.model, self.optimizer, windows, where)

    @property
    def params(self) -> nnx.State:
        """The parameters."""
        return nnx.state(self.model, nnx.Param)

    @property
    def opt_state(self) -> PyTree:
        """The state of the optimizer."""
        return self.optimizer.opt_state

    @property
    def state(self) -> tuple[nnx.State, nnx.State]:
        """The variables of the model and the optimizer."""
        return nnx.state(self.model), nnx.state(self.optimizer)

    @state.setter
    def state(self, state: tuple[nnx.State, nnx.State]) -> None:
        model, optimizer = state
        nnx.update(self.model, model)
        nnx.update(self.optimizer, optimizer)


def _loss_fn(model: GPT, windows: jax.typing.ArrayLike) -> jax.Array:
    inputs, targets = split_windows(windows)
    return cross_entropy(model(inputs), targets)


@functools.partial(jax.jit, static_argnums=0)
def _pure_loss_fn(
    graphdef: nnx.GraphDef, params: PyTree, others: nnx.State, windows: jax.typing.ArrayLike
) -> jax.Array:
    return _loss_fn(nnx.merge(graphdef, params, others), windows)


@functools.partial(jax.jit, static_argnums=0)
def _compute_logits(
    graphdef: nnx.GraphDef, params: PyTree, others: nnx.State, windows: jax.typing.ArrayLike
) -> jax.Array:
    inputs, _ = split_windows(windows)
    return nnx.merge(graphdef, params, others)(inputs)


@nnx.jit
def _train_step(model: GPT, optimizer: Optimizer, windows: jax.typing.ArrayLike) -> jax.Array:
    loss, grads = _compute_grads(model, optimizer, windows)
    optimizer.update(model, grads)
    for part in (model, optimizer):
        nnx.update(part, shard_state(nnx.state(part)))
    return loss


@functools.partial(nnx.jit, static_argnums=3)
def _observe(model: GPT, optimizer: Optimizer, windows: jax.typing.ArrayLike, where: str) -> Stats:
    _, stats = collect(lambda *args: _compute_grads(*args)[1], where=where, of=OBSERVED)(model, optimizer, windows)
    return stats


@nnx.jit
def _find_origin(model: GPT, scale: jmp.LossScale, windows: jax.typing.ArrayLike) -> Provenance:
    _, provenance = first_nonfinite(jmp.nnx.value_and_grad(_loss_fn, loss_scale=scale))(model, windows)
    return provenance


def _compute_grads(model: GPT, optimizer: Optimizer, windows: jax.typing.ArrayLike) -> tuple[jax.Array, nnx.State]:
    grad_fn = jmp.nnx.value_and_grad(_loss_fn, loss_scale=optimizer, reduce_dtype=optimizer.reduce_dtype)
    return grad_fn(model, windows)
