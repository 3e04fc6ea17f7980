"""Training steps of a model of GPT-2 small's shape and of ResNet-50, in each precision."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training import train_state

import jmp_policy as jmp
from benchmarks._loss import cross_entropy
from benchmarks._models_linen import HandGPT
from benchmarks._ours import LinenState
from benchmarks.architectures._resnet import ResNet
from examples.gpt.gpt_linen import GPT
from examples.gpt.model import GPTConfig

ADAMW = optax.adamw(1e-4)
SCALE = 2.0**15

GPT2_SMALL = GPTConfig(width=768, depth=12, heads=12, context=1024, vocabulary=50304)
"""GPT-2's vocabulary of 50257 padded to a multiple of 128, as those who train it on GPUs do."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A measured program: a jitted function that is called again and again.

    Attributes:
      step: `(state, *data) -> (state, out)`; the state is donated.
      make: `() -> (state, *data)`, which can be traced. A function without a state has `None`.
      items: the unit of one call: tokens or images.
      flops: of one call, where they are known.
    """

    step: Callable[..., tuple[Any, jax.Array]]
    make: Callable[[], tuple[Any, ...]]
    items: int = 0
    flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and a batch.

    Attributes:
      by_hand: the module with a dtype in each layer.
      free: the module as an author leaves it to a policy.
      batch: `() -> (inputs, labels)`, which can be traced.
      items: the tokens or images of the batch.
    """

    by_hand: Callable[[Any], linen.Module]
    free: linen.Module
    batch: Callable[[], tuple[jax.Array, jax.Array]]
    items: int


@dataclasses.dataclass(frozen=True)
class Precision:
    """Settings of a training: dtypes by hand, or a policy, or a policy by autocast.

    Attributes:
      dtype: in each layer, by hand.
      policy: of the module.
      autocast: the dtype that the loss is cast to.
      matmul: the precision of matrix products of float32.
      scale: of the loss: "", "ours" or "DynamicScale", which is Flax's.
      skips: whether a step that is not finite is skipped, where no loss is scaled.
    """

    dtype: str = "float32"
    policy: str = ""
    autocast: str = ""
    matmul: str | None = None
    scale: str = ""
    skips: bool = False


PRECISIONS = {
    "bfloat16 by hand": Precision("bfloat16"),
    "float32": Precision(matmul="highest"),
    "TF32": Precision(matmul="tensorfloat32"),
    "bfloat16, `with_policy`": Precision(policy="mixed_bfloat16"),
    "bfloat16, `with_policy`, `skip_nonfinite`": Precision(policy="mixed_bfloat16", skips=True),
    "bfloat16, `autocast`": Precision(autocast="bfloat16"),
    "float16, `with_policy`, dynamic scale": Precision(policy="mixed_float16", scale="ours"),
    "float16 by hand, Flax's DynamicScale": Precision("float16", scale="DynamicScale"),
    "float8, `with_policy`, delayed": Precision(policy="float8_from_mixed_bfloat16"),
    "float8, `with_policy`, current": Precision(policy="float8(recipe=current)_from_mixed_bfloat16"),
    "int8, `with_policy`": Precision(policy="int8_from_mixed_bfloat16"),
}
"""By name. The first is the one that the others are compared with; none but those of two rows checks for nans."""


def gpt2(tiny: bool) -> Task:
    """A model of GPT-2 small's shape on 8 windows of 1024 tokens."""
    config, windows = (GPTConfig(32, 1, 2, 16, 64), 2) if tiny else (GPT2_SMALL, 8)

    def batch() -> tuple[jax.Array, jax.Array]:
        tokens = jax.random.randint(jax.random.key(1), (windows, config.context + 1), 0, config.vocabulary)
        return tokens[:, :-1], tokens[:, 1:]

    return Task(lambda dtype: HandGPT(config, dtype), GPT(config), batch, windows * config.context)


def resnet50(tiny: bool) -> Task:
    """ResNet-50 on 128 images of 224 by 224."""
    stages, filters, side, images = ((1, 1), 8, 16, 2) if tiny else ((3, 4, 6, 3), 64, 224, 128)
    classes = 16 if tiny else 1000

    def batch() -> tuple[jax.Array, jax.Array]:
        x, labels = jax.random.split(jax.random.key(1))
        return jax.random.normal(x, (images, side, side, 3)), jax.random.randint(labels, (images,), 0, classes)

    by_hand = lambda dtype: ResNet(stages, classes, filters, dtype)
    return Task(by_hand, ResNet(stages, classes, filters), batch, images)


