"""Costs of a policy and a loss scale as arguments of a jitted function: time in Python, before XLA runs."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmp

CALLS, REPEATS = 500, 60


def dispatch_microseconds() -> dict[str, float]:
    """Microseconds per call that an argument adds to a tuple of the same arrays, by the best of interleaved repeats."""
    return {name: _added(jnp.zeros(()), argument, plain) for name, (argument, plain) in arguments().items()}


def arguments() -> dict[str, tuple[Any, Any]]:
    """Returns the arguments of a jitted function, and a tuple of the same arrays, by name."""
    arrays = jnp.float32(2.0**15), jnp.int32(0)
    loss_scale = jmp.DynamicLossScale(*arrays)
    state = jmp.optim.loss_scaled(optax.identity(), loss_scale).init(None)
    plain_state = ((), arrays, state.grads_finite, state.skipped_steps, state.consecutive_skips)
    return {
        "Policy": (jmp.get_policy("mixed_float16"), ()),
        "DynamicLossScale": (loss_scale, arrays),
        "LossScaledState": (state, plain_state),
    }


def _added(x: jax.Array, argument: Any, plain: Any) -> float:
    step = jax.jit(lambda x, argument: x)
    calls: list[Callable[[], Any]] = [lambda: step(x, argument), lambda: step(x, plain)]
    for call in calls:
        call()
    taken = [[_seconds(call) for call in calls] for _ in range(REPEATS)]
    with_argument, without = (min(seconds) for seconds in zip(*taken, strict=True))  # what else runs only adds
    return (with_argument - without) / CALLS * 1e6


def _seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    for _ in range(CALLS):
        call()
    return time.process_time() - start
