"""Who is tried with faults beside the libraries of `benchmarks.faults`: JAX by hand, Keras and PyTorch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._by_hand import init_by_hand, step_by_hand
from benchmarks._fault_contestants import (
    CLASSES,
    FEATURES,
    HIDDEN,
    PERIOD,
    SCALE,
    TX,
    Contestant,
    Net,
    apply_of,
    contestants,
)
from benchmarks._faults import Fault
from benchmarks._loss import cross_entropy_of
from benchmarks._peer_steps import BY_HAND, KERAS, OURS, TORCH
from benchmarks.faults import Count, corruption, make_batch as make_batch

LEARNING_RATE, DECAY_STEPS = 1e-2, 2000  # of TX

GOOD, BURST = 4, 8

FAULT = Fault(leaf=5, index=7, number=np.inf)  # in the kernel of the second dense layer


def plans() -> dict[str, list[Fault | None]]:
    """The faults: one, and eight in a row, as at the start of a float16 run; with finite steps around them."""
    good: list[Fault | None] = [None] * GOOD
    return {"one": [*good, FAULT, *good], f"{BURST} in a row": [*good, *[FAULT] * BURST, *good]}


OTHERS = "jmp", "flax DynamicScale", "mixed-precision-for-jax", "optax.apply_if_finite"


def everyone(quick: bool = False) -> dict[str, Contestant | None]:
    """All contestants; `None` for one that is not installed.

    Args:
      quick: whether to leave out `OTHERS`, which `benchmarks.faults` has.
    """
    installed = {contestant.name: contestant for contestant in contestants()}
    params = installed["jmp"].state.params
    made: dict[str, Contestant | None] = {BY_HAND: by_hand(params, installed["jmp"].state.variables)}
    for name in (OURS,) if quick else (OURS, *OTHERS):
        made[name] = installed.get(name)
    for name, make in {KERAS: keras, TORCH: torch}.items():
        try:
            made[name] = make(params)
        except ImportError:
            made[name] = None
    return made


def count(contestant: Contestant) -> dict[str, dict[str, Count]]:
    """Returns the values that each plan corrupts, part by part."""
    return {name: corruption(contestant, plan) for name, plan in plans().items()}


def by_hand(params: Any, variables: Any) -> Contestant:
    """By hand, with a `lax.cond`."""
    step = step_by_hand(cross_entropy_of(apply_of(Net(jnp.float16))), TX, scaled=True)
    state = init_by_hand(params, variables, TX)._replace(scale=jnp.float32(SCALE))
    kept = ("scale", "counter", "grads_finite", "skipped_steps", "consecutive_skips")
    scale_of = lambda before, after: before._replace(**{name: getattr(after, name) for name in kept})
    return Contestant(BY_HAND, state, jax.jit(step), scale_of)


def keras(params: Any) -> Contestant:
    """Keras 3 on JAX, by its `LossScaleOptimizer`. Raises ImportError without it."""
    from benchmarks import _peer_keras

    schedule = _peer_keras.keras.optimizers.schedules.CosineDecay(LEARNING_RATE, DECAY_STEPS)
    model = _peer_keras.net(FEATURES, HIDDEN, CLASSES, "mixed_float16")
    trainer = _peer_keras.trainer(model, SCALE, schedule, PERIOD)
    own = len(trainer.optimizer.variables) - len(trainer.optimizer.inner_optimizer.variables)

    def scale_of(before, after):  # of the wrapper's own variables one is the scale, one its counter
        return before._replace(opt_state=[*after.opt_state[:own], *before.opt_state[own:]])

    def parts(state):
        named = dict(zip((variable.path for variable in trainer.optimizer.variables), state.opt_state, strict=True))
        [iterations] = [
            value
            for variable, value in zip(trainer.optimizer.variables, state.opt_state, strict=True)
            if variable is trainer.optimizer.inner_optimizer.iterations
        ]
        moments = [value for path, value in named.items() if path.endswith(("momentum", "velocity"))]
        assert len(moments) == 2 * len(jax.tree.leaves(params))
        return {
            "parameters": state.params,
            "moments": moments,
            "schedule counts": iterations,
            "batch statistics": state.variables,
            "step counter": iterations,
        }

    return Contestant(KERAS, trainer.init(params), jax.jit(trainer.step), scale_of, parts)


def torch(params: Any) -> Contestant:
    """PyTorch AMP in float16 with a `GradScaler`. Raises ImportError without it."""
    from benchmarks import _peer_torch

    model = _peer_torch.net(FEATURES, HIDDEN, CLASSES)
    trainer = _peer_torch.Trainer(model, "float16", SCALE, PERIOD, LEARNING_RATE, DECAY_STEPS)

    def parts(state):
        of_parameters = state.opt_state["state"]
        return {
            "parameters": state.params,
            "moments": [held[name] for held in of_parameters.values() for name in ("exp_avg", "exp_avg_sq")],
            "schedule counts": [of_parameters[0]["step"], np.int32(state.schedule["last_epoch"])],
            "batch statistics": [value for value in state.variables.values() if value.dtype == np.float32],
            "step counter": state.step,
        }

    scale_of = lambda before, after: before._replace(scale=after.scale)
    return Contestant(TORCH, trainer.init(params), trainer.step, scale_of, parts)
