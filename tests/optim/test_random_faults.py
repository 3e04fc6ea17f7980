"""Ten thousand steps, of which one in twenty is not finite, and bursts: nothing is lost, and no scale is stuck."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_policy as jmp

STEPS = 10_000
RATE = 0.05
BURST = 80  # bad steps in a row: enough for every scale to fall to its floor
BURSTS = (1000, 7000)  # where they begin
SCALES = {
    "short period": jmp.DynamicLossScale(2.0**15, period=10),
    "long period": jmp.DynamicLossScale(2.0**15, period=40),
    "narrow bounds": jmp.DynamicLossScale(64.0, period=3, min_loss_scale=16.0, max_loss_scale=256.0),
    "uneven rates": jmp.DynamicLossScale(1e4, period=8, factor=1.5, backoff_factor=0.3, max_loss_scale=1e6),
    "hysteresis": jmp.DynamicLossScale(2.0**15, period=20, hysteresis=3),
    "consecutive hysteresis": jmp.DynamicLossScale(2.0**15, period=20, hysteresis=2, consecutive_hysteresis=True),
}
PARAMS = {"w": jnp.array([[1.0, -0.0, 2.0], [-1.5, 0.0, 0.25]]), "b": jnp.array([-0.0, 0.5, -3.0]), "frozen": None}
CEILING_IN_REACH = ("short period", "narrow bounds", "consecutive hysteresis")


@functools.cache
def _finite_steps():
    """Which steps are finite."""
    finite = np.random.default_rng(4).random(STEPS) >= RATE
    for start in BURSTS:
        finite[start : start + BURST] = False
    return finite


def _gradients():
    """Random gradients, with one number of a bad step, in one leaf or the other, that is not finite."""
    rng, bad = np.random.default_rng(5), np.flatnonzero(~_finite_steps())
    flat = rng.normal(size=(STEPS, 9)).astype(np.float32)
    flat[bad, rng.integers(9, size=bad.size)] = rng.choice([np.inf, -np.inf, np.nan], bad.size)
    return {"w": flat[:, :6].reshape(-1, 2, 3), "b": flat[:, 6:], "frozen": None}


def _same_bits(old, new):
    as_integers = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
    same = jax.tree.map(lambda old, new: jnp.array_equal(as_integers(old), as_integers(new)), old, new)
    return jnp.all(jnp.array(jax.tree.leaves(same)))


def _observed_step(tx, carry, grads):
    """A step, and what is to be known of it."""
    params, state = jmp.optim.step(tx, grads, carry[1], carry[0])
    seen = {
        "loss_scale": state.loss_scale.loss_scale,
        "counter": state.loss_scale.counter,
        "credits": state.loss_scale.credits if state.loss_scale.hysteresis > 1 else jnp.int32(0),
        "grads_finite": state.grads_finite,
        "skipped_steps": state.skipped_steps,
        "consecutive_skips": state.consecutive_skips,
        "all_finite": jmp.all_finite((params, state.inner_state)),
        "unchanged": _same_bits((carry[0], carry[1].inner_state), (params, state.inner_state)),
    }
    return (params, state), seen


@pytest.fixture(scope="module")
def histories():
    """What is to be known of every step, by the name of the scale: one program, because compiling takes longest."""
    txs = {name: jmp.optim.loss_scaled(optax.adam(1e-2), scale) for name, scale in SCALES.items()}

    def body(carries, grads):
        seen = {name: _observed_step(tx, carries[name], grads) for name, tx in txs.items()}
        return {name: carry for name, (carry, _) in seen.items()}, {name: row for name, (_, row) in seen.items()}

    start = {name: (PARAMS, tx.init(PARAMS)) for name, tx in txs.items()}
    with jax.numpy_dtype_promotion("standard"):
        _, seen = jax.jit(functools.partial(jax.lax.scan, body))(start, _gradients())
    return jax.tree.map(np.asarray, seen)


@pytest.fixture(params=SCALES)
def scale_and_history(request, histories):
    return SCALES[request.param], histories[request.param]


def _replayed(scale, finite):
    """The scale, its count and its credits after every step, by the rule as it is documented."""
    value, count, credits, full = np.float32(scale.loss_scale), 0, scale.hysteresis - 1, scale.hysteresis - 1
    rows = []
    for good in finite:
        count = count + 1 if good else 0
        complete = count == scale.period
        if complete:
            count, grown = 0, value * np.float32(scale.factor)
            value = grown if grown <= scale.max_loss_scale else value
        if not good and not credits:
            value = max(value * np.float32(scale.backoff_factor), np.float32(scale.min_loss_scale))
        if complete or (good and scale.consecutive_hysteresis):
            credits = full
        elif not good:
            credits = max(credits - 1, 0)
        rows.append((value, count, credits))
    return map(np.array, zip(*rows, strict=True))


@pytest.mark.slow
def test_scale_and_counters_are_those_of_a_model_in_numpy(scale_and_history):
    scale, seen = scale_and_history
    loss_scale, counter, credits = _replayed(scale, _finite_steps())
    np.testing.assert_array_equal(seen["loss_scale"], loss_scale)
    np.testing.assert_array_equal(seen["counter"], counter)
    np.testing.assert_array_equal(seen["credits"], credits)
    np.testing.assert_array_equal(seen["grads_finite"], _finite_steps())
    skipped = np.cumsum(~_finite_steps())
    np.testing.assert_array_equal(seen["skipped_steps"], skipped)
    last_good = np.maximum.accumulate(np.where(_finite_steps(), skipped, 0))
    np.testing.assert_array_equal(seen["consecutive_skips"], skipped - last_good)


@pytest.mark.slow
def test_scale_stays_within_its_bounds_and_comes_back_from_the_floor(scale_and_history):
    scale, seen = scale_and_history
    assert (seen["loss_scale"] >= scale.min_loss_scale).all()
    assert (seen["loss_scale"] <= scale.max_loss_scale).all()
    for start in BURSTS:
        assert seen["loss_scale"][start + BURST - 1] == scale.min_loss_scale
        before, after = seen["loss_scale"][start - 900 : start], seen["loss_scale"][start + BURST : start + 1900]
        assert after.max() >= np.median(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", CEILING_IN_REACH)
def test_scale_waits_at_its_ceiling(histories, name):
    assert (histories[name]["loss_scale"] == SCALES[name].max_loss_scale).mean() > 0.1


@pytest.mark.slow
def test_parameters_and_moments_are_finite_at_every_step(scale_and_history):
    assert scale_and_history[1]["all_finite"].all()


@pytest.mark.slow
def test_parameters_and_moments_change_on_finite_steps_and_on_no_others(scale_and_history):
    np.testing.assert_array_equal(scale_and_history[1]["unchanged"], ~_finite_steps())
