"""`skip_spikes` skips a step whose gradient norm or loss is far above the last ones, like a non-finite step."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from meshes import make_mesh
from optimizer_registry import METHODS, OPTIMIZERS, WAYS, bits, grads_of, start_all, step_all, types
from test_skip_forms import forced

import jmp_policy as jmp
from jmp_policy import optim

SCALE = jmp.DynamicLossScale(2.0**10)
SHORT = functools.partial(optim.skip_spikes, window=8, warmup=2)
SGD = optax.sgd(1.0)


def _run(tx, norms, step=optim.step):
    """Steps with one gradient each. Returns which were taken, and the state."""
    params, taken = jnp.zeros(()), []
    state, step = tx.init(params), jax.jit(functools.partial(step, tx))
    for norm in norms:
        before = params
        params, state = step(jnp.float32(norm), state, params)
        taken.append(bool(params != before))
    return taken, state


def _record_norms(steps=600):
    """Norms as of a long run: they fall, vary by a third, and spike now and then."""
    rng = np.random.default_rng(7)
    norms = (1 + 4 * np.exp(-np.arange(steps) / 60)) * rng.lognormal(0, 0.3, steps)
    spikes = rng.choice(np.arange(70, steps), 25, replace=False)
    norms[spikes] *= rng.choice([3, 10, 1000], 25)
    return norms


def _decide_as_levanter(norms, window=128, factor=6.0):
    """The rule of levanter's `SkipStepConfig` in float64, but only accepted steps count."""
    accepted, taken = [], []
    for norm in norms:
        last = np.asarray(accepted[-window:])
        judged = len(accepted) >= max(2, window // 2)
        taken.append(not judged or norm <= last.mean() + factor * max(last.std(), 1e-6))
        accepted += [norm] * int(taken[-1])
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_decisions_are_those_of_levanters_rule(way):
    norms = _record_norms()
    taken, state = _run(optim.skip_spikes(SGD), norms, WAYS[way])
    assert taken == _decide_as_levanter(norms)
    assert int(state.spike_steps) == taken.count(False) > 15
    np.testing.assert_allclose(np.sort(state.history), np.sort(norms[taken][-128:]).astype(np.float32), rtol=1e-6)
    assert float(state.last_spike) == pytest.approx(norms[~np.array(taken)][-1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "form"), [("step", "branch"), ("step", "select"), ("update", "branch")])
def test_a_spike_leaves_every_bit_and_the_loss_scale(way, form):
    """Law 14 over the registry, in one program."""
    large = lambda seed: jax.tree.map(lambda x: 1e3 * x, grads_of(seed))
    with forced(form):
        txs = {name: optim.loss_scaled(SHORT(make()), SCALE) for name, make in OPTIMIZERS.items()}
        carries, step = start_all(txs), jax.jit(functools.partial(step_all, txs, way))
        for seed, grads in enumerate([grads_of(0), grads_of(1), large(2), grads_of(3), grads_of(4, np.nan), large(5)]):
            after = step(carries, grads)
            for name in txs:
                (params, state), (new_params, new_state) = carries[name], after[name]
                kept = bits((new_params, new_state.inner_state.inner_state))
                assert (kept == bits((params, state.inner_state.inner_state))) == (seed in (2, 4, 5)), name
                assert types(after[name]) == types(carries[name]), name
                assert bool(new_state.step_taken) == (seed not in (2, 4, 5)), name
                if seed in (2, 5):
                    assert bits(new_state.loss_scale) == bits(state.loss_scale), name
            carries = after
    for name, (_, state) in carries.items():
        found = jmp.metrics(state)
        names = ("spike_steps", "skipped_steps", "consecutive_skips", "steps_since_growth", "loss_scale")
        assert [float(found[each]) for each in names] == [2, 1, 0, 0, 512], name


def test_a_change_of_level_is_accepted_after_some_spikes_and_told():
    tx = SHORT(SGD, max_consecutive=3)
    level = [1.0, 1.1, 0.9, 1.0]
    taken, state = _run(tx, [*level, *[50.0] * 4])
    assert taken == [True] * 4 + [False] * 3 + [True]
    with pytest.raises(FloatingPointError, match=r"The last 4 steps were spikes, the last one of 50\. skip_spikes acc"):
        optim.raise_if_stuck(state)
    taken, state = _run(tx, [*level, *[50.0] * 20])
    assert taken == [True] * 4 + [False] * 3 + [True] * 17  # within the limit after the forced one
    assert (int(state.consecutive_spikes), int(state.forced_steps), int(state.spike_steps)) == (0, 1, 3)
    with pytest.warns(
        UserWarning, match=r"skip_spikes accepted 1 spikes, each after max_consecutive others: the level"
    ):
        optim.raise_if_stuck(optim.skip_nonfinite(tx).init(jnp.zeros(()))._replace(inner_state=state))
    optim.raise_if_stuck(_run(tx, [*level, 50.0, 1.0])[1])


def test_alone_it_skips_non_finite_steps_at_all_times():
    taken, state = _run(SHORT(SGD, max_consecutive=2), [np.nan, 1.0, np.inf, 1.1, 0.9, *[np.nan] * 10])
    assert taken == [False, True, False, True, True, *[False] * 10]
    assert float(state.last_spike) == np.finfo(np.float32).max  # a state of finite numbers
    with pytest.raises(FloatingPointError, match=r"stuck: skip_spikes skipped the last 10 steps, whose gradients or"):
        optim.raise_if_stuck(state)
    optim.raise_if_stuck(state, patience=11)
    assert jmp.metrics(state).keys() == {"spike_steps", "last_spike"}


def test_rounding_errors_of_equal_norms_are_no_spikes():
    taken, _ = _run(SHORT(SGD), [1.0] * 10 + [1.0 + 1e-6, 1.005, 1.0, 1.02])
    assert taken == [True] * 13 + [False]


def test_the_loss_decides_if_asked_and_minimize_passes_it():
    loss_fn = lambda w, x: jnp.sum(x * w) + 10.0  # the gradient does not tell the two batches of opposite signs apart
    for wrap in (lambda tx: tx, lambda tx: optim.loss_scaled(tx, SCALE), optim.skip_nonfinite):
        tx, params = wrap(SHORT(optax.sgd(1e-3), of="loss")), jnp.ones(2)
        state, step, taken = tx.init(params), jax.jit(optim.minimize(loss_fn, tx)), []
        for x in (1.0, -1.0, 1.0, -1.0, 1000.0, -1000.0):
            params, state, _ = step(params, state, x)
            taken.append(bool(state.step_taken))
        assert taken == [True] * 4 + [False, True]
    tx = optim.skip_nonfinite(SHORT(SHORT(SGD, of="loss")))  # both statistics, as in levanter
    params, state = jnp.ones(2), tx.init(jnp.ones(2))
    for grad, loss in [(1.0, 1.0), (1.0, 1.0), (1.0, 9.0), (9.0, 1.0), (1.0, 1.0)]:
        params, state = optim.step(tx, jnp.full(2, grad), state, params, value=jnp.float32(loss))
    assert params.tolist() == [-2.0, -2.0]
    assert int(jmp.metrics(state)["spike_steps"]) == 2
    outer = state.inner_state
    assert (int(outer.accepted_steps), int(outer.inner_state.accepted_steps)) == (3, 3)  # of steps that were taken


def test_it_runs_with_64_bits_and_strict_promotion():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        tx, params = optim.loss_scaled(SHORT(SGD), SCALE), jnp.ones(2)
        state = tx.init(params)
        after = jax.eval_shape(functools.partial(optim.step, tx), params, state, params)[1]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == types(state)


@pytest.mark.parametrize("extra", [{}, {"value": jnp.ones(2)}])
def test_a_missing_loss_is_an_error(extra):
    tx = SHORT(SGD, of="loss")
    with pytest.raises(ValueError, match=r"needs the loss, a scalar, as the extra argument value, got .*value=loss\)"):
        optim.step(tx, jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), **extra)


