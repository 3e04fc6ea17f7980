"""`loss_scaled` around, beside and under what optax offers: chains, extra arguments, meshes."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh
from optax import contrib
from optimizer_registry import METHODS, WAYS, bits, by_step, by_update, grads_of, params_of, types

import jmp_policy as jmp
from jmp_policy.optim import loss_scaled, skip_nonfinite

DYNAMIC = jmp.DynamicLossScale()
both_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
step_and_slow_update = pytest.mark.parametrize(
    "way", [by_step, pytest.param(by_update, marks=pytest.mark.slow)], ids=WAYS
)


@step_and_slow_update
def test_the_mean_of_the_kept_microbatches_is_applied_and_the_scale_counts_microbatches(way):
    tx = loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2), jmp.DynamicLossScale(8.0, period=2))
    step = jax.jit(functools.partial(way, tx))
    params, state = {"w": jnp.zeros(2)}, tx.init({"w": jnp.zeros(2)})
    scales = []
    for w in ([1.0, 2.0], [np.nan, 1.0], [3.0, 4.0], [1.0, 1.0]):
        params, state = step({"w": jnp.array(w)}, state, params)
        scales.append(float(state.loss_scale.loss_scale))
    assert params["w"].tolist() == [-2.0, -3.0]
    assert scales == [8.0, 4.0, 4.0, 8.0]


@step_and_slow_update
def test_optimizers_without_extra_arguments_ignore_them_and_update_needs_no_parameters(way):
    tx = loss_scaled(optax.GradientTransformation(*optax.sgd(1.0)), jmp.NoOpLossScale())
    params, _ = way(tx, {"w": jnp.ones(1)}, tx.init({"w": jnp.ones(1)}), {"w": jnp.ones(1)}, value=1.0)
    assert params["w"].tolist() == [0.0]
    updates, _ = tx.update({"w": jnp.ones(1)}, tx.init({"w": jnp.ones(1)}))
    assert updates["w"].tolist() == [-1.0]


SGD, W = optax.sgd(1.0), {"w": jnp.ones((2, 3))}
SKIP = skip_nonfinite(SGD)


VALUES = {
    "in loss_scaled or skip_nonfinite twice: an overflow would lower two": lambda: loss_scaled(SKIP, DYNAMIC),
    r"Wrap it once, outermost, for example: loss_scaled\(opt": lambda: skip_nonfinite(optax.chain(SKIP)).init(W),
    r"\['w'\] has the shape \(3,\), but the parameter has": lambda: by_step(SKIP, {"w": jnp.ones(3)}, SKIP.init(W), W),
}
TYPES = {
    r"inner must be an optax transformation, got 0.1. For example: opt": lambda: loss_scaled(0.1, DYNAMIC),
    r"loss_scale must be a LossScale, got 1024.0. For example: policy": lambda: loss_scaled(SGD, 1024.0),
    r"Expected the state of loss_scaled .* got tuple\. .*_replace\(inner_state=": lambda: by_step(
        SKIP, W, SGD.init(W), W
    ),
    r"Expected the state of loss_scaled .* got tuple\. .*_replace\(inner": lambda: by_update(SKIP, W, SGD.init(W), W),
}


@pytest.mark.parametrize("text", VALUES | TYPES)
def test_nestings_settings_and_states_that_do_not_fit_are_errors(text):
    with pytest.raises(ValueError if text in VALUES else TypeError, match=text):
        (VALUES | TYPES)[text]()


@pytest.mark.skipif(not hasattr(optax, "monitor"), reason="optax 0.2.7 introduced monitor")
def test_a_state_that_changes_its_structure_is_an_error_that_names_the_part():
    """The error was JAX's, of pytree prefixes."""
    tx = skip_nonfinite(optax.chain(optax.sgd(1.0), optax.monitor({"size": len})))
    for way in WAYS.values():
        with pytest.raises(ValueError, match=r"structure .*: \[1\]\.measurements\['size'\]\. .*snapshot\('grad"):
            jax.eval_shape(functools.partial(way, tx), W, tx.init(W), W)
    tx = skip_nonfinite(optax.chain(optax.sgd(1.0), optax.snapshot("size", len)))
    jax.eval_shape(functools.partial(by_step, tx), W, tx.init(W), W)


