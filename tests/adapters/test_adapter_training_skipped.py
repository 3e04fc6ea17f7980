"""A skipped step leaves a training of either API as it was, all but the loss scale and the skip counters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from optax import contrib

import jmp_policy as jmp


class State(jmp.linen.TrainState):
    batch_stats: dict


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_a_skipped_step_keeps_what_a_model_of_nnx_counts_and_the_step_of_its_optimizer():
    class Counting(nnx.Module):
        def __init__(self):
            self.w, self.calls = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1.0
            return (self.w[...] * x).sum()

    model = Counting()
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0))
    optimizer = jmp.nnx.Optimizer(model, tx, wrt=nnx.Param)
    for x, w, calls in ((2.0, -1.0, 1), (jnp.inf, -1.0, 1), (1.0, -2.0, 2)):
        _, grads = jmp.nnx.value_and_grad(lambda model, x=x: model(x), loss_scale=optimizer)(model)
        optimizer.update(model, grads)
        assert (model.w[...].tolist(), int(model.calls[...]), int(optimizer.step[...])) == ([w, w], calls, calls)
    assert int(jmp.metrics(optimizer)["skipped_steps"]) == 1


def test_a_skipped_step_keeps_the_statistics_and_the_step_of_a_train_state():
    state = State.create(
        apply_fn=None, params={"w": jnp.ones(2)}, batch_stats={"m": 0.0}, tx=jmp.optim.skip_nonfinite(optax.sgd(1.0))
    )
    good = state.apply_gradients(grads={"w": jnp.ones(2)}, batch_stats={"m": 1.0})
    bad = good.apply_gradients(grads={"w": jnp.full(2, jnp.nan)}, batch_stats={"m": 2.0})
    assert (int(good.step), float(good.batch_stats["m"]), good.params["w"].tolist()) == (1, 1.0, [0.0, 0.0])
    assert (int(bad.step), float(bad.batch_stats["m"]), bad.params["w"].tolist()) == (1, 1.0, [0.0, 0.0])


def test_without_a_loss_scale_it_is_flaxs_train_state():
    create = {"apply_fn": None, "params": {"w": jnp.ones(2)}, "tx": optax.adam(0.1)}
    grads = {"w": jnp.array([1.0, jnp.nan])}
    ours = jmp.linen.TrainState.create(**create).apply_gradients(grads=grads)
    flaxs = train_state.TrainState.create(**create).apply_gradients(grads=grads)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(ours), jax.tree.leaves(flaxs))


@pytest.mark.slow
def test_a_collection_that_gradients_overwrite_is_overwritten_on_good_steps_only():
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0))
    make = lambda w, amax: {"params": {"w": jnp.full(2, w)}, "_overwrite_with_gradient": {"amax": jnp.full(1, amax)}}
    state = jmp.linen.TrainState.create(apply_fn=None, params=make(1.0, 0.0), tx=tx)
    good = state.apply_gradients(grads=make(1.0, 3.0))
    assert good.params["_overwrite_with_gradient"]["amax"].tolist() == [3.0]
    bad = good.apply_gradients(grads=make(jnp.inf, jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, bad.params, good.params)


def test_collections_beside_the_overwritten_one_stay_as_they_are():
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"amax": jnp.zeros(1)}, "cache": jnp.ones(3)}
    state = jmp.linen.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    stepped = jax.eval_shape(lambda state: state.apply_gradients(grads=params), state)
    assert jax.tree.structure(stepped.params) == jax.tree.structure(params)


def test_a_train_step_is_traced_once():
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


FUNCTIONS = {"obj_fn": contrib.sophia(1e-2), "grad_fn": contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)}
"""Optimizers that need a function as an extra argument, by its name."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_optimizers_get_their_functions_and_an_error_without_says_where_they_go(name):
    """`apply_gradients` kept them, and optax said that they must be provided."""
    tx, params = jmp.optim.skip_nonfinite(FUNCTIONS[name]), {"w": jnp.ones(2)}
    loss_fn = lambda params, *_: jnp.sum(params["w"] ** 2)
    fun = loss_fn if name == "obj_fn" else jax.grad(loss_fn)
    state = jmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    taken = state.apply_gradients(grads=params, **{name: lambda params, *_: fun(params)})
    assert int(taken.step) == 1
    with pytest.raises(ValueError, match=f"{name} must be provided") as error:
        jmp.optim.minimize(loss_fn, tx)(params, tx.init(params))
    assert "optim.minimize passes none" in "".join(error.value.__notes__)
