"""The rows of the benchmark on a GPU: training steps of a model of GPT-2 small's shape, and ways to check an update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen

import jmp_policy as jmp
from benchmarks import _peers
from benchmarks._models_linen import HandGPT
from benchmarks._optimizer_steps import Steps, float16_steps
from benchmarks._ours import LinenState, step_linen
from benchmarks._peer_problems import MLP_BATCH
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
      make: `() -> (state, *data)`, which can be traced.
      items: the tokens or examples of one call.
    """

    step: Callable[..., tuple[Any, jax.Array]]
    make: Callable[[], tuple[Any, ...]]
    items: int


@dataclasses.dataclass(frozen=True)
class Task:
    """A module with a dtype in each layer, the same as an author leaves it to a policy, and a batch.

    `batch` is `() -> (inputs, labels)`, which can be traced; `items` are its tokens.
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


def training(task: Task, precision: Precision) -> Work:
    """The training step of a task in a precision."""
    is_ours = bool(precision.policy or precision.autocast)
    module = task.free if is_ours else task.by_hand(jnp.dtype(precision.dtype))
    if precision.policy:
        module = jmp.with_policy(module, precision.policy)
    apply = lambda trained, variables, x: module.apply({**trained, **variables}, x, mutable=list(variables))
    if precision.autocast:
        apply = jmp.autocast(apply, jmp.Policy("float32", precision.autocast, None))
    create, train_step = _loop(apply, precision, LinenState if is_ours else _peers.PlainState)

    def make() -> tuple[Any, Any]:
        batch = task.batch()
        trained = dict(module.init(jax.random.key(0), batch[0][:1]))  # parameters, and the state of float8 layers
        return create(params=trained, variables={}), batch

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        with jax.default_matmul_precision(precision.matmul):
            return train_step(state, batch)

    return Work(jax.jit(step, donate_argnums=0), make, task.items)


def _loop(apply: Callable[..., Any], precision: Precision, state_class: Any) -> tuple[Callable[..., Any], Any]:
    """What makes a train state of parameters and variables, and the step."""
    if precision.scale == "DynamicScale":
        create = functools.partial(_peers.init_dynamic_scale, tx=ADAMW, scale=SCALE)
        return create, _peers.step_with_dynamic_scale(apply)
    if precision.scale:
        tx = jmp.optim.loss_scaled(ADAMW, jmp.DynamicLossScale(SCALE))
        apply_fn = lambda held, x, mutable: apply(held["params"], {name: held[name] for name in mutable}, x)
        return functools.partial(state_class.create, apply_fn=apply_fn, tx=tx), step_linen
    tx = jmp.optim.skip_nonfinite(ADAMW) if precision.skips else ADAMW
    return functools.partial(state_class.create, apply_fn=None, tx=tx), _peers.step_unscaled(apply)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: its key in the file of results, its name in the table, and `load`, `(tiny) -> Work`."""

    key: str
    name: str
    load: Callable[[bool], Work]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows that are compared.

    Attributes:
      rows: the first is the one that the others are divided by.
      items: the unit of a step, in the plural; empty if it is not of interest.
    """

    title: str
    rows: tuple[Row, ...]
    items: str = ""


def tables() -> list[Table]:
    """All tables, the most wanted first."""
    gpt = {name: functools.partial(_train, name) for name in PRECISIONS}
    steps = {name: functools.partial(_update, name) for name in float16_steps()}
    optimizers = "Optimizers: AdamW, 100 M float32 parameters, compute in float16"
    return [
        Table("Training a model of GPT-2 small's shape, 8 windows of 1024 tokens", _rows("gpt2", gpt), "tokens"),
        Table(optimizers, _rows("mixed_float16", steps)),
    ]


def _rows(key: str, loads: dict[str, Callable[[bool], Work]]) -> tuple[Row, ...]:
    return tuple(Row(f"{key}/{name.replace('`', '')}", name, load) for name, load in loads.items())


def _train(name: str, tiny: bool) -> Work:
    return training(gpt2(tiny), PRECISIONS[name])


def _update(name: str, tiny: bool) -> Work:
    """A whole training step of an MLP that is all parameters, on real arrays."""
    size, make_step = 10**4 if tiny else 10**8, float16_steps()[name]
    make = lambda: make_step(Steps(size, real=True)).args  # traced, so that arrays are made on the device
    return Work(make_step(Steps(size)).step, make, MLP_BATCH)
