"""Who is tried with faults: a train state, a step, and what of the state a skipped step may change."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp as deepmind_jmp
import numpy as np
import optax
from flax import linen as nn

import jmp_policy as jmp
from benchmarks import _peers
from benchmarks._by_hand import init_by_hand, step_by_hand
from benchmarks._loss import cross_entropy_of
from benchmarks._ours import LinenState, step_linen
from benchmarks._peer_steps import BY_HAND, KERAS, OURS, TORCH

SCALE, PERIOD = 2.0**10, 50
LEARNING_RATE, DECAY_STEPS = 1e-2, 2000
TX = optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, DECAY_STEPS))
FEATURES, HIDDEN, CLASSES = 64, 80, 4  # a kernel of 5,120 numbers: compilers reduce small arrays in another way

BAD_NUMBERS = (np.inf, -np.inf, np.nan)
BURST = 8  # as at the start of a float16 run, whose first loss scale is too large


@dataclasses.dataclass(frozen=True)
class Fault:
    """A non-finite number in the gradient of one parameter.

    Attributes:
      leaf: the number of the array among the leaves of the parameters.
      index: the place in the flattened array.
      number: infinity of either sign, or nan.
    """

    leaf: int
    index: int
    number: float


def plan_faults(params: Any, steps: int, rate: float, seed: int) -> list[Fault | None]:
    """The fault of each step: none at most steps, and once a burst of faults in a row.

    >>> plan = plan_faults([jnp.ones(3), jnp.ones(2)], steps=100, rate=0.1, seed=0)
    >>> len(plan), sum(fault is not None for fault in plan)
    (100, 18)
    """
    rng = np.random.default_rng(seed)
    bad = rng.random(steps) < rate
    start = rng.integers(steps // 4, steps - BURST)
    bad[start : start + BURST] = True
    return [_random_fault(rng, jax.tree.leaves(params)) if is_bad else None for is_bad in bad]


def fault_tree(params: Any, fault: Fault | None) -> Any:
    """Returns an array to add to the gradients: zeros, and the number of the fault where it strikes."""
    leaves, treedef = jax.tree.flatten(params)
    added = [np.zeros(leaf.shape, np.float32) for leaf in leaves]
    if fault is not None:
        added[fault.leaf].flat[fault.index] = fault.number
    return jax.tree.unflatten(treedef, added)


@jax.custom_vjp
def with_faults(params: Any, faults: Any) -> Any:
    """The parameters, whose gradients have `faults` added: the loss is finite, and so are the batch statistics."""
    del faults
    return params


def _forward(params: Any, faults: Any) -> tuple[Any, Any]:
    return params, faults


def _backward(faults: Any, grads: Any) -> tuple[Any, Any]:
    faulty = jax.tree.map(lambda g, fault: g + fault.astype(g.dtype), grads, faults)
    return faulty, jax.tree.map(jnp.zeros_like, faults)


with_faults.defvjp(_forward, _backward)


def _random_fault(rng: np.random.Generator, leaves: list[Any]) -> Fault:
    leaf = int(rng.integers(len(leaves)))
    return Fault(leaf, int(rng.integers(leaves[leaf].size)), float(rng.choice(BAD_NUMBERS)))


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
      state: the state before the first step, with `params`; and `opt_state`, `variables` and `step` if it is optax's.
      step: `(state, ((x, faults), labels)) -> (state, loss)`.
      scale_of: `(before, after) -> state`, the one before the step with the loss scale of the one after it.
      parts: what of a state is counted, by what tables call it.
    """

    state: Any
    step: Callable[..., Any]
    scale_of: Callable[[Any, Any], Any]
    parts: Callable[[Any], dict[str, Any]] = parts_with_optax


@functools.cache  # with their compiled steps
def contestants() -> dict[str, Contestant | None]:
    """All contestants by name; `None` for one whose library is not installed."""
    variables = dict(Net().init(jax.random.key(0), jnp.ones((1, FEATURES))))
    params = variables.pop("params")
    made: dict[str, Contestant | None] = {}
    for name, make in _MAKERS.items():
        try:
            made[name] = make(params, variables)
        except ImportError:
            made[name] = None
    return made


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

    return Contestant(state, jax.jit(step_linen), scale_of)


def _jmp(params: Any, variables: Any) -> Contestant:
    policy = deepmind_jmp.Policy(jnp.float32, jnp.float16, jnp.float16)
    step = _peers.step_with_jmp(apply_of(Net()), TX, policy, PERIOD)
    state = _peers.init_jmp(params, variables, TX, scaled=True, scale=SCALE)
    return Contestant(state, jax.jit(step), lambda before, after: before._replace(scale=after.scale))


