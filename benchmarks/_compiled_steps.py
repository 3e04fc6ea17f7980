"""The train steps of the tables of `benchmarks.compiled`: policies, autocast, an optimizer's check and its state."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmp
from benchmarks import autocast as _autocast
from benchmarks._compiled import count_parameters
from benchmarks._loss import cross_entropy
from benchmarks._optimizer_steps import Steps, bfloat16_steps, float16_steps
from benchmarks._optimizer_updates import ADAMW, half_optimizers
from benchmarks._programs import APIS, MODELS, POLICIES, Case, Program, by_hand, ours, unchecked
from benchmarks.architectures._programs import by_hand as architecture_by_hand
from benchmarks.small_state import describe_params, small_state_optimizers, update_program
from examples.gpt.gpt_linen import GPT
from examples.gpt.model import GPTConfig

PARAMETERS = 10**8
"""Of fewer, what a TPU keeps in its fast memory decides more than the program."""

HALF_POLICY = "params=bfloat16,compute=bfloat16,output=float32"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A program to compile.

    Attributes:
      name: its own; a program that several rows have is compiled once.
      make: makes it. Raises ImportError where a library is not installed.
    """

    name: str
    make: Callable[[], Program]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
      labels: its first cells.
      program: whose figures it has.
      over: whose figures they are over, or, with a unit, whose bytes are taken from them.
      unit: the bytes that the figures are multiples of; `None` for ratios.
    """

    labels: tuple[str, ...]
    program: Entry
    over: Entry | None = None
    unit: float | None = None


def zero_cost(models: tuple[str, ...] = MODELS) -> Iterator[Row]:
    """The cases of `benchmarks.zero_cost`, over the step by hand and over the same without any check."""
    for names in itertools.product(models, APIS, POLICIES):
        case, name = Case(*names), ", ".join(names)
        mine = Entry(f"{name}: ours", functools.partial(ours, case))
        others = {"by hand": by_hand, "by hand, no check": unchecked}
        for other, make in others.items():
            yield Row((*names, other), mine, Entry(f"{name}: {other}", functools.partial(make, case)))


def autocast() -> Iterator[Row]:
    """Models in float32 with a decorator on their loss, over the same models with dtypes by hand."""
    wide = GPTConfig(width=256, depth=2, heads=4, context=256)  # the other fits into the fast memory of a TPU
    configs = {"GPT": GPTConfig(), "GPT of width 256": wide}
    for (name, config), half in itertools.product(configs.items(), _autocast.HALVES):
        model = _autocast.gpt(config)
        mine = Entry(f"{name}, {half}: autocast", functools.partial(_autocast.step, model, _autocast.POLICIES[half]))
        hand = functools.partial(architecture_by_hand, model, jmp.get_policy(f"mixed_{half}"))
        yield Row((name, half), mine, Entry(f"{name}, {half}: by hand", hand))


def optimizer(size: int = PARAMETERS) -> Iterator[Row]:
    """A whole step, over float32 parameters, with each way to check it."""
    for policy, steps in {"mixed_float16": float16_steps(), "mixed_bfloat16": bfloat16_steps()}.items():
        made = Steps(size, policy)
        half = policy.removeprefix("mixed_")
        entries = [Entry(f"{half}: {name}", functools.partial(make, made)) for name, make in steps.items()]
        for name, entry in zip(steps, entries, strict=True):
            over = None if entry is entries[0] else entries[0]  # the first is without a check
            yield Row((half, name), entry, over, unit=4 * count_parameters(made.params))


def checks(size: int = PARAMETERS, gpt: GPTConfig | None = None) -> Iterator[Row]:
    """A whole step by `optim.minimize` in float16 that also checks its updates or skips spikes, over one without."""
    scale, made = jmp.DynamicLossScale(), Steps(size)
    of_gpt = functools.partial(minimized_gpt, gpt or GPTConfig(width=768, depth=12, heads=12, context=256))
    plain = jmp.optim.loss_scaled(ADAMW, scale)
    others = {
        "check='updates'": jmp.optim.loss_scaled(ADAMW, scale, check="updates"),
        "skip_spikes": jmp.optim.loss_scaled(jmp.optim.skip_spikes(ADAMW), scale),
        "skip_spikes(of='loss')": jmp.optim.loss_scaled(jmp.optim.skip_spikes(ADAMW, of="loss"), scale),
        "clip_by_global_norm": jmp.optim.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), ADAMW), scale),
    }
    for model, make in {"MLP": made.minimized, "GPT": of_gpt}.items():
        over = Entry(f"checks, {model}: gradients", functools.partial(make, plain))
        for name, tx in others.items():
            yield Row((model, name), Entry(f"checks, {model}: {name}", functools.partial(make, tx)), over)


def half_optimizer(size: int = PARAMETERS) -> Iterator[Row]:
    """A whole step by `optim.minimize`, over bfloat16 parameters, with and without a check."""
    made = Steps(size, HALF_POLICY)
    for name, tx in half_optimizers().items():
        skipping = jmp.optim.skip_nonfinite(tx)
        plain = Entry(f"half: {name}", functools.partial(made.minimized, tx))
        checked = Entry(f"half: {name}, skip_nonfinite", functools.partial(made.minimized, skipping))
        unit = 4 * count_parameters(made.params)
        yield Row((name,), plain, unit=unit)
        yield Row((f"{name}, skip_nonfinite",), checked, plain, unit=unit)


def small_state(given: tuple[int, int] = (4096, 6), whole: int = 6 * 4096**2) -> Iterator[Row]:
    """AdamW with moments of fewer and fewer bits: an update, and a whole step by `optim.minimize`.

    XLA counts the bytes of a loop for one iteration. So its bytes of `quantize_state`, which splits its parameters into
    pieces, are meaningless. Temporaries and peak are of the whole program.

    Args:
      given: width and depth of the updated model.
      whole: about how many parameters a whole step has.
    """
    params = describe_params(*given)
    for name, tx in small_state_optimizers().items():
        entry = Entry(f"small state, update: {name}", functools.partial(update_program, tx, params))
        yield Row(("update", name), entry, unit=count_parameters(params))
    made = Steps(whole, "mixed_bfloat16")
    for name, tx in small_state_optimizers().items():
        entry = Entry(f"small state, whole step: {name}", functools.partial(made.minimized, tx))
        yield Row(("whole step", name), entry, unit=count_parameters(made.params))


def minimized_gpt(config: GPTConfig, tx: optax.GradientTransformation, batch: int = 4) -> Program:
    """A step of the example's GPT in float16 by `optim.minimize`, on shapes."""
    model = jmp.with_policy(GPT(config), "mixed_float16")
    tokens = jax.ShapeDtypeStruct((batch, config.context + 1), jnp.int32)
    inputs = jnp.zeros((batch, config.context), jnp.int32)
    params = jax.eval_shape(lambda key: model.init(key, inputs)["params"], jax.random.key(0))
    loss_fn = lambda params, x: cross_entropy(model.apply({"params": params}, x[:, :-1]), x[:, 1:])
    step = jax.jit(jmp.optim.minimize(loss_fn, tx), donate_argnums=(0, 1))
    return Program(step, (params, jax.eval_shape(tx.init, params), tokens))