def test_around_multi_steps_it_judges_microbatches_and_inside_their_mean():
    grads = [1.0, 3.0, 1.0, 3.0, 1.0, 300.0, 1.0, 3.0]
    around, state = _run(optim.skip_nonfinite(SHORT(optax.MultiSteps(SGD, 2), warmup=4)), grads)
    assert around == [False, True, False, True, False, False, True, False]  # the bad microbatch is left out
    assert int(jmp.metrics(state)["spike_steps"]) == 1
    inside, state = _run(optim.skip_nonfinite(optax.MultiSteps(SHORT(SGD), 2)), grads)
    assert inside == [False, True, False, True, False, False, False, True]  # the mean is
    assert (int(jmp.metrics(state)["spike_steps"]), bool(state.step_taken)) == (1, True)
    _, state = _run(optim.loss_scaled(optax.MultiSteps(SHORT(SGD), 2), SCALE), [1.0, 1.0, 1.0, 1.0, 1.0, 300.0])
    assert not state.step_taken
    assert int(state.loss_scale.counter) == 5
    find = optim.find_origin(lambda w: 300.0 * w, optim.loss_scaled(optax.MultiSteps(SHORT(SGD), 2), SCALE))
    _, before = _run(find.tx, [1.0] * 5)
    assert find.verdict(jnp.zeros(()), before).kind == "spike"


