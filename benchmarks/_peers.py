"""The same train step with the libraries that offer a loss scale for any JAX model, as their examples use them.

Each `step_with_...` takes `apply`, `(params, variables, x) -> (logits, variables)`, and returns
`(state, batch) -> (state, loss)`. Each `init_...` makes the state before the first step.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jmp as deepmind_jmp
import optax
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from jax import numpy as jnp

from benchmarks._loss import cross_entropy, cross_entropy_of

Apply = Step = Callable[..., Any]


class LoopState(NamedTuple):
    """The carry of a loop that is written by hand.

    The loss scale of DeepMind's jmp is carried as its two arrays: `jax.jit(step).lower` cannot take its class.
    """

    params: Any
    opt_state: Any
    variables: Any
    step: jax.Array
    scale: Any


def init_jmp(params: Any, variables: Any, tx: optax.GradientTransformation, scaled: bool, scale: float) -> LoopState:
    arrays = (jnp.full((), scale, jnp.float32), jnp.zeros((), jnp.int32)) if scaled else ()
    return LoopState(params, tx.init(params), variables, jnp.zeros((), jnp.int32), arrays)


def step_with_jmp(
    apply: Apply, tx: optax.GradientTransformation, policy: deepmind_jmp.Policy, period: int = 2000
) -> Step:
    """The step of dm-haiku's imagenet example, the best known use of jmp. `apply` is free of dtypes: jmp casts."""

    def train_step(state: LoopState, batch: tuple[jax.Array, jax.Array]) -> tuple[LoopState, jax.Array]:
        x, labels = batch
        scale = deepmind_jmp.DynamicLossScale(*state.scale, period) if state.scale else deepmind_jmp.NoOpLossScale()

        def loss_fn(params):
            logits, variables = apply(*policy.cast_to_compute((params,)), state.variables, policy.cast_to_compute(x))
            loss = cross_entropy(logits, labels)
            return scale.scale(loss), (loss, variables)

        grads, (loss, variables) = jax.grad(loss_fn, has_aux=True)(state.params)
        grads = scale.unscale(grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = deepmind_jmp.all_finite(grads)
        scale = scale.adjust(finite)
        params, variables, opt_state = deepmind_jmp.select_tree(
            finite, (params, variables, opt_state), (state.params, state.variables, state.opt_state)
        )
        arrays = (scale.loss_scale, scale.counter) if state.scale else ()
        return LoopState(params, opt_state, variables, state.step + 1, arrays), loss

    return train_step


class PlainState(train_state.TrainState):
    """A train state of Flax with the model's variables that are not parameters."""

    variables: Any


class FlaxState(PlainState):
    """The train state of Flax's imagenet example."""

    dynamic_scale: DynamicScale


def init_plain(params: Any, variables: Any, tx: optax.GradientTransformation) -> PlainState:
    state = PlainState.create(apply_fn=None, params=params, tx=tx, variables=variables)  # type: ignore[arg-type]
    return state.replace(step=jnp.zeros((), jnp.int32))  # Flax begins to count with a Python integer


def init_dynamic_scale(
    params: Any, variables: Any, tx: optax.GradientTransformation, scale: float, period: int = 2000
) -> FlaxState:
    dynamic_scale = DynamicScale(growth_interval=period, scale=jnp.float32(scale), fin_steps=jnp.zeros((), jnp.int32))  # type: ignore[arg-type]
    state = FlaxState.create(
        apply_fn=None,
        params=params,
        tx=tx,
        variables=variables,
        dynamic_scale=dynamic_scale,  # type: ignore[arg-type]
    )
    return state.replace(step=jnp.zeros((), jnp.int32))


def step_with_dynamic_scale(apply: Apply) -> Step:
    """The step of Flax's imagenet example. `apply` has its dtypes written by hand."""
    loss_fn = cross_entropy_of(apply)

    def train_step(state: FlaxState, batch: tuple[jax.Array, jax.Array]) -> tuple[FlaxState, jax.Array]:
        grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
        scale, finite, (loss, variables), grads = grad_fn(state.params, state.variables, batch)
        new_state = state.apply_gradients(grads=grads, variables=variables)
        select = functools.partial(jnp.where, finite)
        new_state = new_state.replace(
            opt_state=jax.tree.map(select, new_state.opt_state, state.opt_state),
            params=jax.tree.map(select, new_state.params, state.params),
            dynamic_scale=scale,
        )
        return new_state, loss

    return train_step


def init_mpx(
    params: Any, variables: Any, tx: optax.GradientTransformation, scale: float, period: int = 2000
) -> LoopState:
    """Raises ImportError where mixed-precision-for-JAX is not installed, as `step_with_mpx`."""
    import mpx

    scaling = mpx.DynamicLossScaling(jnp.float32(scale), jnp.float32(1.0), period=period)
    return LoopState(params, tx.init(params), variables, jnp.zeros((), jnp.int32), scaling)


def step_with_mpx(apply: Apply, tx: optax.GradientTransformation) -> Step:
    """The step of the README of mixed-precision-for-JAX; batch statistics and the step advance whatever happens."""
    import mpx

    def train_step(state: LoopState, batch: Any) -> tuple[LoopState, jax.Array]:
        loss_fn = lambda params: cross_entropy_of(apply)(params, state.variables, batch)
        value_and_grad = mpx.filter_value_and_grad(loss_fn, state.scale, has_aux=True)
        (loss, variables), scale, finite, grads = value_and_grad(state.params)
        params, opt_state = mpx.optimizer_update(state.params, tx, state.opt_state, grads, finite)
        return LoopState(params, opt_state, variables, state.step + 1, scale), loss

    return train_step


def step_unscaled(apply: Apply) -> Step:
    """The step without a loss scale, which skips what its optimizer skips: nothing, but for `optax.apply_if_finite`."""
    loss_fn = cross_entropy_of(apply)

    def train_step(state: PlainState, batch: Any) -> tuple[PlainState, jax.Array]:
        (loss, variables), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, state.variables, batch)
        return state.apply_gradients(grads=grads, variables=variables), loss

    return train_step
