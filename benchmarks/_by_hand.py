"""The train step that an expert writes without a library: dtypes in the layers, a scaled loss, a `lax.cond` skip.

It carries what `optim.loss_scaled` carries (floor and ceiling of the scale, counters of skips), so that the two
programs do the same work and must return the same bits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from benchmarks._loss import cross_entropy

PERIOD, FLOOR, CEILING = 2000, 1.0, 2.0**24


class HandState(NamedTuple):
    """Parameters, the other variables of the model, the optimizer's state and the loss scale's."""

    params: Any
    opt_state: Any
    variables: Any
    step: jax.Array
    scale: jax.Array
    counter: jax.Array
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array


def init_by_hand(params: Any, variables: Any, tx: optax.GradientTransformation) -> HandState:
    """The state before the first step; each array is one of its own, so that the state can be donated."""
    count = lambda: jnp.zeros((), jnp.int32)
    scale = jnp.full((), 2.0**15, jnp.float32)
    return HandState(params, tx.init(params), variables, count(), scale, count(), jnp.array(True), count(), count())


def step_by_hand(
    loss_fn: Callable[..., Any], tx: optax.GradientTransformation, scaled: bool, copies: Any = None
) -> Callable[..., Any]:
    """The step of a model.

    Args:
      loss_fn: `(params, variables, batch) -> (loss, variables)`.
      tx: the optimizer.
      scaled: whether the loss is scaled dynamically.
      copies: a dtype for copies of the parameters that are differentiated instead, and whose gradients stay narrow
        and scaled until the optimizer's branch: no step by hand that we know needs fewer bytes.

    Returns:
      `(state, batch) -> (state, loss)`.
    """

    def train_step(state: HandState, batch: Any) -> tuple[HandState, jax.Array]:
        def scaled_loss_fn(params):
            loss, variables = loss_fn(params, state.variables, batch)
            return loss * state.scale if scaled else loss, (loss, variables)

        params = state.params if copies is None else jax.tree.map(lambda p: p.astype(copies), state.params)
        grads, (loss, variables) = jax.grad(scaled_loss_fn, has_aux=True)(params)
        params, new_state = _update(tx, scaled, grads, state.params, state._replace(variables=None), copies is not None)
        variables = _select(new_state.grads_finite, variables, state.variables)
        return new_state._replace(params=params, variables=variables), loss

    return train_step


def step_by_hand_nnx(tx: optax.GradientTransformation, scaled: bool) -> Callable[..., Any]:
    """The same with the transformations of nnx, for `nnx.jit`: `(model, state, batch) -> (state, loss)`.

    Parameters and other variables are in the model, and so not in the state.
    """

    def train_step(model: nnx.Module, state: HandState, batch: tuple[jax.Array, jax.Array]) -> Any:
        x, labels = batch
        before = nnx.as_pure(nnx.state(model, nnx.BatchStat))

        def loss_fn(model):
            loss = cross_entropy(model(x), labels)
            return loss * state.scale if scaled else loss, loss

        grads, loss = nnx.grad(loss_fn, has_aux=True)(model)
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        params, state = _update(tx, scaled, nnx.as_pure(grads), params, state)
        after = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        nnx.update(model, params, _select(state.grads_finite, after, before))
        return state, loss

    return train_step


def _update(
    tx: optax.GradientTransformation, scaled: bool, grads: Any, params: Any, state: HandState, of_copies: bool = False
) -> tuple[Any, HandState]:
    """The new parameters, and the new state but for parameters and variables."""
    if scaled and not of_copies:
        grads = _unscale(grads, state.scale)
    finite = _all_finite(grads)

    def take(grads, opt_state, params):
        grads = _unscale(grads, state.scale) if scaled and of_copies else grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def skip(grads, opt_state, params):
        return params, opt_state

    params, opt_state = lax.cond(finite, take, skip, grads, state.opt_state, params)
    skipped = (~finite).astype(jnp.int32)
    return params, HandState(
        None,
        opt_state,
        None,
        state.step + finite.astype(jnp.int32),
        *(_adjusted(state, finite) if scaled else (state.scale, state.counter)),
        finite,
        state.skipped_steps + skipped,
        (state.consecutive_skips + skipped) * skipped,
    )


def _unscale(grads: Any, scale: jax.Array) -> Any:
    reciprocal = 1.0 / scale  # XLA fuses a multiplication with all that reads its result, and writes down a quotient
    return jax.tree.map(lambda g: g.astype(jnp.float32) * reciprocal, grads)


def _select(finite: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(functools.partial(lax.select, finite), new, old)


def _all_finite(grads: Any) -> jax.Array:
    """The cheapest check that misses nothing."""
    return functools.reduce(jnp.logical_and, [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])


def _adjusted(state: HandState, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
    complete = state.counter >= PERIOD - 1
    grown = state.scale * 2.0
    grown = jnp.where(complete & jnp.isfinite(grown) & (grown <= CEILING), grown, state.scale)
    scale = jnp.where(finite, grown, jnp.maximum(state.scale * 0.5, FLOOR))
    return scale, jnp.where(finite & ~complete, state.counter + 1, 0)
