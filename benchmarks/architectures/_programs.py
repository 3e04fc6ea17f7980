"""The whole train step of an architecture by hand, and its gradients, as programs whose costs can be compared."""

import functools

import jax
import jax.numpy as jnp

import jmp_policy as jmp
from benchmarks._by_hand import init_by_hand, step_by_hand
from benchmarks._programs import Program
from benchmarks.architectures._architecture import Architecture, Model


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
