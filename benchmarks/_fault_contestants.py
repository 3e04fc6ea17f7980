"""Who is tried with faults: a train state, a jitted step, and what of the state a skipped step may change."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp as deepmind_jmp
import optax
from flax import linen as nn
from flax.training.dynamic_scale import DynamicScale

import jmp_policy as jmp
from benchmarks import _peers
from benchmarks._faults import with_faults
from benchmarks._ours import LinenState, step_linen

SCALE, PERIOD = 2.0**10, 50
TX = optax.adamw(optax.cosine_decay_schedule(1e-2, 2000))
FEATURES, HIDDEN, CLASSES = 64, 80, 4  # a kernel of 5,120 numbers: compilers reduce small arrays in another way


class Net(nn.Module):
    """Two dense layers with BatchNorm between them; `dtype` is for those who write it by hand."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.dtype is None else x.astype(self.dtype)
        x = nn.Dense(HIDDEN, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(nn.relu(x))


def parts_with_optax(state: Any) -> dict[str, Any]:
    """Returns the counted parts of the state of a loop whose optimizer is optax's."""

    def named(*names: str) -> list[Any]:
        found = [optax.tree_utils.tree_get_all_with_path(state.opt_state, name) for name in names]
        return [value for values in found for _, value in values]

    return {
        "parameters": state.params,
        "moments": named("mu", "nu"),
        "schedule counts": named("count"),
        "batch statistics": state.variables,
        "step counter": state.step,
    }


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A library in use.

    Attributes:
      name: what to call it.
      state: the state before the first step, with `params`; and `opt_state`, `variables` and `step` if it is optax's.
      step: `(state, ((x, faults), labels)) -> (state, loss)`.
      scale_of: `(before, after) -> state`, the one before the step with the loss scale of the one after it.
      parts: what of a state is counted, by what tables call it.
    """

    name: str
    state: Any
    step: Callable[..., Any]
    scale_of: Callable[[Any, Any], Any]
    parts: Callable[[Any], dict[str, Any]] = parts_with_optax


@functools.cache  # with their compiled steps
def contestants() -> tuple[Contestant, ...]:
    """All that are installed; `mixed-precision-for-jax` may not be."""
    variables = dict(Net().init(jax.random.key(0), jnp.ones((1, FEATURES))))
    params = variables.pop("params")
    made = [_ours(params, variables), _jmp(params, variables), _dynamic_scale(params, variables)]
    try:
        made.append(_mpx(params, variables))
    except ImportError:
        print("mixed-precision-for-jax is not installed: left out")
    return (*made, _apply_if_finite(params, variables))


def _ours(params: Any, variables: Any) -> Contestant:
    model = jmp.with_policy(Net(), "mixed_float16")

    def apply(collections, x_and_faults, mutable):
        x, faults = x_and_faults
        collections = {**collections, "params": with_faults(collections["params"], faults)}
        return model.apply(collections, x, mutable=mutable)

    tx = jmp.optim.loss_scaled(TX, jmp.DynamicLossScale(SCALE, period=PERIOD))
    state = LinenState.create(apply_fn=apply, params=params, tx=tx, variables=variables)

    def scale_of(before, after):
        opt_state = after.opt_state._replace(inner_state=before.opt_state.inner_state)
        return before.replace(opt_state=opt_state)

    return Contestant("jmp_policy", state, jax.jit(step_linen), scale_of)


def _jmp(params: Any, variables: Any) -> Contestant:
    policy = deepmind_jmp.Policy(jnp.float32, jnp.float16, jnp.float16)
    step = _peers.step_with_jmp(apply_of(Net()), TX, policy, PERIOD)
    state = _peers.init_jmp(params, variables, TX, scaled=True, scale=SCALE)
    return Contestant("jmp", state, jax.jit(step), lambda before, after: before._replace(scale=after.scale))


def _dynamic_scale(params: Any, variables: Any) -> Contestant:
    scale = DynamicScale(growth_interval=PERIOD, scale=jnp.float32(SCALE), fin_steps=jnp.int32(0))
    state = _peers.FlaxState.create(apply_fn=None, params=params, tx=TX, variables=variables, dynamic_scale=scale)
    step = jax.jit(_peers.step_with_dynamic_scale(apply_of(Net(jnp.float16))))
    scale_of = lambda before, after: before.replace(dynamic_scale=after.dynamic_scale)
    return Contestant("flax DynamicScale", state, step, scale_of)


def _mpx(params: Any, variables: Any) -> Contestant:
    step = _peers.step_with_mpx(apply_of(Net(jnp.float16)), TX)
    state = _peers.init_mpx(params, variables, TX, SCALE, PERIOD)
    scale_of = lambda before, after: before._replace(scale=after.scale)
    return Contestant("mixed-precision-for-jax", state, jax.jit(step), scale_of)


def _apply_if_finite(params: Any, variables: Any) -> Contestant:
    """Without a loss scale. It must be told how many errors in a row to reject before it accepts one: five here."""
    tx = optax.apply_if_finite(TX, max_consecutive_errors=5)
    state = _peers.PlainState.create(apply_fn=None, params=params, tx=tx, variables=variables)
    step = _peers.step_unscaled(apply_of(Net(jnp.float16)))

    def scale_of(before, after):
        return before.replace(opt_state=after.opt_state._replace(inner_state=before.opt_state.inner_state))

    return Contestant("optax.apply_if_finite", state, jax.jit(step), scale_of)


def apply_of(model: nn.Module) -> Callable[..., Any]:
    """`(params, variables, (x, faults)) -> (logits, variables)` of a module; the gradients of it have the faults."""

    def apply(params, variables, x_and_faults):
        x, faults = x_and_faults
        collections = {"params": with_faults(params, faults), **variables}
        return model.apply(collections, x, mutable=list(variables))

    return apply