def training(task: Task, precision: Precision) -> Work:
    """The training step of a task in a precision."""
    work = _ours(task, precision) if precision.policy or precision.autocast else _by_hand(task, precision)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        with jax.default_matmul_precision(precision.matmul):
            return work.step(state, batch)

    return dataclasses.replace(work, step=jax.jit(step, donate_argnums=0))


def observing(task: Task, precision: Precision, every: int | None) -> Work:
    """Returns the training step of a task that measures each matmul, on every step or on some of them."""
    work = training(task, precision)
    measure = functools.partial(jmp.numerics.collect, of=("forward", "backward"))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        if every is None:
            (state, loss), stats = measure(work.step)(state, batch)
        else:
            (state, loss), stats = measure(work.step, every=every)(state.step, state, batch)
        return state, (loss, stats)

    return dataclasses.replace(work, step=jax.jit(step, donate_argnums=0))


class PlainState(train_state.TrainState):
    """A train state of Flax with the variables that are not trained."""

    variables: Any


def _by_hand(task: Task, precision: Precision) -> Work:
    module = task.by_hand(jnp.dtype(precision.dtype))
    loss_fn = _loss_of(module)
    if precision.scale:
        return _dynamic_scale(task, module)

    def make() -> tuple[PlainState, Any]:
        batch = task.batch()
        trained, variables = _init(module, batch)
        return PlainState.create(apply_fn=None, params=trained, tx=ADAMW, variables=variables), batch

    def step(state: PlainState, batch: Any) -> tuple[PlainState, jax.Array]:
        (loss, variables), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, state.variables, batch)
        return state.apply_gradients(grads=grads, variables=variables), loss

    return Work(step, make, task.items)


def _dynamic_scale(task: Task, module: linen.Module) -> Work:
    from flax.training.dynamic_scale import DynamicScale

    from benchmarks._peers import FlaxState, step_with_dynamic_scale  # which needs DeepMind's jmp

    def make() -> tuple[FlaxState, Any]:
        batch = task.batch()
        trained, variables = _init(module, batch)
        scale = DynamicScale(scale=jnp.float32(SCALE), fin_steps=jnp.int32(0))
        state = FlaxState.create(apply_fn=None, params=trained, tx=ADAMW, variables=variables, dynamic_scale=scale)
        return state, batch

    apply = lambda trained, variables, x: module.apply({**trained, **variables}, x, mutable=list(variables))
    return Work(step_with_dynamic_scale(apply), make, task.items)


def _ours(task: Task, precision: Precision) -> Work:
    if precision.autocast:
        module = task.free
        loss_fn = jmp.autocast(_loss_of(module), jmp.Policy("float32", precision.autocast, None))
    else:
        module = jmp.with_policy(task.free, precision.policy)
        loss_fn = _loss_of(module)
    tx = ADAMW
    if precision.scale:
        tx = jmp.optim.loss_scaled(tx, jmp.DynamicLossScale(SCALE))
    elif precision.skips:
        tx = jmp.optim.skip_nonfinite(tx)

    def make() -> tuple[LinenState, Any]:
        batch = task.batch()
        trained, variables = _init(module, batch)
        return LinenState.create(apply_fn=None, params=trained, tx=tx, variables=variables), batch

    def step(state: LinenState, batch: Any) -> tuple[LinenState, jax.Array]:
        loss_scale = state if precision.scale else jmp.NoOpLossScale()
        grad_fn = jmp.value_and_grad(loss_fn, has_aux=True, loss_scale=loss_scale)
        (loss, variables), grads = grad_fn(state.params, state.variables, batch)
        return state.apply_gradients(grads=grads, variables=variables), loss

    return Work(step, make, task.items)


def _init(module: linen.Module, batch: tuple[jax.Array, jax.Array]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trained parameters, the state of float8 layers, and the statistics of batches."""
    trained = dict(module.init(jax.random.key(0), batch[0][:1]))
    variables = {name: trained.pop(name) for name in ("batch_stats",) if name in trained}
    return trained, variables


def _loss_of(module: linen.Module) -> Callable[..., Any]:
    def loss_fn(trained: Any, variables: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        x, labels = batch
        logits, updates = module.apply({**trained, **variables}, x, mutable=list(variables))
        return cross_entropy(logits, labels), dict(updates)

    return loss_fn