@pytest.mark.parametrize("wrap", [lambda tx: tx, skip_nonfinite], ids=["plain", "skip"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_that_would_change_the_shape_of_a_parameter_is_an_error(dtype, wrap):
    """Alone it changed the shape in silence; under `skip_nonfinite` the error told of branches, or of dtypes."""
    tx = wrap(optax.scale_by_distance_over_gradients())
    params = {"w": jnp.ones(2, dtype), "scale": jnp.ones((), dtype)}
    with warnings.catch_warnings(action="ignore"):  # of half precision
        state = tx.init(params)
    with pytest.raises(ValueError, match=r"would change the shape of \['scale'\] from \(\) to \(1,\)") as error:
        jax.eval_shape(functools.partial(by_step, tx), params, state, params)
    assert "one dtype" not in str(getattr(error.value, "__notes__", ()))


@step_and_slow_update
def test_gradients_of_integers_are_float0_and_leave_their_parameters_alone(way):
    """Weight decay would turn the 5 into a 4."""
    tx = loss_scaled(optax.adamw(1e-2, weight_decay=0.1), DYNAMIC)
    params = {"w": jnp.ones(2), "n": jnp.array([5, -5])}
    none = np.zeros(2, jax.dtypes.float0)
    step = jax.jit(lambda w, state, params: way(tx, {"w": w, "n": none}, state, params))
    start = tx.init(params)
    for w, skipped in ([1.0, 2.0], 0), ([1.0, np.inf], 1):
        new, state = step(jnp.array(w), start, params)
        assert bits(new["n"]) == bits(params["n"])
        assert (bits(new["w"]) == bits(params["w"])) == bool(skipped)
        assert int(state.skipped_steps) == skipped
        assert types(state) == types(start)


def test_float0_passes_through_scales_finite_checks_and_steps_of_any_optimizer():
    params, grads = {"w": jnp.ones(1), "n": jnp.arange(2)}, {"w": jnp.ones(1), "n": np.zeros(2, jax.dtypes.float0)}
    assert DYNAMIC.scale(grads)["n"] is DYNAMIC.unscale(grads)["n"] is grads["n"]
    assert bool(jmp.all_finite(grads))
    params, _ = jmp.optim.step(SGD, grads, SGD.init(params), params)
    assert (params["w"].tolist(), params["n"].tolist()) == ([0.0], [0, 1])


@pytest.mark.parametrize(
    "params",
    [{}, {"none": None}, pytest.param({"n": np.arange(3), "w": np.ones((0, 2), "f")}, marks=pytest.mark.slow)],
    ids=repr,
)
def test_trees_without_numbers_are_finite(params):
    tx = loss_scaled(optax.adamw(1e-2), DYNAMIC)
    new, state = by_step(tx, jax.tree.map(np.zeros_like, params), tx.init(params), params)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert (bool(state.grads_finite), int(state.loss_scale.counter)) == (True, 1)


@both_ways
def test_skip_nonfinite_is_loss_scaled_without_a_scale(way):
    tx = skip_nonfinite(SGD)
    step = jax.jit(functools.partial(way, tx))
    params, state = step(grads_of(0, np.nan), tx.init(params_of()), params_of())
    assert bits(params) == bits(params_of())
    assert state.loss_scale == jmp.NoOpLossScale()
    assert jmp.metrics(state)["loss_scale"] == 1.0
    params, state = step(grads_of(0), state, params)
    assert bits(params) != bits(params_of())
    assert (int(state.skipped_steps), int(state.consecutive_skips)) == (1, 0)


@pytest.mark.parametrize(
    ("way", "wrap"),
    [
        (by_step, jax.jit),
        pytest.param(by_step, lambda step: step, marks=pytest.mark.slow),
        pytest.param(by_update, lambda step: step, marks=pytest.mark.slow),
    ],
)
def test_later_steps_trace_nothing(way, wrap):
    calls = []

    def update(grads, state, params=None):
        calls.append(1)
        return SGD.update(grads, state, params)

    tx = loss_scaled(optax.GradientTransformation(SGD.init, update), DYNAMIC)
    step, params, state = wrap(functools.partial(way, tx)), params_of(), tx.init(params_of())
    params, state = step(grads_of(0), state, params)
    assert calls == [1]
    if wrap is not jax.jit:
        params, state = step(grads_of(1), state, params)  # the first one's results are no weak-typed constants
    calls.clear()
    for seed, bad in [(2, None), (3, np.nan), (4, None)]:
        params, state = step(grads_of(seed, bad), state, params)
    assert calls == []


@step_and_slow_update
def test_python_never_waits_for_the_decision(way, monkeypatch):
    tx = loss_scaled(SGD, DYNAMIC)
    grads, state, params = grads_of(0, np.nan), tx.init(params_of()), params_of()

    def read(*_):
        raise AssertionError("a device array was read on the host")

    with monkeypatch.context() as patch:  # jax.transfer_guard sees nothing on a CPU, where reading copies nothing
        for method in ("__bool__", "__float__", "__int__", "__index__", "__array__", "item", "tolist"):
            patch.setattr(type(jnp.ones(())), method, read)
        params, state = way(tx, grads, state, params)
    assert int(state.skipped_steps) == 1


def test_fresh_states_may_be_donated_one_after_the_other():
    """Each array of a state is its own, also that of the loss scale the user holds on to."""
    tx = loss_scaled(SGD, DYNAMIC)
    step = jax.jit(functools.partial(by_step, tx), donate_argnums=(1, 2))
    for _ in range(2):
        _, state = step(grads_of(0), tx.init(params_of()), params_of())
    assert int(state.loss_scale.counter) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("way", "check_vma"), [(by_step, True), (by_update, False)], ids=WAYS)
def test_all_devices_skip_what_one_of_them_must(way, check_vma):
    """Parameters, moments and gradients in shards; only one device sees the infinity."""
    tx = loss_scaled(optax.adam(1e-2), DYNAMIC, axis_name="d")
    mesh = make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    params, grads = {"w": jnp.arange(8.0) - 3.0}, {"w": jnp.ones(8).at[5].set(jnp.inf)}
    state = tx.init(params)
    specs = jax.tree.map(lambda x: P("d") if jnp.ndim(x) else P(), (grads, state, params))
    step = functools.partial(way, tx)
    step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:0:-1], check_vma=check_vma)
    skipped, after = jax.jit(step)(grads, state, params)
    assert bits((skipped, after.inner_state)) == bits((params, state.inner_state))
    taken, after = jax.jit(step)(jax.tree.map(jnp.ones_like, grads), after, params)
    np.testing.assert_allclose(taken["w"], params["w"] - 1e-2, rtol=1e-5)
    assert (int(after.skipped_steps), int(after.consecutive_skips)) == (1, 0)


