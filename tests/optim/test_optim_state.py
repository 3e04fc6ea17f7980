"""The state of `loss_scaled` is an ordinary optax state: found, saved and restored by the ordinary tools."""

import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from optimizer_registry import bits, by_step, grads_of, params_of, types

import jmp_policy as jmp

SCALES = {
    "noop": jmp.NoOpLossScale(),
    "static": jmp.StaticLossScale(8.0),
    "dynamic": jmp.DynamicLossScale(2.0**10, period=7, min_loss_scale=4.0),
    "hysteresis": jmp.DynamicLossScale(2.0**10, hysteresis=3),
}
every_scale = pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)


def test_optax_finds_what_a_state_holds_and_replaces_the_scale():
    state = jmp.optim.loss_scaled(optax.adam(1e-2), SCALES["dynamic"]).init(params_of())
    found = optax.tree_utils.tree_get(state, "loss_scale")
    assert isinstance(found, jmp.DynamicLossScale)
    assert float(found.loss_scale) == 2.0**10
    assert optax.tree_utils.tree_get(state, "skipped_steps").dtype == jnp.int32
    assert bool(optax.tree_utils.tree_get(state, "grads_finite"))
    assert optax.tree_utils.tree_get(state, "mu").keys() == params_of().keys()
    replaced = optax.tree_utils.tree_set(state, loss_scale=jmp.DynamicLossScale(64.0))
    assert float(jmp.metrics(replaced)["loss_scale"]) == 64.0


def _assert_same(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert types(restored) == types(state)


@pytest.mark.filterwarnings("default")  # those of orbax
@pytest.mark.parametrize("name", ["hysteresis", *(pytest.param(n, marks=pytest.mark.slow) for n in ("noop", "static"))])
def test_flax_and_orbax_bring_a_state_back_and_flax_refuses_another_kind_of_scale(name, tmp_path):
    tx = jmp.optim.loss_scaled(optax.sgd(1e-2, momentum=0.9), SCALES[name])
    fresh = tx.init(params_of())
    params, state = by_step(tx, grads_of(0), fresh, params_of())
    _, state = by_step(tx, grads_of(1, jnp.nan), state, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        _assert_same(checkpointer.restore(tmp_path / "state", fresh), state)
    _assert_same(flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state)), state)
    saved = flax.serialization.to_state_dict(state)
    assert set(saved) == {
        "inner_state",
        "loss_scale",
        "grads_finite",
        "skipped_steps",
        "consecutive_skips",
        "updates_finite",
    }
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(saved))
    _assert_same(flax.serialization.from_state_dict(fresh, saved), state)
    other = state._replace(loss_scale=SCALES["dynamic"])
    text = r"The saved loss scale has .*, but .*LossScale has .*: .*convert_state\(flax\..*restore\(data\), target\)\.$"
    with pytest.raises(ValueError, match=text):
        flax.serialization.from_state_dict(other, saved)


@pytest.fixture
def forget(monkeypatch):
    """Makes Flax what it is where it was loaded after a state was made, or a state came from another process."""

    def forget():
        for kind in {type(scale) for scale in SCALES.values()}:
            monkeypatch.delitem(flax.serialization._STATE_DICT_REGISTRY, kind)
        monkeypatch.setattr("jmp_policy.loss_scale._loss_scale._is_registered", False)

    return forget


@every_scale
def test_flax_serializes_a_loss_scale_that_it_has_not_met(scale, forget):
    state = jmp.optim.loss_scaled(optax.sgd(0.1, momentum=0.9), scale).init({"w": jnp.ones(2)})
    forget()
    stored = flax.serialization.to_bytes({"opt_state": (state,)})
    forget()
    restored = flax.serialization.from_bytes({"opt_state": (state,)}, stored)["opt_state"][0]
    assert restored.loss_scale == scale
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    pickled = pickle.dumps(scale)
    forget()
    assert isinstance(flax.serialization.to_state_dict(pickle.loads(pickled)), dict)


def test_flax_meets_a_loss_scale_that_comes_out_of_a_step(forget):
    adjust = jax.jit(lambda scale: scale.adjust(True))
    scale = adjust(SCALES["dynamic"])
    forget()
    assert flax.serialization.to_state_dict(adjust(scale)).keys() == {"loss_scale", "counter"}