def _dynamic_scale(params: Any, variables: Any) -> Contestant:
    state = _peers.init_dynamic_scale(params, variables, TX, SCALE, PERIOD)
    step = jax.jit(_peers.step_with_dynamic_scale(apply_of(Net(jnp.float16))))
    scale_of = lambda before, after: before.replace(dynamic_scale=after.dynamic_scale)
    return Contestant(state, step, scale_of)


def _mpx(params: Any, variables: Any) -> Contestant:
    step = _peers.step_with_mpx(apply_of(Net(jnp.float16)), TX)
    state = _peers.init_mpx(params, variables, TX, SCALE, PERIOD)
    scale_of = lambda before, after: before._replace(scale=after.scale)
    return Contestant(state, jax.jit(step), scale_of)


def _apply_if_finite(params: Any, variables: Any) -> Contestant:
    """Without a loss scale. It must be told how many errors in a row to reject before it accepts one: five here."""
    tx = optax.apply_if_finite(TX, max_consecutive_errors=5)
    state = _peers.init_plain(params, variables, tx)
    step = _peers.step_unscaled(apply_of(Net(jnp.float16)))

    def scale_of(before, after):
        return before.replace(opt_state=after.opt_state._replace(inner_state=before.opt_state.inner_state))

    return Contestant(state, jax.jit(step), scale_of)


def _by_hand(params: Any, variables: Any) -> Contestant:
    step = step_by_hand(cross_entropy_of(apply_of(Net(jnp.float16))), TX, scaled=True)
    state = init_by_hand(params, variables, TX)._replace(scale=jnp.float32(SCALE))
    kept = ("scale", "counter", "grads_finite", "skipped_steps", "consecutive_skips")
    scale_of = lambda before, after: before._replace(**{name: getattr(after, name) for name in kept})
    return Contestant(state, jax.jit(step), scale_of)


def _keras(params: Any, variables: Any) -> Contestant:
    """Keras 3 on JAX, by its `LossScaleOptimizer`."""
    from benchmarks import _peer_keras

    schedule = _peer_keras.keras.optimizers.schedules.CosineDecay(LEARNING_RATE, DECAY_STEPS)
    model = _peer_keras.net(FEATURES, HIDDEN, CLASSES, "mixed_float16")
    trainer = _peer_keras.trainer(model, SCALE, schedule, PERIOD)
    held, inner = trainer.optimizer.variables, trainer.optimizer.inner_optimizer
    own = len(held) - len(inner.variables)

    def scale_of(before, after):  # of the wrapper's own variables one is the scale, one its counter
        return before._replace(opt_state=[*after.opt_state[:own], *before.opt_state[own:]])

    def parts(state):
        values = list(zip(held, state.opt_state, strict=True))
        [iterations] = [value for variable, value in values if variable is inner.iterations]
        moments = [value for variable, value in values if variable.path.endswith(("momentum", "velocity"))]
        assert len(moments) == 2 * len(jax.tree.leaves(params))
        return {
            "parameters": state.params,
            "moments": moments,
            "schedule counts": iterations,
            "batch statistics": state.variables,
            "step counter": iterations,
        }

    return Contestant(trainer.init(params), jax.jit(trainer.step), scale_of, parts)


def _torch(params: Any, variables: Any) -> Contestant:
    """PyTorch AMP in float16 with a `GradScaler`."""
    from benchmarks import _peer_torch

    model = _peer_torch.net(FEATURES, HIDDEN, CLASSES)
    trainer = _peer_torch.Trainer(model, SCALE, PERIOD, LEARNING_RATE, DECAY_STEPS)

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
    return Contestant(trainer.init(params), trainer.step, scale_of, parts)


_MAKERS: dict[str, Callable[[Any, Any], Contestant]] = {
    OURS: _ours,
    BY_HAND: _by_hand,
    "jmp": _jmp,
    "flax DynamicScale": _dynamic_scale,
    "mixed-precision-for-jax": _mpx,
    "optax.apply_if_finite": _apply_if_finite,
    KERAS: _keras,
    TORCH: _torch,
}


def apply_of(model: nn.Module) -> Callable[..., Any]:
    """`(params, variables, (x, faults)) -> (logits, variables)` of a module; the gradients of it have the faults."""

    def apply(params, variables, x_and_faults):
        x, faults = x_and_faults
        collections = {"params": with_faults(params, faults), **variables}
        return model.apply(collections, x, mutable=list(variables))

    return apply
