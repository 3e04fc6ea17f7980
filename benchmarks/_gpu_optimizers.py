"""Whole training steps of an MLP that is all parameters, with each way to update them, on real arrays."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmp
from benchmarks._gpu_models import Work
from benchmarks._optimizer_steps import BATCH, Step, Steps
from benchmarks._optimizer_updates import ADAMW, half_optimizers, update_and_apply
from benchmarks._programs import Program

SIZE = 10**8
TINY_SIZE = 10**4


class RealSteps(Steps):
    """The steps of `Steps`, whose arguments can be made.

    Attributes:
      make: `() -> (state, batch)` of the last program.
    """

    make: Callable[[], tuple[Any, Any]]

    def _program(self, step: Step, create: Callable[[Any], Any]) -> Program:
        program = super()._program(step, create)
        inputs, labels = program.args[1]

        def make() -> tuple[Any, Any]:
            leaves, tree = jax.tree.flatten(self.params)
            keys = jax.random.split(jax.random.key(0), len(leaves) + 1)
            params = [_random(*pair) for pair in zip(keys[1:], leaves, strict=True)]
            batch = jax.random.normal(keys[0], inputs.shape, inputs.dtype), jnp.arange(BATCH, dtype=labels.dtype)
            return create(tree.unflatten(params)), batch

        self.make = make
        return program


def _random(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Factors that keep the size of the numbers that they multiply: without them each step would overflow."""
    return (jax.random.normal(key, leaf.shape) / math.sqrt(leaf.shape[-1])).astype(leaf.dtype)


def optimizer_step(name: str, tiny: bool) -> Work:
    """The step of a contestant."""
    policy, program = contestants()[name]
    steps = RealSteps(TINY_SIZE if tiny else SIZE, policy)
    return Work(program(steps).step, steps.make, BATCH)


def contestants() -> dict[str, tuple[str, Callable[[Steps], Program]]]:
    """Policies and programs, by name."""
    scaled = jmp.optim.loss_scaled(ADAMW, jmp.DynamicLossScale(2.0**15))
    if_finite = optax.apply_if_finite(ADAMW, max_consecutive_errors=5)
    float16: dict[str, Callable[[Steps], Program]] = {
        "no check": Steps.unscaled,
        "`optim.step`": lambda steps: steps.ours(scaled, jmp.optim.step),
        "`optim.minimize`": lambda steps: steps.minimized(scaled),
        "update + apply_updates": lambda steps: steps.ours(scaled, update_and_apply),
        "jmp": Steps.with_jmp,
        "flax DynamicScale": Steps.with_dynamic_scale,
        "mixed-precision-for-jax": Steps.with_mpx,
        "optax.apply_if_finite, no scale": lambda steps: steps.unscaled(if_finite),
    }
    half: dict[str, Callable[[Steps], Program]] = {}
    for name, tx in half_optimizers().items():
        skipping = jmp.optim.skip_nonfinite(tx)
        half[name] = lambda steps, tx=tx: steps.minimized(tx)
        half[f"{name}, skip_nonfinite"] = lambda steps, tx=skipping: steps.minimized(tx)
    return {name: ("mixed_float16", program) for name, program in float16.items()} | {
        name: ("bfloat16", program) for name, program in half.items()
    }