def test_an_axis_name_works_under_vmap():
    tx = loss_scaled(SGD, DYNAMIC, axis_name=("i", "j"))
    params, grads = {"w": jnp.ones((2, 2))}, {"w": jnp.array([[1.0, jnp.inf], [1.0, 1.0]])}
    state = tx.init({"w": jnp.ones(())})
    step = jax.vmap(jax.vmap(by_step, (None, 0, None, 0), axis_name="j"), (None, 0, None, 0), axis_name="i")
    skipped, state = step(tx, grads, state, params)
    assert skipped["w"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert state.skipped_steps.tolist() == [[1, 1], [1, 1]]


@pytest.mark.slow
@both_ways
def test_jit_over_a_mesh_keeps_the_sharding(way):
    """Under explicit sharding the zeros of a skipped step must be sharded like the updates they stand for."""
    tx = loss_scaled(optax.adam(1e-2), DYNAMIC)
    mesh = make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        params, grads = jax.device_put((jnp.arange(8.0), jnp.ones(8).at[5].set(jnp.inf)), NamedSharding(mesh, P("d")))
        skipped, state = jax.jit(functools.partial(way, tx))(grads, tx.init(params), params)
    assert bits(skipped) == bits(params)
    assert int(state.skipped_steps) == 1
    assert skipped.sharding.is_equivalent_to(params.sharding, 1)


@pytest.mark.skipif(not hasattr(contrib, "madgrad"), reason="a later optax has madgrad")
@both_ways
def test_a_state_that_is_sharded_only_from_the_first_step_on_may_be_skipped(way):
    """`init` of madgrad under `jit`, without a mesh in the context, makes a state that is not sharded."""
    tx = skip_nonfinite(contrib.madgrad(1e-2))
    mesh = make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    params, grads = jax.device_put((jnp.arange(8.0), jnp.ones(8).at[5].set(jnp.inf)), NamedSharding(mesh, P("d")))
    state = jax.jit(tx.init)(params)
    skipped, after = jax.jit(functools.partial(way, tx))(grads, state, params)
    assert int(after.skipped_steps) == 1
    assert bits((skipped, after.inner_state)) == bits((params, state.inner_state))


@pytest.mark.parametrize("wrap", [lambda tx: loss_scaled(tx, DYNAMIC), skip_nonfinite])
def test_an_optimizer_that_would_lose_small_updates_of_half_parameters_warns_once(wrap):
    """A hundred steps of adam(1e-5) moved nothing, without a word."""
    params, adam = {"layer": {"kernel": jnp.ones(3, jnp.bfloat16)}}, optax.adam(1e-5)
    text = r"^The parameter 'layer/kernel' is stored in bfloat16; an update below 2\*\*-9 .*optim\.master_weights\("
    plain = wrap(adam)
    with pytest.warns(UserWarning, match=text):
        plain.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain.init(params)
        for inner in (*(make(adam) for make in METHODS.values()), optax.chain(optax.clip(1.0), jmp.optim.kahan(adam))):
            jax.eval_shape(wrap(inner).init, params)
        jax.eval_shape(wrap(adam).init, {"kernel": jnp.ones(3)})


ADAM = optax.adam(1e-5)
LATER = {
    "LookaheadState": lambda inner: optax.lookahead(inner, 2, 0.5),
    "ScheduleFreeState": lambda inner: contrib.schedule_free(inner, 1e-5),
    "plateau": lambda inner: optax.chain(optax.clip(1.0), inner, contrib.reduce_on_plateau()),
    "clip": lambda inner: optax.chain(optax.chain(inner), optax.keep_params_nonnegative()),
}
UNCHANGED = {
    "groups": lambda inner: optax.chain(optax.masked(inner, {"w": True}), optax.masked(inner, {"w": False})),
    "frozen": lambda inner: optax.chain(inner, optax.masked(optax.set_to_zero(), {"w": False})),
    "MultiSteps": lambda inner: optax.MultiSteps(inner, 2),
}
if type(optax.named_chain(("one", optax.identity())).init(0.0)) is not dict:  # which has no order under `jit`
    LATER["named"] = lambda inner: optax.named_chain(("adam", inner), ("scale", optax.scale(0.5)))
if hasattr(optax, "snapshot"):  # from optax 0.2.6 on
    UNCHANGED["snapshot"] = lambda inner: optax.chain(inner, optax.snapshot("size", len))


@pytest.mark.parametrize("nesting", LATER | UNCHANGED)
def test_a_change_of_updates_that_master_weights_would_revert_is_a_warning(nesting):
    """The learning rate of `reduce_on_plateau` did nothing, in silence."""
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    start = optax.LookaheadParams.init_synced(params) if nesting == "LookaheadState" else params
    for make in METHODS.values():
        warned = skip_nonfinite((LATER | UNCHANGED)[nesting](make(ADAM)))
        with warnings.catch_warnings(record=True, action="always") as caught:
            jax.eval_shape(warned.init, start)
        assert len(caught) == (nesting in LATER)
        for each in caught:
            kind = nesting if "State" in nesting else "a chain that goes on after it"
            assert f"{kind}: master_weights reverts the change in the next step" in str(each.message)
            assert "For example: loss_scaled(optim.master_weights(optax." in str(each.message)
    with warnings.catch_warnings(action="error"):
        jax.eval_shape(skip_nonfinite(METHODS["masters"]((LATER | UNCHANGED)[nesting](ADAM))).init, start)


def test_half_parameters_that_the_optimizer_freezes_are_no_warning():
    """As the base of LoRA, whose adapters are float32."""
    params = {"adapter": jnp.ones(3), "base": jnp.ones(3, jnp.bfloat16)}
    labels = {"adapter": "train", "base": "freeze"}
    frozen = optax.partition({"train": optax.adam(1e-5), "freeze": optax.set_to_zero()}, labels)
    masked = optax.chain(optax.adam(1e-5), optax.masked(optax.set_to_zero(), {"adapter": False, "base": True}))
    clipped = optax.chain(optax.clip_by_global_norm(1.0), frozen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tx in (frozen, masked, clipped):
            jax.eval_shape(skip_nonfinite(tx).init, params)
    with pytest.warns(UserWarning, match="^The parameter 'adapter' is stored in float16"):
        jax.eval_shape(skip_nonfinite(clipped).init, {**params, "adapter": jnp.ones(3, jnp.float16)})


def test_an_optimizer_that_cannot_be_traced_at_init_warns_and_is_made():
    """Its update needs an axis that only the step has."""

    def mean(updates, state, params=None):
        return jax.tree.map(lambda x: jax.lax.pmean(x, "devices"), updates), state

    tx = optax.chain(optax.GradientTransformation(optax.identity().init, mean), optax.sgd(0.1))
    with pytest.warns(UserWarning, match="^The parameter 'kernel' is stored in bfloat16"):
        state = jmp.optim.skip_nonfinite(tx).init({"kernel": jnp.ones(3, jnp.bfloat16)})
    assert int(state.skipped_steps) == 0


@pytest.mark.slow
def test_an_optimizer_of_nnx_warns_of_half_parameters_too():
    model = jmp.nnx.cast_params(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "float16")
    with pytest.warns(UserWarning, match=r"^The parameter 'bias' is stored in float16; an update below 2\*\*-12 of it"):
        jmp.nnx.Optimizer(model, optax.adam(1e-5), wrt=nnx.Param)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.nnx.Optimizer(model, jmp.optim.master_weights(optax.adam(1e-5)), wrt=nnx.Param)
