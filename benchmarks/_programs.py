"""The programs that are compared: each contestant's jitted train step of a model, with arguments to call it on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import jmp_policy as jmp
from benchmarks import _models_linen, _models_nnx, _peers
from benchmarks._by_hand import init_by_hand, step_by_hand, step_by_hand_nnx
from benchmarks._loss import cross_entropy_of
from benchmarks._ours import init_linen, step_linen, step_nnx
from examples.gpt import gpt_linen, gpt_nnx
from examples.gpt.model import GPTConfig

MODELS = ("mlp", "resnet block", "gpt")
APIS = ("linen", "nnx")
POLICIES = ("mixed_bfloat16", "mixed_float16")
TX = optax.adamw(1e-3)
FEATURES, CHANNELS = 128, 16


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted train step and its arguments.

    Attributes:
      step: `jax.jit` or `nnx.jit` of a train step; the state is donated.
      args: what to call it on, or to lower it for.
    """

    step: Any
    args: tuple[Any, ...]

    def lower(self) -> Any:
        """Traces and lowers the step."""
        return self.step.lower(*self.args)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model in functional form: `apply(params, variables, x) -> (logits, variables)`."""

    module: Any
    apply: Callable[..., Any]
    params: Any
    variables: Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A benchmarked program: a model of `MODELS`, a Flax API of `APIS`, a policy of `POLICIES`, and a size.

    Attributes:
      model: the name of the model.
      api: the name of the API.
      policy: the name of the policy.
      gpt: the size of the GPT.
    """

    model: str
    api: str
    policy: str
    gpt: GPTConfig = dataclasses.field(default_factory=GPTConfig)

    @property
    def dtype(self) -> Any:
        """The compute dtype."""
        return jmp.get_policy(self.policy).compute_dtype

    @property
    def scaled(self) -> bool:
        """True if the loss is scaled."""
        return self.dtype == jnp.float16

    def batch(self) -> tuple[jax.Array, jax.Array]:
        """Inputs and labels."""
        rng = np.random.default_rng(0)
        if self.model == "gpt":
            tokens = rng.integers(0, 256, (4, self.gpt.context + 1))
            return jnp.asarray(tokens[:, :-1], jnp.int32), jnp.asarray(tokens[:, 1:], jnp.int32)
        shape = (32, FEATURES) if self.model == "mlp" else (8, 16, 16, CHANNELS)
        return jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.asarray(rng.integers(0, 16, shape[0]), jnp.int32)

    def functional(self, dtype: Any) -> Model:
        """The model with its dtypes by hand, or with none (`None`)."""
        module = self.module(dtype)
        return _functional_linen(module, self.batch()[0]) if self.api == "linen" else _functional_nnx(module)

    def module(self, dtype: Any) -> Any:
        """The module with its dtypes by hand, or with none (`None`)."""
        models = _models_linen if self.api == "linen" else _models_nnx
        rngs = {} if self.api == "linen" else {"rngs": nnx.Rngs(0)}
        if self.model == "gpt":
            if dtype is not None:
                return models.HandGPT(self.gpt, dtype, **rngs)
            return (gpt_linen.GPT if self.api == "linen" else gpt_nnx.GPT)(self.gpt, **rngs)
        made = models.MLP if self.model == "mlp" else models.ResNetBlock
        if self.api == "linen":
            return made(dtype)
        return made(FEATURES if self.model == "mlp" else CHANNELS, dtype, **rngs)


def by_hand(case: Case) -> Program:
    """The step of an expert."""
    if case.api == "nnx":
        module = case.module(case.dtype)
        state = init_by_hand(nnx.as_pure(nnx.state(module, nnx.Param)), None, TX)._replace(params=None)
        step = nnx.jit(step_by_hand_nnx(TX, case.scaled), donate_argnums=(0, 1))
        return Program(step, (module, state, case.batch()))
    model = case.functional(case.dtype)
    step = jax.jit(step_by_hand(cross_entropy_of(model.apply), TX, case.scaled), donate_argnums=0)
    return Program(step, (init_by_hand(model.params, model.variables, TX), case.batch()))


def unchecked(case: Case) -> Program:
    """The step of an expert who neither scales the loss nor asks whether gradients are finite."""
    model = case.functional(case.dtype)
    state = _peers.init_plain(model.params, model.variables, TX)
    return Program(jax.jit(_peers.step_unscaled(model.apply), donate_argnums=0), (state, case.batch()))


def ours(case: Case) -> Program:
    """The step with jmp_policy."""
    policy = jmp.get_policy(case.policy)
    if case.api == "linen":
        plain = case.functional(None)
        state = init_linen(
            jmp.with_policy(plain.module, policy), plain.params, plain.variables, TX, policy.loss_scale()
        )
        return Program(jax.jit(step_linen, donate_argnums=0), (state, case.batch()))
    model = jmp.with_policy(case.module(None), policy)
    optimizer = jmp.nnx.Optimizer(model, jmp.optim.loss_scaled(TX, policy.loss_scale()), wrt=nnx.Param)
    return Program(nnx.jit(step_nnx, donate_argnums=(0, 1)), (model, optimizer, case.batch()))


def _functional_linen(module: linen.Module, x: jax.Array) -> Model:
    variables = dict(jax.jit(module.init)(jax.random.key(0), x))
    params = variables.pop("params")

    def apply(params, variables, x):
        return module.apply({"params": params, **variables}, x, mutable=list(variables))

    return Model(module, apply, params, variables)


def _functional_nnx(module: nnx.Module) -> Model:
    graphdef, params, variables = nnx.split(module, nnx.Param, ...)

    def apply(params, variables, x):
        model = nnx.merge(graphdef, params, variables, copy=True)
        logits = model(x)
        return logits, nnx.state(model, nnx.Not(nnx.Param))

    return Model(module, apply, params, variables)