CHAIN, ONES = optax.chain(optax.clip_by_global_norm(1.0), SHORT(SGD)), jnp.ones(2)
IN_CHAIN = r"skip_spikes goes outside of all but .* state tuple: .*: loss_scaled\(skip_spikes\(optax\.chain\("
SLOW_ONES = optax.LookaheadParams.init_synced(ONES)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: optim.loss_scaled(CHAIN, SCALE).init(ONES), IN_CHAIN),
        (lambda: optim.step(CHAIN, ONES, CHAIN.init(ONES), ONES), IN_CHAIN),
        (lambda: SHORT(optax.lookahead(SHORT(SGD), 5, 0.5)).init(SLOW_ONES), "state LookaheadState: it would measure"),
        (lambda: SHORT(optim.skip_nonfinite(SGD)).init(ONES), r"go outside of skip_spikes, .*scaled\(skip_spikes"),
        (lambda: optim.kahan(SHORT(SGD)), "kahan goes inside of loss_scaled, skip_spikes, master"),
        (lambda: SHORT(SGD, of="norm"), r"of must be 'grad_norm' or 'loss', got 'norm'\. For example: skip_spikes\("),
        (lambda: SHORT(SGD, window=8.5), r"window must be an integer of at least 2, got 8\.5"),
        (lambda: SHORT(SGD, factor=None), "factor must be a positive number, got None"),
        (lambda: optim.loss_scaled(optax.MultiSteps(CHAIN, 2), SCALE).init(ONES), "state MultiStepsState: it would"),
        (lambda: SHORT(SGD, factor=0.0), r"factor must be a positive number, got 0\.0\. For example: skip_spikes\("),
        (lambda: SHORT(SGD, factor=np.nan), "factor must be a positive number, got nan"),
        (lambda: SHORT(SGD, window=1), "window must be an integer of at least 2, got 1"),
        (lambda: SHORT(SGD, warmup=0), "warmup must be an integer of at least 1, got 0"),
        (lambda: SHORT(SGD, max_consecutive=0), "max_consecutive must be an integer of at least 1, got 0"),
    ],
)  # fmt: skip
def test_wrong_nestings_and_settings_are_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_another_thing_than_an_optimizer_or_its_state_is_an_error():
    with pytest.raises(TypeError, match=r"tx must be an optax transformation, got .* For example: sgd\(1e-3\)"):
        optim.skip_spikes(optax.sgd)
    with pytest.raises(
        TypeError, match=r"Expected the state of skip_spikes, got tuple\. For example: opt_state = tx\."
    ):
        optim.step(SHORT(SGD), jnp.ones(2), SGD.init(jnp.ones(2)), jnp.ones(2))


@pytest.mark.slow
def test_the_counters_of_flax_and_float8_state_do_not_advance():
    tx = optim.loss_scaled(SHORT(optax.sgd(0.1)), SCALE)
    state = jmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    for grad in (1.0, 1.1, 99.0, 1.0):
        state = state.apply_gradients(grads={"w": jnp.full(2, grad)})
    assert (int(state.step), int(jmp.metrics(state)["spike_steps"])) == (3, 1)
    by_loss = optim.skip_nonfinite(SHORT(SGD, of="loss"))
    state = jmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=by_loss)
    for loss in (1.0, 1.1, 99.0):
        state = state.apply_gradients(grads={"w": jnp.ones(2)}, value=jnp.float32(loss))
    assert int(state.step) == 2
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = jmp.nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss_fn = lambda model: jnp.sum(model(jnp.full((1, 2), x)))
        optimizer.update(model, jmp.nnx.grad(loss_fn, loss_scale=optimizer)(model))

    for x in (1.0, 1.1, 99.0, 1.0):
        step(model, optimizer, x)
    assert (int(optimizer.step[...]), int(jmp.metrics(optimizer)["spike_steps"])) == (3, 1)
    optim.raise_if_stuck(optimizer)
    params = {"w": jnp.ones(2), "_overwrite_with_gradient": {"input_scale": jnp.ones(1)}}
    grads = lambda x: {"w": jnp.full(2, x), "_overwrite_with_gradient": {"input_scale": jnp.full(1, x)}}
    for tx in (SHORT(SGD), optim.skip_nonfinite(SHORT(SGD))):
        new, opt_state = params, tx.init(params)
        for x in (1.0, 2.0, 99.0):
            new, opt_state = optim.step(tx, grads(x), opt_state, new)
        assert new["_overwrite_with_gradient"]["input_scale"].tolist() == [2.0]


