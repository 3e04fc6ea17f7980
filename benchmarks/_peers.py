"""The same train step with the two libraries that offer a loss scale for any JAX model, as their examples use them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jmp as deepmind_jmp
import optax
from flax.training import dynamic_scale, train_state
from jax import numpy as jnp

from benchmarks._loss import cross_entropy


class JmpState(NamedTuple):
    """What a loop around DeepMind's jmp carries.

    The loss scale is carried as two arrays, because `jax.jit(step).lower` cannot take a `jmp.DynamicLossScale`.
    """

    params: Any
    opt_state: Any
    variables: Any
    step: jax.Array
    scale: tuple[jax.Array, ...]


def init_jmp(params: Any, variables: Any, tx: optax.GradientTransformation, scaled: bool, scale: float) -> JmpState:
    """The state before the first step."""
    arrays = (jnp.full((), scale, jnp.float32), jnp.zeros((), jnp.int32)) if scaled else ()
    return JmpState(params, tx.init(params), variables, jnp.zeros((), jnp.int32), arrays)


def step_with_jmp(
    apply: Callable[..., Any], tx: optax.GradientTransformation, policy: deepmind_jmp.Policy, period: int = 2000
) -> Callable[..., Any]:
    """The step of dm-haiku's imagenet example, the best known use of jmp.

    Args:
      apply: `(params, variables, x) -> (logits, variables)`, free of dtypes: jmp casts what goes in.
      tx: the optimizer.
      policy: the policy.
      period: of a dynamic loss scale.

    Returns:
      `(state, batch) -> (state, loss)`.
    """

    def train_step(state: JmpState, batch: tuple[jax.Array, jax.Array]) -> tuple[JmpState, jax.Array]:
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
        return JmpState(params, opt_state, variables, state.step + 1, arrays), loss

    return train_step


class FlaxState(train_state.TrainState):
    """The train state of Flax's imagenet example."""

    variables: Any
    dynamic_scale: dynamic_scale.DynamicScale


def step_with_dynamic_scale(apply: Callable[..., Any]) -> Callable[..., Any]:
    """The step of Flax's imagenet example.

    Args:
      apply: `(params, variables, x) -> (logits, variables)`, with its dtypes written by hand.

    Returns:
      `(state, batch) -> (state, loss)`, of a `FlaxState`.
    """

    def train_step(state: FlaxState, batch: tuple[jax.Array, jax.Array]) -> tuple[FlaxState, jax.Array]:
        x, labels = batch

        def loss_fn(params):
            logits, variables = apply(params, state.variables, x)
            return cross_entropy(logits, labels), variables

        grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
        scale, finite, (loss, variables), grads = grad_fn(state.params)
        new_state = state.apply_gradients(grads=grads, variables=variables)
        select = functools.partial(jnp.where, finite)
        new_state = new_state.replace(
            opt_state=jax.tree.map(select, new_state.opt_state, state.opt_state),
            params=jax.tree.map(select, new_state.params, state.params),
            dynamic_scale=scale,
        )
        return new_state, loss

    return train_step
