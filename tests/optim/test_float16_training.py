"""A float16 run with a dynamic scale ends where float32 runs end; without a scale it loses its gradients, and stops.

The loss is a mean over many outputs and over the microbatches of a step, as in an image model with accumulated
gradients: each output's share of the gradient shrinks with their number, with the unit of the targets and with the
error that is left, and float16, whose smallest number is 6e-8, has only zero for it.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_policy as jmp

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

HALF = "params=float32,compute=float16,output=float32"
SEEDS, STEPS, MICROBATCHES, EXAMPLES, WIDTHS = 5, 200, 16, 64, (8, 32, 32, 512)
UNIT = 1e-2  # of the targets: metres, say, where centimetres count
# The gradients of float32 are around 1e-9: Adam's own epsilon, 1e-8, would be in the way of all runs alike.
INNER = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS), eps=1e-12)
DYNAMIC = jmp.DynamicLossScale(2.0**40, period=50, max_loss_scale=2.0**50)  # which begins with overflows


def _init(key):
    shapes = list(itertools.pairwise(WIDTHS))
    keys = jax.random.split(key, len(shapes))
    *hidden, last = [jax.random.normal(k, shape) / shape[0] ** 0.5 for k, shape in zip(keys, shapes, strict=True)]
    return [*hidden, UNIT * last]


def _net(params, x):
    *hidden, last = params
    for w in hidden:
        x = jnp.tanh(x @ w)
    return x @ last


@functools.cache
def _data():
    x = jax.random.normal(jax.random.key(100), (EXAMPLES, WIDTHS[0]))
    return x, _net(_init(jax.random.key(101)), x)


def _loss_fn(policy):
    net = jmp.with_policy(_net, policy)
    x, targets = _data()
    return lambda params: jnp.mean((net(params, x) - targets) ** 2) / MICROBATCHES


@functools.cache
def _trained(policy, scale):
    """Final float32 losses, parameters and states of optimizers, from five seeds."""
    loss_fn, tx = _loss_fn(policy), jmp.optim.loss_scaled(INNER, scale)

    def step(carry, _):
        params, state = carry
        grads = jmp.grad(loss_fn, loss_scale=state)(params)
        return jmp.optim.step(tx, grads, state, params), None

    def train(key):
        params = _init(key)
        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), length=STEPS)
        return _loss_fn("float32")(params), params, state

    return jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), SEEDS))


def _lost(params, scale):
    """The part of the numbers of the float32 gradient, none of them zero, that are zero in float16."""
    grads = jax.vmap(jmp.grad(_loss_fn(HALF), loss_scale=scale))(params)
    true = jax.vmap(jax.grad(_loss_fn("float32")))(params)
    zero, of = (sum(int(jnp.sum(x == 0)) for x in jax.tree.leaves(tree)) for tree in (grads, true))
    assert of == 0
    return zero / sum(x.size for x in jax.tree.leaves(grads))


def _deviations(losses):
    """How far each is from the mean of the float32 runs, in standard deviations of those."""
    reference, _, _ = _trained("float32", jmp.NoOpLossScale())
    return np.asarray((losses - reference.mean()) / reference.std(ddof=1))


def test_float16_with_a_dynamic_scale_ends_within_two_deviations_of_float32():
    losses, _, state = _trained(HALF, DYNAMIC)
    assert (abs(_deviations(losses)) <= 2).all()
    assert (state.skipped_steps > 0).all()


def test_float16_without_a_scale_loses_its_gradients_and_ends_elsewhere():
    _, params, _ = _trained("float32", jmp.NoOpLossScale())
    assert _lost(params, jmp.NoOpLossScale()) > 0.99
    assert _lost(params, jmp.DynamicLossScale()) < 0.01
    losses, _, _ = _trained(HALF, jmp.NoOpLossScale())
    assert (_deviations(losses) > 20).all()
