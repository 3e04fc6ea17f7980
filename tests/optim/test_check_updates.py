"""`check="updates"`: finite gradients whose step would lose parameters or state change nothing either."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from meshes import make_mesh
from optimizer_registry import METHODS, OPTIMIZERS, WAYS, bits, grads_of, params_of, start_all, step_all, types
from test_skip_forms import forced

import jmp_policy as jmp

SCALE = jmp.DynamicLossScale(2.0**10)


def poisoned(inner):
    """The optimizer, whose updates have `poison` added."""

    def update(grads, state, params=None, *, poison, **extra):
        updates, state = inner.update(grads, state, params, **extra)
        return jax.tree.map(lambda update: update + poison.astype(update.dtype), updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "form"), [("step", "branch"), ("step", "select"), ("update", "branch")])
def test_a_bad_update_leaves_every_bit_and_the_loss_scale(way, form):
    """Law 14 over the registry, in one program. Without faults each step is that of plain optax."""
    make = lambda name: poisoned(OPTIMIZERS[name]())
    with forced(form):
        txs = {name: jmp.optim.loss_scaled(make(name), SCALE, check="updates") for name in OPTIMIZERS}
        carries = start_all(txs)
        step = jax.jit(functools.partial(step_all, txs, way))
        for seed, (bad, poison) in enumerate(
            [(None, np.nan), (None, 0.0), (None, np.inf), (np.nan, 0.0), (None, 0.0), (None, np.nan)]
        ):
            after = step(carries, grads_of(seed, bad), poison=jnp.float32(poison))
            for name in OPTIMIZERS:
                (params, state), (new_params, new_state) = carries[name], after[name]
                is_good = bad is None and poison == 0
                kept = bits((new_params, new_state.inner_state)) == bits((params, state.inner_state))
                assert kept == (not is_good), name
                assert types(after[name]) == types(carries[name]), name
                assert (bool(new_state.grads_finite), bool(new_state.updates_finite)) == (bad is None, poison == 0), (
                    name
                )
            carries = after
        for name, (_, state) in carries.items():
            assert (int(state.skipped_steps), int(state.consecutive_skips)) == (4, 1), name
            # non-finite gradients lower it, the finite step after them counts, and bad updates do neither
            assert (float(state.loss_scale.loss_scale), int(state.loss_scale.counter)) == (2.0**9, 1), name


@pytest.mark.slow
def test_without_faults_the_bits_are_those_of_the_default_check():
    make = lambda name, check: jmp.optim.loss_scaled(poisoned(OPTIMIZERS[name]()), SCALE, check=check)
    results = []
    for check in ("gradients", "updates"):
        txs = {name: make(name, check) for name in OPTIMIZERS}
        carries = start_all(txs)
        step = jax.jit(functools.partial(step_all, txs, "step"))
        for seed in range(2):
            carries = step(carries, grads_of(seed), poison=jnp.float32(0))
        results.append({name: bits((params, state.inner_state)) for name, (params, state) in carries.items()})
    assert results[0] == results[1]


def _plant(state):
    """A nan in one moment."""
    leaves, structure = jax.tree.flatten(state)
    i = next(i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32 and leaf.ndim)
    leaves[i] = leaves[i].at[(0,) * leaves[i].ndim].set(jnp.nan)
    return structure.unflatten(leaves)


@pytest.mark.parametrize("name", ["adamw", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lamb", "sgd", "dog"))])
def test_a_nan_in_a_moment_spreads_no_further(name):
    tx = jmp.optim.skip_nonfinite(OPTIMIZERS[name](), check="updates")
    params, grads = params_of(), grads_of(0)
    state = tx.init(params)
    state = state._replace(inner_state=_plant(state.inner_state))
    new_params, new_state = jmp.optim.step(tx, grads, state, params)
    assert bits((new_params, new_state.inner_state)) == bits((params, state.inner_state))
    assert (bool(new_state.updates_finite), int(new_state.skipped_steps)) == (False, 1)


def _adam_of_zeros():
    return optax.adam(1e-3), jnp.ones(3, jnp.float16), jnp.zeros(3, jnp.float16)  # eps=1e-8 is 0 in float16: 0 / 0


def _rounded_hyperparams():
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)  # b2=0.999 is 1 in bfloat16
    return tx, jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.bfloat16)


def _overflowing_sum():
    return optax.sgd(1e4), jnp.full(2, 60000.0, jnp.float16), jnp.full(2, -1.0)  # 60000 + 10000


def _nan_schedule():
    return optax.sgd(lambda count: jnp.where(count == 0, jnp.nan, 0.1)), jnp.ones(2), jnp.ones(2)


@pytest.mark.filterwarnings("ignore:The parameter")
@pytest.mark.parametrize("make", [_adam_of_zeros, _rounded_hyperparams, _overflowing_sum, _nan_schedule])
def test_updates_that_destroyed_parameters_in_silence_are_skipped(make):
    """optax issue 1414 and pull request 1755: the gradients were finite, and every later step was skipped."""
    inner, params, grads = make()
    lost, state = jmp.optim.step(tx := jmp.optim.skip_nonfinite(inner), grads, tx.init(params), params)
    assert (bool(jnp.isfinite(lost).all()), bool(state.grads_finite)) == (False, True)
    assert not jmp.metrics(state, lost)["updates_finite"]  # the default tells in the same step, if asked
    assert jmp.metrics(state, params)["updates_finite"]
    assert "updates_finite" not in jmp.metrics(state)
    tx = jmp.optim.skip_nonfinite(inner, check="updates")
    for step in WAYS.values():
        kept, state = step(tx, grads, tx.init(params), params)
        assert bits(kept) == bits(params)
    assert jax.device_get(jmp.metrics(state)) | {"loss_scale": 1, "steps_since_growth": 0} == {
        "loss_scale": 1, "steps_since_growth": 0, "grads_finite": True, "skipped_steps": 1, "consecutive_skips": 1,
        "updates_finite": False,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["reduce_on_plateau", "lbfgs"])
def test_elements_that_begin_infinite_may_stay_so(name):
    """The best value so far of these optimizers begins at infinity."""
    tx = jmp.optim.skip_nonfinite(OPTIMIZERS[name](), check="updates")
    params = {"w": jnp.ones(3)}
    assert any(not jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tx.init(params)) if leaf.dtype == jnp.float32)
    extra = {"value": jnp.float32(1), "grad": params, "value_fn": lambda params: jnp.sum(params["w"] ** 2)}
    step = jax.jit(lambda state: jmp.optim.step(tx, params, state, params, **extra))
    assert bool(step(tx.init(params))[1].step_taken)
    masked = {"mask": jnp.array([0.0, -jnp.inf])}
    _, state = jmp.optim.step(SGD_CHECKED, {"mask": jnp.zeros(2)}, SGD_CHECKED.init(masked), masked)
    assert bool(state.step_taken)


SGD_CHECKED = jmp.optim.skip_nonfinite(optax.sgd(0.1), check="updates")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_half_parameters_keep_their_memories_of_a_bad_update(name):
    tx = jmp.optim.skip_nonfinite(METHODS[name](poisoned(optax.adam(1e-2))), check="updates")
    params = params_of(jnp.bfloat16)
    step = jax.jit(lambda grads, state, params, poison: jmp.optim.step(tx, grads, state, params, poison=poison))
    taken = step(grads_of(0), tx.init(params), params, jnp.float32(0))
    assert taken[1].step_taken
    assert bits(taken[0]) != bits(params)
    skipped, state = step(grads_of(1), *taken[::-1], jnp.float32(np.nan))
    assert not state.updates_finite
    assert bits((skipped, state.inner_state)) == bits((taken[0], taken[1].inner_state))


@pytest.mark.slow
def test_all_devices_and_each_example_of_vmap_decide():
    tx, params = jmp.optim.skip_nonfinite(poisoned(optax.sgd(1.0)), check="updates"), jnp.ones((2, 2))
    step = lambda grads, state, params, poison: jmp.optim.step(tx, grads, state, params, poison=poison)
    new, state = jax.vmap(step)(params, jax.vmap(tx.init)(params), params, jnp.float32([np.nan, 0]))
    assert (new.tolist(), state.skipped_steps.tolist()) == ([[1, 1], [0, 0]], [1, 0])
    mesh, split = make_mesh((2,), ("data",)), PartitionSpec("data")
    sharded = jax.device_put(params, jax.sharding.NamedSharding(mesh, split))
    poison = jax.device_put(jnp.float32([[np.nan], [0]]), jax.sharding.NamedSharding(mesh, split))
    new, state = jax.jit(step, donate_argnums=1)(sharded, tx.init(sharded), sharded, poison)
    assert (new.tolist(), int(state.skipped_steps)) == ([[1, 1], [1, 1]], 1)
    tx = jmp.optim.skip_nonfinite(poisoned(optax.sgd(1.0)), axis_name="data", check="updates")
    state = tx.init(params)
    whole = jax.tree.map(lambda _: PartitionSpec(), state)
    step = lambda grads, state, params, poison: jmp.optim.step(tx, grads, state, params, poison=poison)
    specs = {"in_specs": (split, whole, split, split), "out_specs": (split, whole)}
    new, state = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(sharded, state, sharded, poison)
    assert (new.tolist(), int(state.skipped_steps), bool(state.updates_finite)) == ([[1, 1], [1, 1]], 1, False)


@pytest.mark.slow
def test_the_counters_of_flax_do_not_advance():
    params = {"w": jnp.full(2, 60000.0, jnp.float16)}
    tx = jmp.optim.loss_scaled(optax.sgd(1e4), SCALE, check="updates")
    with pytest.warns(UserWarning, match="stored in float16"):
        state = jmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    state = state.apply_gradients(grads={"w": jnp.full(2, -1.0)})
    assert (int(state.step), state.params["w"].tolist()) == (0, [60000.0, 60000.0])
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = jmp.nnx.Optimizer(
        model, jmp.optim.loss_scaled(optax.sgd(jnp.inf), SCALE, check="updates"), wrt=nnx.Param
    )
    optimizer.update(model, jmp.nnx.grad(lambda model: model(jnp.ones((1, 2))).sum(), loss_scale=optimizer)(model))
    assert (int(optimizer.step[...]), bool(jnp.isfinite(model.kernel[...]).all())) == (0, True)
    assert not jmp.metrics(optimizer)["updates_finite"]


def test_a_run_of_bad_updates_is_stuck_at_any_scale():
    state = SGD_CHECKED.init(jnp.ones(2))._replace(consecutive_skips=jnp.int32(12), updates_finite=jnp.array(False))
    text = (
        r"last 12 steps were skipped \(0 in all\) because their updates were not finite, though .* check='updates'\)\.$"
    )
    for scale in (state.loss_scale, SCALE):
        with pytest.raises(FloatingPointError, match=text):
            jmp.optim.raise_if_stuck(state._replace(loss_scale=scale), jnp.ones(2))
    jmp.optim.raise_if_stuck(state, patience=13)


def test_another_check_is_an_error():
    with pytest.raises(
        ValueError, match=r"check must be 'gradients' or 'updates', got 'params'\. For example: loss_sc"
    ):
        jmp.optim.loss_scaled(optax.sgd(0.1), SCALE, check="params")


def test_the_default_checks_gradients_alone():
    """A step without the check has one test of each gradient, and no other."""
    counts, params = {}, {"b": jnp.ones(2), "w": jnp.ones((2, 2))}
    for check in ("gradients", "updates"):
        tx = jmp.optim.loss_scaled(optax.adamw(1e-3), SCALE, check=check)
        step = jax.jit(functools.partial(jmp.optim.step, tx))
        text = step.lower(params, tx.init(params), params).as_text()
        counts[check] = len(re.findall(r"stablehlo\.is_finite .*(tensor<2xf32>|tensor<2x2xf32>)", text))
    assert counts["gradients"] == 2
    assert counts["updates"] > 2
