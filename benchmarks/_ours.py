"""The train step with jmp_policy, as its README writes it, in both Flax APIs."""

from typing import Any

import jax
import optax
from flax import linen, nnx

import jmp_policy as jmp
from benchmarks._loss import cross_entropy

Batch = tuple[jax.Array, jax.Array]


class LinenState(jmp.linen.TrainState):
    """A train state with the model's variables that are not parameters."""

    variables: Any


def init_linen(
    model: linen.Module, params: Any, variables: Any, tx: optax.GradientTransformation, scale: jmp.LossScale
) -> LinenState:
    """The state before the first step."""
    tx = jmp.optim.loss_scaled(tx, scale)
    return LinenState.create(apply_fn=model.apply, params=params, tx=tx, variables=variables)


def step_linen(state: LinenState, batch: Batch) -> tuple[LinenState, jax.Array]:
    """One step of a linen model."""
    x, labels = batch

    def loss_fn(params):
        logits, variables = state.apply_fn({"params": params, **state.variables}, x, mutable=list(state.variables))
        return cross_entropy(logits, labels), variables

    (loss, variables), grads = jmp.value_and_grad(loss_fn, has_aux=True, loss_scale=state)(state.params)
    return state.apply_gradients(grads=grads, variables=variables), loss


def step_nnx(model: nnx.Module, optimizer: jmp.nnx.Optimizer, batch: Batch) -> jax.Array:
    """One step of an nnx model, in place."""
    x, labels = batch
    loss_fn = lambda model: cross_entropy(model(x), labels)
    loss, grads = jmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer)(model)
    optimizer.update(model, grads)
    return loss
