"""The same train step with the libraries that offer a loss scale for any JAX model, as their examples use them."""

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
    """The carry of a loop around DeepMind's jmp.

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


class MpxState(NamedTuple):
    """The carry of a loop around mixed-precision-for-JAX."""

    params: Any
    opt_state: Any
    variables: Any
    step: jax.Array
    scale: Any


def init_mpx(
    params: Any, variables: Any, tx: optax.GradientTransformation, scale: float, period: int = 2000
) -> MpxState:
    """The state before the first step. Raises ImportError where mixed-precision-for-JAX is not installed."""
    import mpx

    scaling = mpx.DynamicLossScaling(jnp.float32(scale), jnp.float32(1.0), period=period)
    return MpxState(params, tx.init(params), variables, jnp.zeros((), jnp.int32), scaling)


def step_with_mpx(apply: Callable[..., Any], tx: optax.GradientTransformation) -> Callable[..., Any]:
    """The step of the README of mixed-precision-for-JAX; batch statistics and the step advance whatever happens.

    Args:
      apply: `(params, variables, x) -> (logits, variables)`; mpx casts the parameters.
      tx: the optimizer.

    Returns:
      `(state, batch) -> (state, loss)`, of an `MpxState`.

    Raises:
      ImportError: mixed-precision-for-JAX is not installed.
    """
    import mpx

    def train_step(state: MpxState, batch: Any) -> tuple[MpxState, jax.Array]:
        x, labels = batch

        def loss_fn(params):
            logits, variables = apply(params, state.variables, x)
            return cross_entropy(logits, labels), variables

        value_and_grad = mpx.filter_value_and_grad(loss_fn, state.scale, has_aux=True)
        (loss, variables), scale, finite, grads = value_and_grad(state.params)
        params, opt_state = mpx.optimizer_update(state.params, tx, state.opt_state, grads, finite)
        return MpxState(params, opt_state, variables, state.step + 1, scale), loss

    return train_step


class PlainState(train_state.TrainState):
    """A train state of Flax with the model's variables that are not parameters."""

    variables: Any


def step_unscaled(apply: Callable[..., Any]) -> Callable[..., Any]:
    """The step without a loss scale, which skips what its optimizer skips: nothing, but for `optax.apply_if_finite`.

    Args:
      apply: `(params, variables, x) -> (logits, variables)`, with its dtypes written by hand.

    Returns:
      `(state, batch) -> (state, loss)`, of a `PlainState`.
    """

    def train_step(state: PlainState, batch: Any) -> tuple[PlainState, jax.Array]:
        x, labels = batch

        def loss_fn(params):
            logits, variables = apply(params, state.variables, x)
            return cross_entropy(logits, labels), variables

        (loss, variables), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, variables=variables), loss

    return train_step
