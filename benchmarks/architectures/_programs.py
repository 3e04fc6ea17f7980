"""The whole train step of an architecture, under a policy and by hand, as programs whose costs can be compared."""

import functools

import jax
import jax.numpy as jnp

import jmp_policy as jmp
from benchmarks._by_hand import init_by_hand, step_by_hand
from benchmarks._programs import Program
from benchmarks.architectures._architecture import Architecture, Model
from benchmarks.architectures._training import make_state, train_step


def ours(architecture: Architecture, policy: jmp.Policy) -> Program:
    """The step of the model as its author left it, with jmp_policy."""
    model = architecture.with_policy(policy)
    make = functools.partial(make_state, model, architecture.tx, policy.loss_scale())
    state = jax.eval_shape(make, *shapes(model))
    return Program(jax.jit(train_step, donate_argnums=0), (state, architecture.batch))


def by_hand(architecture: Architecture, policy: jmp.Policy) -> Program:
    """The step of the model with its dtype written by hand, without a library."""
    model = architecture.by_hand(policy.compute_dtype)
    make = functools.partial(init_by_hand, tx=architecture.tx)
    step = step_by_hand(model.loss, architecture.tx, scaled=policy.compute_dtype == jnp.float16)
    return Program(jax.jit(step, donate_argnums=0), (jax.eval_shape(make, *shapes(model)), architecture.batch))


def gradients(model: Model, batch: dict[str, jax.Array]) -> Program:
    """The loss, the gradients and the new variables of a model."""
    return Program(jax.jit(jax.value_and_grad(model.loss, has_aux=True)), (*shapes(model), batch))


def shapes(model: Model) -> tuple[dict, dict]:
    """The shapes and dtypes of the parameters and of the other variables: all that a program is compiled for."""
    return jax.eval_shape(model.init, jax.random.key(0))