@pytest.mark.slow
@pytest.mark.parametrize("of", ["grad_norm", "loss"])
def test_devices_with_other_gradients_decide_alike(of):
    mesh, split = make_mesh((2,), ("data",)), PartitionSpec("data")
    tx = SHORT(SGD, of=of, axis_name="data")
    spec = jax.tree.map(lambda _: PartitionSpec(), jax.eval_shape(tx.init, jnp.ones(1)))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(split, spec, split), out_specs=(split, spec))
    def step(x, state, params):
        return optim.step(tx, x, state, params, value=x[0])

    put = lambda x: jax.device_put(jnp.float32(x), jax.sharding.NamedSharding(mesh, split))
    params, state = put([0, 0]), tx.init(jnp.ones(1))
    for x in ([3, 4], [4, 3], [3, 90], [3, 4]):
        params, state = step(put(x), state, params)
    assert params.tolist() == [-10.0, -11.0]
    assert int(state.spike_steps) == 1
    expected = 3.5 if of == "loss" else 5.0
    np.testing.assert_allclose(state.history[:3], expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_it_goes_around_half_parameters_and_each_example_of_vmap_decides(name):
    tx, params = optim.loss_scaled(SHORT(METHODS[name](optax.adam(1e-2))), SCALE), jnp.ones((2, 4), jnp.bfloat16)
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(functools.partial(optim.step, tx)))
    for factor in ([1.0, 1.0], [1.1, 0.9], [99.0, 1.0]):
        before = params, state.inner_state.inner_state
        params, state = step(jnp.float32(factor)[:, None] * jnp.ones((2, 4)), state, params)
    one = lambda tree, i: bits(jax.tree.map(lambda x: x[i], tree))
    after = params, state.inner_state.inner_state
    assert one(after, 0) == one(before, 0)
    assert one(after, 1) != one(before, 1)
    assert jmp.metrics(state)["spike_steps"].tolist() == [1, 0]


@pytest.mark.slow
def test_its_state_goes_through_checkpoints_and_starts_anew_in_one_without_it():
    tx = optim.loss_scaled(SHORT(optax.adam(0.1)), SCALE)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    for grad in (1.0, 1.1, 99.0):
        params, state = optim.step(tx, {"w": jnp.full(3, grad)}, state, params)
    assert bits(flax.serialization.from_bytes(tx.init(params), flax.serialization.to_bytes(state))) == bits(state)
    without = optim.loss_scaled(optax.adam(0.1), SCALE)
    saved = flax.serialization.to_state_dict(state)
    found = jmp.convert_state(saved, without.init(params))
    assert bits(found.inner_state) == bits(state.inner_state.inner_state)
    saved = flax.serialization.to_state_dict(found)
    for target in (tx.init(params), jax.eval_shape(tx.init, params)):
        again = jmp.convert_state(saved, target)
        assert bits(again.inner_state.inner_state) == bits(found.inner_state)
        assert (bool(again.inner_state.accepted), int(again.inner_state.accepted_steps)) == (True, 0)
    checked = optim.loss_scaled(optax.adam(0.1), SCALE, check="updates")
    assert bool(jmp.convert_state(saved, jax.eval_shape(checked.init, params)).updates_finite)


@pytest.mark.parametrize("of", ["grad_norm", "loss"])
def test_the_loss_does_not_reach_an_optimizer_that_takes_other_arguments(of):
    """`minimize` passed it to `optax.contrib.sam`, which raised an error about an unexpected argument."""
    sam = optax.contrib.sam(optax.sgd(0.5), optax.sgd(0.5), sync_period=2)
    tx = optim.loss_scaled(optim.skip_spikes(sam, of=of), jmp.NoOpLossScale())
    step = jax.jit(optim.minimize(lambda params: jnp.sum(params["w"] ** 2), tx))
    params, state = {"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)})
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):
            params, state, _ = step(params, state)
    assert bool(state.step_taken)
    assert int(optax.tree_utils.tree_get(state, "accepted_steps")) == 2
