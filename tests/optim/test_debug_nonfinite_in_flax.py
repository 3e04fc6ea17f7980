"""Flax's train state and nnx's optimizer carry origin as any state does."""

import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn, nnx
from flax.training import train_state
from optimizer_registry import bits

import jmp_policy as jmp
from jmp_policy.numerics import first_nonfinite

SCALE = jmp.DynamicLossScale(2.0**10)
TX = jmp.optim.loss_scaled(optax.sgd(0.1), SCALE, debug_nonfinite=True)
GOOD, BAD = jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0])


def _loss(w, x):
    with jax.named_scope("head"):
        return jnp.sum(w / x)


class Head(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return jnp.sum(self.w[...] / x)


class Model(nnx.Module):
    def __init__(self):
        self.head = Head()

    def __call__(self, x):
        return self.head(x)


@pytest.fixture(scope="module")
def trained_state():
    @jax.jit
    def train_step(state, x):
        grad_fn = first_nonfinite(jmp.value_and_grad(_loss, loss_scale=state))
        (_, grads), origin = grad_fn(state.params["w"], x)
        return state.apply_gradients(grads={"w": grads}, origin=origin)

    state = jmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=TX)
    for x in (GOOD, BAD, GOOD):
        state = train_step(state, x)
    return state


@pytest.fixture(scope="module")
def trained_optimizer():
    @nnx.jit
    def train_step(model, optimizer, x):
        grad_fn = first_nonfinite(jmp.nnx.value_and_grad(lambda model, x: model(x), loss_scale=optimizer))
        (loss, grads), origin = grad_fn(model, x)
        optimizer.update(model, grads, origin=origin)
        return loss

    model = Model()
    optimizer = jmp.nnx.Optimizer(model, TX, wrt=nnx.Param)
    for x in (GOOD, BAD, GOOD):
        train_step(model, optimizer, x)
    return optimizer


@pytest.mark.slow
def test_a_train_state_names_the_step_and_its_origin(trained_state):
    skip = jmp.optim.last_skip(trained_state)
    assert (skip.step, skip.origin.path, skip.origin.primitive) == (2, "head", "div")
    assert int(jmp.metrics(trained_state)["nonfinite_step"]) == 2
    assert int(trained_state.step) == 2


def test_an_nnx_optimizer_names_the_step_and_its_origin(trained_optimizer):
    skip = jmp.optim.last_skip(trained_optimizer)
    assert (skip.step, skip.origin.path, skip.origin.primitive) == (2, "head", "div")
    assert int(jmp.metrics(trained_optimizer)["nonfinite_step"]) == 2
    assert int(trained_optimizer.step[...]) == 2


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sum(nn.Dense(2, use_bias=False, name="head")(x) ** 2)


@pytest.mark.slow
def test_minimize_names_modules_by_the_paths_that_a_map_has():
    model = Linen()
    params = model.init(jax.random.key(0), GOOD)
    train_step = jax.jit(jmp.optim.minimize(model.apply, TX))
    _, state, _ = train_step(params, TX.init(params), jnp.full(2, 1e18))
    origin = jmp.optim.last_skip(state).origin
    assert (origin.path, origin.primitive, origin.direction) == ("head", "dot_general", "backward")


@pytest.mark.slow
def test_a_train_state_is_saved_and_restored(trained_state):
    fresh = jmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=TX)
    restored = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(trained_state))
    assert bits(restored.opt_state) == bits(trained_state.opt_state)
    assert jmp.optim.last_skip(restored).origin.path == "head"


@pytest.mark.slow
def test_an_nnx_optimizer_is_saved_and_restored(trained_optimizer):
    model = Model()
    fresh = jmp.nnx.Optimizer(model, TX, wrt=nnx.Param)
    nnx.update(fresh, pickle.loads(pickle.dumps(jax.device_get(nnx.state(trained_optimizer)))))
    assert str(jmp.optim.last_skip(fresh)) == str(jmp.optim.last_skip(trained_optimizer))


def test_an_nnx_optimizer_that_was_saved_without_goes_on_with_origins(trained_optimizer):
    plain = jmp.nnx.Optimizer(Model(), jmp.optim.loss_scaled(optax.sgd(0.1), SCALE), wrt=nnx.Param)
    target = jmp.nnx.Optimizer(Model(), TX, wrt=nnx.Param)
    nnx.update(target, jmp.convert_state(nnx.state(plain), nnx.state(target)))
    assert jmp.optim.last_skip(target) is None
    nnx.update(plain, jmp.convert_state(nnx.state(trained_optimizer), nnx.state(plain)))
    assert int(plain.opt_state.skipped_steps[...]) == 1


def test_a_train_state_of_flax_itself_says_what_is_missing():
    state = train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=TX)
    with pytest.raises(TypeError, match=r"records the origin of non-finite gradients, and got none"):
        state.apply_gradients(grads={"w": jnp.ones(2)})


@pytest.mark.slow
def test_an_nnx_optimizer_that_carries_none_refuses_an_origin():
    model = Model()
    optimizer = jmp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = jmp.nnx.grad(lambda model: model(GOOD), loss_scale=jmp.NoOpLossScale())(model)
    with pytest.raises(ValueError, match=r"but its state, a \w+, does not record it"):
        optimizer.update(model, grads, origin=jmp.numerics.NonfiniteOrigin.empty())


@pytest.mark.slow
def test_a_float8_train_state_hands_its_origin_on():
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"input_scale": jnp.ones(1)}}
    state = jmp.linen.TrainState.create(apply_fn=None, params=params, tx=TX)
    state = state.apply_gradients(grads=params, origin=jmp.numerics.NonfiniteOrigin.empty())
    assert (int(state.opt_state.steps), int(state.step)) == (1, 1)
