"""The state of `loss_scaled` is an ordinary optax state: found, saved and restored by the ordinary tools."""

import pickle
import subprocess
import sys

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
    assert set(saved) == {"inner_state", "loss_scale", "grads_finite", "skipped_steps", "consecutive_skips"}
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(saved))
    _assert_same(flax.serialization.from_state_dict(fresh, saved), state)
    other = state._replace(loss_scale=SCALES["dynamic"])
    text = r"The saved loss scale has .*, but .*LossScale has .*: .*convert_state\(flax\..*restore\(data\), target\)\.$"
    with pytest.raises(ValueError, match=text):
        flax.serialization.from_state_dict(other, saved)


INNER = optax.sgd(0.5, momentum=0.5)  # whose products are exact, so that no fusion of XLA's rounds them differently
DYNAMIC, SKIP = jmp.optim.loss_scaled(INNER, jmp.DynamicLossScale()), jmp.optim.skip_nonfinite(INNER)
RECIPES = {
    "no scale, then dynamic": (INNER, DYNAMIC, lambda saved, new: new._replace(inner_state=saved)),
    "dynamic, then no scale": (DYNAMIC, INNER, lambda saved, new: saved.inner_state),
    "dynamic, then skip_nonfinite": (DYNAMIC, SKIP, lambda saved, new: saved._replace(loss_scale=new.loss_scale)),
}


@pytest.mark.slow
def test_training_goes_on_with_another_kind_of_loss_scale():
    params, grads = params_of(), [grads_of(seed) for seed in range(2)]

    @jax.jit
    def train(params, grads):
        expected, out = (params, INNER.init(params)), {}
        for grad in grads:
            expected = by_step(INNER, grad, *expected[::-1])
        for name, (before, after, restore) in RECIPES.items():
            middle, saved = by_step(before, grads[0], before.init(params), params)
            out[name] = by_step(after, grads[1], restore(saved, after.init(params)), middle)
        return expected, out

    expected, out = train(params, grads)
    for name, (_, after, _) in RECIPES.items():
        got_params, state = out[name]
        assert jax.tree.structure(state) == jax.tree.structure(after.init(params)), name
        assert bits((got_params, getattr(state, "inner_state", state))) == bits(expected), name


@pytest.fixture
def forget(monkeypatch):
    """Makes Flax what it is where it was loaded after a state was made, or a state came from another process."""

    def forget():
        for kind in {type(scale) for scale in SCALES.values()}:
            monkeypatch.delitem(flax.serialization._STATE_DICT_REGISTRY, kind)

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


@pytest.mark.slow
def test_a_state_is_saved_in_a_process_that_loads_flax_after_it_was_unpickled(tmp_path):
    state = jmp.optim.loss_scaled(optax.sgd(0.1), SCALES["dynamic"]).init({"w": jnp.ones(2)})
    (tmp_path / "state").write_bytes(pickle.dumps(state))
    code = (
        "import pathlib, pickle, sys\nstate = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "assert 'flax' not in sys.modules\nfrom flax.serialization import from_bytes, to_bytes\n"
        "print(float(from_bytes(state, to_bytes(state)).loss_scale.loss_scale))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "state")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout == "1024.0\n"
