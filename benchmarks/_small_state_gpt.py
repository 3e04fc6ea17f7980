"""The example's GPT, trained with its optimizer, whose AdamW keeps its moments in one way or another."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_policy as jmp
from benchmarks._optimizer_cost import count_bytes, count_parameters
from examples.gpt.data import Corpus, load_corpus, sample_batch, validation_batches
from examples.gpt.gpt_linen import GPT
from examples.gpt.model import GPTConfig, cross_entropy, measure_bits_per_byte, split_windows

BATCH = 16
WARMUP = 100
STEPS_OF_A_CALL = 20
"""How many steps are one compiled program: a step of so small a model is as short as its call."""


def gpt_contestants(b2: float = 0.99) -> dict[str, optax.GradientTransformation]:
    """AdamW as the example has it, and with its moments stored in fewer bits, by name."""
    adamw = optax.adamw(_schedule, b2=b2, weight_decay=0.01)
    key = jax.random.key(0)
    nudged = optax.adamw(lambda step: (1 + 1e-6) * _schedule(step), b2=b2, weight_decay=0.01)
    return {
        "AdamW": adamw,
        "AdamW, learning rate 1e-6 higher": nudged,  # how far two runs are apart that differ by rounding errors
        "quantize_state": jmp.optim.quantize_state(adamw),
        "quantize_state, stochastic": jmp.optim.quantize_state(adamw, stochastic=key),
        "quantize_state, embeddings too": jmp.optim.quantize_state(adamw, where=".*"),
    }


@dataclasses.dataclass(frozen=True)
class GPTRun:
    """The end of a training.

    Attributes:
      name: of the optimizer.
      seed: of parameters and batches.
      validation: the loss in bits per byte.
      state: bytes of the optimizer's state per parameter.
    """

    name: str
    seed: int
    validation: float
    state: float


def train_gpts(
    names: Sequence[str], seeds: Sequence[int], steps: int, config: GPTConfig, b2: float = 0.99
) -> Iterator[GPTRun]:
    """Trains the GPT in bfloat16, for each seed with each optimizer on the same batches."""
    corpus, contestants = load_corpus(), gpt_contestants(b2)
    for seed, name in itertools.product(seeds, names):
        tx = optax.chain(optax.clip_by_global_norm(1.0), contestants[name])
        yield GPTRun(name, seed, *_train(tx, seed, steps, config, corpus))


def _train(tx: Any, seed: int, steps: int, config: GPTConfig, corpus: Corpus) -> tuple[float, float]:
    """The validation loss, and the bytes of the optimizer's state per parameter."""
    model = jmp.with_policy(GPT(config), "params=float32,compute=bfloat16,output=float32")
    sizes = {"batch_size": BATCH, "context": config.context}

    @jax.jit
    def loss_fn(params: Any, windows: jax.typing.ArrayLike) -> jax.Array:
        inputs, targets = split_windows(windows)
        return cross_entropy(model.apply({"params": params}, inputs), targets)

    def step(carry: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    run = jax.jit(lambda carry, windows: jax.lax.scan(step, carry, windows), donate_argnums=0)
    params = model.init(jax.random.key(seed), jnp.zeros((1, config.context), jnp.int32))["params"]
    carry = params, tx.init(params)
    state = count_bytes(carry[1]) / count_parameters(params)
    for start in range(0, steps, STEPS_OF_A_CALL):
        numbers = range(start, min(start + STEPS_OF_A_CALL, steps))
        windows = [sample_batch(corpus.train, seed=seed, step=number, **sizes) for number in numbers]
        carry, _ = run(carry, np.stack(windows))
    return measure_bits_per_byte(loss_fn, carry[0], validation_batches(corpus.validation, count=64, **sizes)), state


def _schedule(step: jax.typing.ArrayLike) -> jax.Array:
    """The example's: a warm-up, and from there the square root of the step."""
    progress = (jnp.asarray(step, jnp.float32) + 1) / WARMUP
    return 5e-3 * jnp.minimum(progress, progress**-0.5)
