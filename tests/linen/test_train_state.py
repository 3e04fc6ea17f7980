"""A skipped step leaves a train state as it was, all but the loss scale and the skip counters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

import jmp_policy as jmp


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(4)(x))
        return nn.Dense(1)(x)


class State(jmp.linen.TrainState):
    batch_stats: dict


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def training():
    """A jitted train step in mixed float16 as a user writes it, and the state before the first."""
    with jax.numpy_dtype_promotion("standard"):
        policy = jmp.get_policy("params=float32,compute=float16,output=float32")
        model = jmp.with_policy(Net(), policy)
        variables = model.init(jax.random.key(0), jnp.ones((8, 3)))
        scale = jmp.DynamicLossScale(2.0**8)  # 2**15 overflows in the gradients of so small a batch
        tx = jmp.optim.loss_scaled(optax.adamw(optax.linear_schedule(1e-2, 0.0, 100)), scale)
        state = State.create(
            apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=tx
        )

    @jax.jit
    def step(state, x):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, updated = state.apply_fn(variables, x, mutable=["batch_stats"])
            return jnp.mean((out - 1.0) ** 2), updated["batch_stats"]

        (loss, batch_stats), grads = jmp.value_and_grad(loss_fn, has_aux=True, loss_scale=state)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    return step, state


def _batch(seed):
    return jax.random.normal(jax.random.key(seed), (8, 3))


@pytest.mark.exhaustive
def test_good_steps_train(training):
    step, state = training
    losses = []
    for seed in range(5):
        state, loss = step(state, _batch(seed))
        losses.append(float(loss))
    assert int(state.step) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_skipped_step_advances_neither_step_nor_parameters_nor_moments_nor_batch_statistics(training):
    step, before = training
    before, _ = step(before, _batch(0))
    after, loss = step(before, _batch(1).at[0, 0].set(jnp.inf))
    assert not np.isfinite(loss)

    def everything_else(state):
        return state.replace(opt_state=state.opt_state.inner_state)

    jax.tree.map(np.testing.assert_array_equal, everything_else(after), everything_else(before))
    assert jmp.metrics(after)["skipped_steps"] == 1
    assert jmp.get_loss_scale(after).loss_scale == jmp.get_loss_scale(before).loss_scale / 2


@pytest.mark.slow
def test_without_a_loss_scale_it_is_flaxs_train_state():
    create = {"apply_fn": None, "params": {"w": jnp.ones(2)}, "tx": optax.adam(0.1)}
    grads = {"w": jnp.array([1.0, jnp.nan])}
    ours = jmp.linen.TrainState.create(**create).apply_gradients(grads=grads)
    flaxs = train_state.TrainState.create(**create).apply_gradients(grads=grads)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(ours), jax.tree.leaves(flaxs))


@pytest.mark.slow
def test_collection_that_gradients_overwrite_is_overwritten_on_good_steps_only():
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0))
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"amax": jnp.zeros(1)}}
    state = jmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    grads = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"amax": jnp.full(1, 3.0)}}
    good = state.apply_gradients(grads=grads)
    assert good.params["_overwrite_with_gradient"]["amax"].tolist() == [3.0]
    bad = good.apply_gradients(
        grads={"params": {"w": jnp.full(2, jnp.inf)}, "_overwrite_with_gradient": {"amax": jnp.full(1, jnp.inf)}}
    )
    jax.tree.map(np.testing.assert_array_equal, bad.params, good.params)


def test_collections_beside_the_overwritten_one_stay_as_they_are():
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"amax": jnp.zeros(1)}, "cache": jnp.ones(3)}
    state = jmp.linen.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    stepped = jax.eval_shape(lambda state: state.apply_gradients(grads=params), state)
    assert jax.tree.structure(stepped.params) == jax.tree.structure(params)


def test_train_step_is_traced_once():
    """Flax starts from the Python int 0: a step counter of another type afterwards would mean compiling twice."""
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        return state.apply_gradients(grads={"w": jnp.ones(2)})

    params, tx = {"w": jnp.ones(2)}, jmp.optim.skip_nonfinite(optax.sgd(1.0))
    state = jmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    for _ in range(3):
        state = step(state)
    assert (int(state.step), len(traces)) == (3, 1)
