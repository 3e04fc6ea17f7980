"""States of Flax that carry an origin: Orbax brings them back, and they say the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp
from jmp_policy.numerics import first_nonfinite

ocp = pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.filterwarnings("default")  # those of orbax

X = jnp.array([[1.0, -jnp.inf]])


def make_transformation():
    return jmp.optim.loss_scaled(optax.sgd(1e-3, momentum=0.9), jmp.DynamicLossScale(2.0**10), debug_nonfinite=True)


def save_and_restore(path, state, target):
    with ocp.StandardCheckpointer() as checkpointer, jax.numpy_dtype_promotion("standard"):
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, target)


def assert_same(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def assert_knows_why(state):
    assert str(jmp.optim.last_skip(state)) == "step 1 skipped: inf in argument `batch`"


@pytest.mark.slow
def test_an_nnx_optimizer_comes_back(tmp_path):
    def make():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        return model, jmp.nnx.Optimizer(model, make_transformation(), wrt=nnx.Param)

    def loss(model, batch):
        return jnp.sum(model(batch))

    model, optimizer = make()
    (_, grads), origin = first_nonfinite(nnx.value_and_grad(loss))(model, X)
    optimizer.update(model, grads, origin=origin)
    state, fresh = nnx.state((model, optimizer)), make()
    restored = save_and_restore(tmp_path / "state", state, nnx.state(fresh))
    assert_same(restored, state)
    nnx.update(fresh, restored)
    assert_knows_why(fresh[1])


@pytest.mark.slow
def test_a_linen_train_state_comes_back(tmp_path):
    model = nn.Dense(1)

    def make():
        params = model.init(jax.random.key(0), X)["params"]
        return jmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=make_transformation())

    def loss(params, batch):
        return jnp.sum(model.apply({"params": params}, batch))

    state = make()
    (_, grads), origin = first_nonfinite(jax.value_and_grad(loss))(state.params, X)
    state = state.apply_gradients(grads=grads, origin=origin)
    restored = save_and_restore(tmp_path / "state", state, make().replace(tx=state.tx, apply_fn=state.apply_fn))
    assert_same(restored, state)
    assert_knows_why(restored)
