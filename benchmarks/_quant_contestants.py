"""The example's GPT with its dense layers quantized, by jmp_policy and by qwix: to serve, and to train."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import jmp_policy as jmp
from benchmarks._loss import cross_entropy
from benchmarks._programs import Program
from examples.gpt.gpt_linen import GPT
from examples.gpt.model import GPTConfig
from jmp_policy import quant

LAYERS = r"blocks_\d+/(attention/(qkv|project)|expand|contract)"
"""The dense layers. The table is left out: qwix fails on one that is both looked up and attended to."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A way to quantize, by a policy of jmp_policy and by the options of a rule of qwix."""

    name: str
    policy: str
    rule: dict[str, Any]

    @property
    def map(self) -> jmp.PolicyMap:
        """The policy for `LAYERS`, and float32 for all others."""
        return jmp.PolicyMap({LAYERS: self.policy}, default="float32")


SCHEMES = (
    Scheme("int8", "int8_from_float32", {"weight_qtype": "int8", "act_qtype": "int8"}),
    Scheme("int8 weights", "int8(activations=false)_from_float32", {"weight_qtype": "int8"}),
    Scheme("int4/64 weights", "int4/64_from_float32", {"weight_qtype": "int4", "tile_size": 64}),
)


@dataclasses.dataclass(frozen=True)
class Served:
    """A model whose weights are quantized before it runs.

    Attributes:
      apply: `(quantized params, tokens) -> logits`.
      quantize: `params -> quantized params`.
    """

    apply: Callable[[Any, Any], jax.Array]
    quantize: Callable[[Any], Any]

    def program(self, params: Any, tokens: Any) -> Program:
        """The jitted forward pass, without what quantizes."""
        return Program(jax.jit(self.apply), (jax.eval_shape(self.quantize, params), tokens))

    def logits(self, params: Any, tokens: Any) -> jax.Array:
        """Returns its logits for tokens."""
        return jax.jit(lambda params: self.apply(self.quantize(params), tokens))(params)

    def nbytes(self, params: Any) -> int:
        """The bytes of all of its parameters."""
        leaves = jax.tree.leaves(jax.eval_shape(self.quantize, params))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def in_float32(config: GPTConfig) -> Served:
    """The trained model."""
    return Served(_apply(GPT(config)), lambda params: params)


def ours(config: GPTConfig, policy: Any) -> Served:
    """The model quantized by jmp_policy."""
    quantize = functools.partial(quant.quantize, policy=policy)
    return Served(_apply(jmp.with_policy(GPT(config), policy)), quantize)


def with_qwix(config: GPTConfig, rule: dict[str, Any]) -> Served:
    """The model quantized by qwix."""
    import qwix

    rules = [qwix.QuantizationRule(module_path=LAYERS, **rule)]
    model = qwix.quantize_model(GPT(config), qwix.PtqProvider(rules))
    tokens = jnp.zeros((1, config.context), jnp.int32)
    abstract = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    return Served(_apply(model), lambda params: qwix.quantize_params(params, abstract))


def our_training(params: Any, batch: Any, config: GPTConfig, scheme: Scheme) -> Program:
    """Loss and gradients of quantization-aware training with jmp_policy."""
    return _training(jmp.with_policy(GPT(config), scheme.map), params, batch)


def training_with_qwix(params: Any, batch: Any, config: GPTConfig, scheme: Scheme, as_rounded: bool) -> Program:
    """The same with qwix, whose derivative is by default taken at the operands before rounding.

    `as_rounded` takes it at the rounded operands, as we do.
    """
    import qwix

    options = {"additional_qt_config": {"use_original_residuals": False}} if as_rounded else {}
    provider = qwix.QtProvider([qwix.QtRule(module_path=LAYERS, **scheme.rule, **options)])
    return _training(qwix.quantize_model(GPT(config), provider), params, batch)


def gpt_params(config: GPTConfig) -> Any:
    """Parameters that were never trained."""
    tokens = jnp.zeros((1, config.context), jnp.int32)
    return jax.jit(GPT(config).init)(jax.random.key(0), tokens)["params"]


def random_batch(config: GPTConfig, batch: int = 16) -> tuple[jax.Array, jax.Array]:
    """Bytes, and those that follow them."""
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (batch, config.context + 1))
    return jnp.asarray(tokens[:, :-1], jnp.int32), jnp.asarray(tokens[:, 1:], jnp.int32)


def _apply(model: linen.Module) -> Callable[[Any, Any], Any]:
    return lambda params, tokens: model.apply({"params": params}, tokens)


def _training(model: linen.Module, params: Any, batch: Any) -> Program:
    apply = _apply(model)
    loss_fn = lambda params, batch: cross_entropy(apply(params, batch[0]), batch[1])
    return Program(jax.jit(jax.value_and_grad(loss_fn)), (params, batch))
