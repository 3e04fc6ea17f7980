"""The models and batches that all peers train: a GPT and an MLP, in linen, whose weights the others copy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from benchmarks._loss import cross_entropy
from benchmarks._models_linen import HandGPT
from examples.gpt.data import VALIDATION_SHARE
from examples.gpt.gpt_linen import GPT
from examples.gpt.model import GPTConfig

SMALL_GPT = GPTConfig(depth=2, context=32)
SMALL_MLP = (512, 6)
"""Width and depth of an MLP."""

MLP_BATCH = 16

VOCABULARY = 500
SEPARATORS = {b" ": 0.7, b", ": 0.08, b".\n": 0.08, b"(": 0.05, b") ": 0.05, b" = ": 0.04}


class MLP(linen.Module):
    """Square layers; `dtype` is for those who write it by hand."""

    width: int
    depth: int
    dtype: Any = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.dtype is None else x.astype(self.dtype)
        for _ in range(self.depth - 1):
            x = linen.relu(linen.Dense(self.width, dtype=self.dtype)(x))
        return linen.Dense(self.width, dtype=self.dtype)(x)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A model to train: a "GPT" of a `GPTConfig`, or an "MLP" of a width and depth.

    Attributes:
      module: the module with a dtype by hand, or with none (`None`).
      params: the parameters in float32, or their shapes.
      batches: inputs and labels of each step, or their shapes.
    """

    name: str
    sizes: Any
    module: Callable[[Any], linen.Module]
    params: Any
    batches: tuple[Any, ...]

    def apply(self, dtype: Any) -> Callable[..., Any]:
        """`(params, variables, x) -> (logits, variables)` with a dtype by hand, or with none (`None`)."""
        return _functional(self.module(dtype))

    def loss_in_float32(self, params: Any) -> float:
        """The loss of parameters on the first batch, computed in float32."""
        x, labels = self.batches[0]
        return float(_loss(self.module(jnp.float32), params, x, labels))


def make_text(words: int) -> np.ndarray:
    """Words of random letters, some far more frequent than others, with marks between; the same on every machine."""
    rng = np.random.default_rng(0)
    letters = [rng.integers(ord("a"), ord("z") + 1, size) for size in rng.integers(2, 9, VOCABULARY)]
    vocabulary = [bytes(word.astype(np.uint8)) for word in letters]
    frequency = 1 / np.arange(1, VOCABULARY + 1)  # Zipf's law
    chosen = rng.choice(VOCABULARY, words, p=frequency / frequency.sum())
    separators = list(SEPARATORS)
    marks = rng.choice(len(separators), words, p=list(SEPARATORS.values()))
    data = b"".join(vocabulary[word] + separators[mark] for word, mark in zip(chosen, marks, strict=True))
    text = np.frombuffer(data, np.uint8)
    return text[: len(text) - int(len(text) * VALIDATION_SHARE)]


def gpt(config: GPTConfig, steps: int, batch: int = 8) -> Problem:
    """A byte-level GPT and windows of a text that is the same on every machine; nothing is random but by a seed."""
    text = make_text(words=4000)
    starts = np.random.default_rng(0).integers(0, len(text) - config.context, (steps, batch))
    windows = text[starts[..., None] + np.arange(config.context + 1)].astype(np.int32)
    batches = tuple((jnp.asarray(window[:, :-1]), jnp.asarray(window[:, 1:])) for window in windows)
    params = jax.jit(GPT(config).init)(jax.random.key(0), batches[0][0])["params"]
    return Problem("GPT", config, lambda dtype: _gpt(config, dtype), params, batches)


def mlp(width: int, depth: int, steps: int = 0, batch: int = MLP_BATCH) -> Problem:
    """Square layers that are all parameters, on random numbers; without steps, shapes that are never run."""
    x, labels = jax.ShapeDtypeStruct((batch, width), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    init = functools.partial(MLP(width, depth).init, jax.random.key(0))
    params = jax.jit(init)(jnp.zeros(x.shape))["params"] if steps else jax.eval_shape(init, x)["params"]
    rng = np.random.default_rng(0)
    batches: tuple[Any, ...] = ((x, labels),)
    if steps:
        draw = lambda: (rng.normal(size=x.shape).astype(np.float32), rng.integers(0, width, batch).astype(np.int32))
        batches = tuple(jax.tree.map(jnp.asarray, draw()) for _ in range(steps))
    return Problem("MLP", (width, depth), functools.partial(MLP, width, depth), params, batches)


def _gpt(config: GPTConfig, dtype: Any) -> linen.Module:
    return GPT(config) if dtype is None else HandGPT(config, dtype)


def _functional(model: linen.Module) -> Callable[..., Any]:
    return lambda params, variables, x: (model.apply({"params": params}, x), variables)


@functools.partial(jax.jit, static_argnums=0)
def _loss(model: linen.Module, params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return cross_entropy(model.apply({"params": params}, x), labels)  # type: ignore[arg-type]
