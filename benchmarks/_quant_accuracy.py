"""The validation loss of the example's GPT, trained in float32 and quantized afterwards."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp_policy as jmp
from benchmarks._loss import cross_entropy
from benchmarks._quant_contestants import SCHEMES, Served, in_float32, ours, with_qwix
from examples.gpt.data import Corpus, load_corpus, sample_batch, validation_batches
from examples.gpt.gpt_linen import GPT
from examples.gpt.model import NATS_PER_BIT, GPTConfig, TrainerConfig, make_trainer
from jmp_policy import quant

BATCH = 16


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
      params: in float32.
      config: the sizes of the model.
      windows: uint8 `(batches, batch, context + 1)`, to validate on.
      calibration: the same of the training text, for `calibrated`.
    """

    params: Any
    config: GPTConfig
    windows: np.ndarray
    calibration: np.ndarray

    @functools.cached_property
    def loss(self) -> float:
        """Bits per byte."""
        return self.loss_of(in_float32(self.config))

    def loss_of(self, served: Served) -> float:
        """Bits per byte of the same model, quantized."""
        return float(jax.jit(functools.partial(_mean_loss, served))(self.params, self.windows))

    def calibrated(self, calibrate: Callable[..., Any], policy: str) -> Served:
        """Returns the model quantized by `contrib.gptq` or `contrib.awq`."""
        batches = list(jnp.asarray(self.calibration[..., :-1], jnp.int32))
        made = calibrate(jmp.with_policy(GPT(self.config), policy), batches, variables={"params": self.params})
        return dataclasses.replace(ours(self.config, policy), quantize=lambda _: made["params"])

    def rise(self, served: Served) -> float:
        """Returns the increase of the loss over float32, as a fraction of the float32 loss."""
        return self.loss_of(served) / self.loss - 1

    def divergence(self, served: Served, every: int = 8) -> float:
        """The Kullback-Leibler divergence of its predictions from those in float32, in nats: what rounding changes,
        also where it happens to lower the loss. It is a mean over one in `every` batches."""
        tokens = jnp.asarray(self.windows[::every, :, :-1], jnp.int32).reshape(-1, self.config.context)
        models = (in_float32(self.config), served)
        expected, got = (jax.nn.log_softmax(model.logits(self.params, tokens)) for model in models)
        return float(jnp.mean(jnp.sum(jnp.exp(expected) * (expected - got), axis=-1)))


def train(
    seed: int, steps: int, config: GPTConfig | None = None, batches: int = 64, corpus: Corpus | None = None
) -> Trained:
    """Trains as the example does: on the sources of Python's standard library, if on no other text."""
    config, corpus = config or GPTConfig(), corpus or load_corpus()
    sizes = {"batch_size": BATCH, "context": config.context}
    policy = jmp.get_policy("float32")
    assert isinstance(policy, jmp.Policy)
    trainer = make_trainer("linen", TrainerConfig(policy, config, seed))
    for step in range(steps):
        trainer.step(sample_batch(corpus.train, seed=seed, step=step, **sizes))
    calibration = [sample_batch(corpus.train, seed=seed, step=steps + n, **sizes) for n in range(8)]
    windows = validation_batches(corpus.validation, count=batches, **sizes)
    return Trained(trainer.params, config, windows, np.stack(calibration))


def contestants(config: GPTConfig) -> dict[tuple[str, str], Served]:
    """The ways to quantize it, by library and name."""
    served: dict[tuple[str, str], Served] = {}
    for policy in ("int8", "int8(activations=false)", "int4/128", "int4/32", "int4/128(table_bits=4)"):
        for clip in ("absmax", "mse"):
            served["jmp_policy", f"{policy}, {clip}"] = ours(config, f"{policy}_from_float32", clip)
    for scheme in SCHEMES:
        served["jmp_policy", f"{scheme.name}, dense layers"] = ours(config, scheme.map)
        served["qwix", f"{scheme.name}, dense layers"] = with_qwix(config, scheme.rule)
    return served


def quantized_bytes(served: Served, params: Any) -> float:
    """The bytes of the weights that are quantized by us, over those in float32."""
    is_weight = lambda leaf: isinstance(leaf, quant.QuantizedArray)
    quantized = jax.tree.leaves(jax.eval_shape(served.quantize, params), is_leaf=is_weight)
    pairs = [(new, old) for new, old in zip(quantized, jax.tree.leaves(params), strict=True) if is_weight(new)]
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return size([new for new, _ in pairs]) / size([old for _, old in pairs])


def _mean_loss(served: Served, params: Any, windows: jax.Array) -> jax.Array:
    quantized = served.quantize(params)

    def loss(batch: jax.Array) -> jax.Array:
        tokens = batch.astype(jnp.int32)
        return cross_entropy(served.apply(quantized, tokens[:, :-1]), tokens[:, 1:])

    return jax.lax.map(loss, windows).mean() / NATS_PER_BIT
