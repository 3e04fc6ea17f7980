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
from optimizer_registry import WAYS, bits, by_step, by_update, grads_of, params_of, types

import jmp_policy as jmp


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


class TestMultiSteps:
    @pytest.mark.slow
    def test_a_bad_microbatch_is_dropped_and_the_rest_kept(self, way):
        tx = jmp.optim.loss_scaled(optax.MultiSteps(optax.adam(1e-2), 3), jmp.DynamicLossScale())
        step = jax.jit(functools.partial(way, tx))
        with_bad, without = (params_of(), tx.init(params_of())), (params_of(), tx.init(params_of()))
        for seed, bad in [(0, None), (9, np.nan), (1, None), (9, np.inf), (2, None), (3, None)]:
            with_bad = step(grads_of(seed, bad), with_bad[1], with_bad[0])
            if bad is None:
                without = step(grads_of(seed), without[1], without[0])
        assert bits((with_bad[0], with_bad[1].inner_state)) == bits((without[0], without[1].inner_state))
        assert int(with_bad[1].inner_state.gradient_step) == 1

    @pytest.mark.slow
    def test_the_mean_of_the_kept_microbatches_is_applied(self):
        tx = jmp.optim.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2), jmp.DynamicLossScale())
        step = jax.jit(functools.partial(by_step, tx))
        params, state = {"w": jnp.zeros(2)}, tx.init({"w": jnp.zeros(2)})
        for w in ([1.0, 2.0], [np.nan, 1.0], [3.0, 4.0]):
            params, state = step({"w": jnp.array(w)}, state, params)
        assert params["w"].tolist() == [-2.0, -3.0]

    @pytest.mark.slow
    def test_extra_arguments_reach_the_optimizer_inside(self, way):
        inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
        tx = jmp.optim.loss_scaled(optax.MultiSteps(inner, 2), jmp.DynamicLossScale())
        _, state = way(tx, grads_of(0), tx.init(params_of()), params_of(), value=jnp.float32(3))
        assert int(state.inner_state.mini_step) == 1

    @pytest.mark.slow
    def test_optim_step_hands_extra_arguments_to_a_bare_one(self):
        tx = optax.MultiSteps(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau()), 2)
        _, state = jmp.optim.step(tx, grads_of(0), tx.init(params_of()), params_of(), value=jnp.float32(3))
        assert int(state.mini_step) == 1


class TestExtraArguments:
    @pytest.mark.slow
    def test_a_skipped_step_is_no_plateau(self, way):
        inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
        tx = jmp.optim.loss_scaled(inner, jmp.DynamicLossScale())
        step = jax.jit(functools.partial(way, tx))
        params, state = params_of(), tx.init(params_of())
        for seed, bad in enumerate([None, np.nan, np.nan, np.nan]):
            params, state = step(grads_of(seed, bad), state, params, value=jnp.float32(1))
        plateau = state.inner_state[-1]
        assert (float(plateau.scale), int(plateau.plateau_count)) == (1.0, 0)

    @pytest.mark.slow
    def test_functions_may_be_extra_arguments(self, way):
        """A line search evaluates the loss at other parameters: no branch takes a function as an operand."""
        inner = optax.lbfgs(memory_size=2)
        tx = jmp.optim.loss_scaled(inner, jmp.DynamicLossScale())
        loss_fn = lambda params: jnp.sum((params["w"] - 1.0) ** 2)

        @functools.partial(jax.jit, static_argnums=0)
        def train_step(tx, params, state):
            value, grads = jax.value_and_grad(loss_fn)(params)
            return way(tx, grads, state, params, value=value, grad=grads, value_fn=loss_fn)

        params = {"w": jnp.array([3.0, -2.0])}
        searched, state = train_step(tx, params, tx.init(params))
        alone, _ = train_step(inner, params, inner.init(params))
        np.testing.assert_allclose(searched["w"], alone["w"], rtol=1e-6)
        assert bool(state.grads_finite)

    @pytest.mark.slow
    def test_optimizers_without_extra_arguments_ignore_them(self, way):
        tx = jmp.optim.loss_scaled(optax.GradientTransformation(*optax.sgd(1.0)), jmp.NoOpLossScale())
        params, _ = way(tx, {"w": jnp.ones(1)}, tx.init({"w": jnp.ones(1)}), {"w": jnp.ones(1)}, value=1.0)
        assert params["w"].tolist() == [0.0]


class TestPlacement:
    @pytest.mark.slow
    def test_update_needs_no_parameters(self):
        tx = jmp.optim.skip_nonfinite(optax.sgd(1.0))
        updates, _ = tx.update({"w": jnp.ones(1)}, tx.init({"w": jnp.ones(1)}))
        assert updates["w"].tolist() == [-1.0]

    @pytest.mark.slow
    def test_in_a_chain_the_others_see_negative_zeros(self):
        tx = optax.chain(jmp.optim.loss_scaled(optax.scale(-1.0), jmp.DynamicLossScale()), optax.scale(0.5))
        params, state = by_update(tx, grads_of(0, np.inf), tx.init(params_of()), params_of())
        assert bits(params) == bits(params_of())
        assert int(jmp.metrics(state)["skipped_steps"]) == 1

    @pytest.mark.slow
    def test_the_learning_rate_can_be_set_from_outside(self, way):
        tx = jmp.optim.loss_scaled(optax.inject_hyperparams(optax.sgd)(1.0), jmp.DynamicLossScale())
        state = optax.tree_utils.tree_set(tx.init({"w": jnp.ones(1)}), learning_rate=0.5)
        params, _ = way(tx, {"w": jnp.ones(1)}, state, {"w": jnp.ones(1)})
        assert params["w"].tolist() == [0.5]

    def test_twice_is_an_error_at_once(self):
        with pytest.raises(ValueError, match="in loss_scaled or skip_nonfinite twice: an overflow would lower two"):
            jmp.optim.loss_scaled(jmp.optim.skip_nonfinite(optax.sgd(1.0)), jmp.DynamicLossScale())

    def test_twice_is_an_error_however_deep(self):
        chain = optax.chain(optax.clip(1.0), jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale()))
        tx = jmp.optim.skip_nonfinite(optax.MultiSteps(chain, 2))
        with pytest.raises(ValueError, match=r"Wrap it once, outermost, for example: loss_scaled\(optax.chain"):
            tx.init(params_of())

    def test_what_is_no_optimizer_is_refused(self):
        with pytest.raises(TypeError, match=r"inner must be an optax transformation, got 0.1. For example: optax"):
            jmp.optim.loss_scaled(0.1, jmp.NoOpLossScale())

    def test_what_is_no_loss_scale_is_refused(self):
        with pytest.raises(TypeError, match=r"loss_scale must be a LossScale, got 1024.0. For example: policy"):
            jmp.optim.loss_scaled(optax.sgd(1.0), 1024.0)


class TestTrees:
    @pytest.mark.slow
    def test_gradients_of_integers_are_float0_and_leave_their_parameters_alone(self, way):
        """Weight decay would turn the 5 into a 4."""
        tx = jmp.optim.loss_scaled(optax.adamw(1e-2, weight_decay=0.1), jmp.DynamicLossScale())
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

    def test_float0_passes_through_scales_and_finite_checks(self):
        grads = {"n": np.zeros(2, jax.dtypes.float0)}
        scale = jmp.DynamicLossScale()
        assert scale.scale(grads)["n"] is grads["n"]
        assert scale.unscale(grads)["n"] is grads["n"]
        assert bool(jmp.all_finite(grads))

    def test_any_optimizer_may_step_over_integers(self):
        params, grads = {"w": jnp.ones(1), "n": jnp.arange(2)}, {"w": jnp.ones(1), "n": np.zeros(2, jax.dtypes.float0)}
        params, _ = jmp.optim.step(optax.sgd(1.0), grads, optax.sgd(1.0).init(params), params)
        assert (params["w"].tolist(), params["n"].tolist()) == ([0.0], [0, 1])

    @pytest.mark.slow
    @pytest.mark.parametrize("params", [{}, {"none": None}, {"n": np.arange(3)}, {"w": np.ones((0, 2), "f")}], ids=repr)
    def test_trees_without_numbers_are_finite(self, way, params):
        tx = jmp.optim.loss_scaled(optax.adamw(1e-2), jmp.DynamicLossScale())
        grads = jax.tree.map(np.zeros_like, params)
        new, state = way(tx, grads, tx.init(params), params)
        assert jax.tree.structure(new) == jax.tree.structure(params)
        assert (bool(state.grads_finite), int(state.loss_scale.counter)) == (True, 1)


class TestSkipNonfinite:
    @pytest.mark.slow
    def test_one_infinity_would_poison_the_moments_for_good(self, way):
        inner = optax.adam(1e-2)
        history = [grads_of(seed, np.inf if seed == 1 else None, jnp.bfloat16) for seed in range(6)]
        history = jax.tree.map(lambda *x: jnp.stack(x), *history)
        for tx, lives in (inner, False), (jmp.optim.skip_nonfinite(inner), True):
            body = lambda carry, grads, tx=tx: (way(tx, jmp.cast_to_full(grads), carry[1], carry[0]), None)
            train = jax.jit(functools.partial(jax.lax.scan, body))
            trained, _ = train((params_of(), tx.init(params_of())), history)
            assert bool(jmp.all_finite(trained)) == lives

    @pytest.mark.slow
    def test_it_is_loss_scaled_without_a_scale(self, way):
        tx = jmp.optim.skip_nonfinite(optax.adam(1e-2))
        step = jax.jit(functools.partial(way, tx))
        params, state = step(grads_of(0, np.nan), tx.init(params_of()), params_of())
        assert bits(params) == bits(params_of())
        assert state.loss_scale == jmp.NoOpLossScale()
        assert jmp.metrics(state)["loss_scale"] == 1.0
        params, state = step(grads_of(0), state, params)
        assert bits(params) != bits(params_of())
        assert (int(state.skipped_steps), int(state.consecutive_skips)) == (1, 0)


class TestEager:
    @pytest.fixture
    def counted(self):
        """An optimizer wrapped, and the list that grows whenever the optimizer is traced or run."""
        calls, sgd = [], optax.sgd(1.0)

        def update(grads, state, params=None):
            calls.append(1)
            return sgd.update(grads, state, params)

        return jmp.optim.loss_scaled(optax.GradientTransformation(sgd.init, update), jmp.DynamicLossScale()), calls

    @pytest.mark.slow
    def test_the_second_step_traces_nothing(self, way, counted):
        tx, calls = counted
        params, state = way(tx, grads_of(0), tx.init(params_of()), params_of())
        params, state = way(tx, grads_of(1), state, params)  # the first one's results are no weak-typed constants
        calls.clear()
        for seed, bad in [(2, None), (3, np.nan), (4, None)]:
            params, state = way(tx, grads_of(seed, bad), state, params)
        assert calls == []

    @pytest.mark.sample(1)
    def test_jit_traces_the_optimizer_once(self, way, counted):
        tx, calls = counted
        step = jax.jit(functools.partial(way, tx))
        params, state = params_of(), tx.init(params_of())
        for seed, bad in [(0, None), (1, np.nan), (2, None)]:
            params, state = step(grads_of(seed, bad), state, params)
        assert calls == [1]

    @pytest.mark.slow
    def test_python_never_waits_for_the_decision(self, way, monkeypatch):
        tx = jmp.optim.loss_scaled(optax.adam(1e-2), jmp.DynamicLossScale())
        grads, state, params = grads_of(0, np.nan), tx.init(params_of()), params_of()

        def read(*_):
            raise AssertionError("a device array was read on the host")

        with monkeypatch.context() as patch:  # jax.transfer_guard sees nothing on a CPU, where reading copies nothing
            for method in ("__bool__", "__float__", "__int__", "__index__", "__array__", "item", "tolist"):
                patch.setattr(type(jnp.ones(())), method, read)
            params, state = way(tx, grads, state, params)
        assert int(state.skipped_steps) == 1


class TestDevices:
    def _problem(self):
        params = {"w": jnp.arange(8.0) - 3.0, "b": jnp.array(-0.0)}
        return params, {"w": jnp.ones(8).at[5].set(jnp.inf), "b": jnp.array(1.0)}

    @pytest.mark.slow
    @pytest.mark.parametrize("check_vma", [True, False])
    def test_all_devices_skip_what_one_of_them_must(self, way, check_vma):
        """Parameters, moments and gradients in shards; only one device sees the infinity."""
        tx = jmp.optim.loss_scaled(optax.adam(1e-2), jmp.DynamicLossScale(), axis_name="d")
        mesh = make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        params, grads = {"w": self._problem()[0]["w"]}, {"w": self._problem()[1]["w"]}
        state = tx.init(params)
        specs = jax.tree.map(lambda x: P("d") if jnp.ndim(x) else P(), (grads, state, params))
        step = jax.jit(
            jax.shard_map(
                functools.partial(way, tx), mesh=mesh, in_specs=specs, out_specs=specs[:0:-1], check_vma=check_vma
            )
        )
        skipped, after = step(grads, state, params)
        assert bits((skipped, after.inner_state)) == bits((params, state.inner_state))
        taken, after = step(jax.tree.map(jnp.ones_like, grads), after, params)
        np.testing.assert_allclose(taken["w"], params["w"] - 1e-2, rtol=1e-5)
        assert (int(after.skipped_steps), int(after.consecutive_skips)) == (1, 0)

    @pytest.mark.slow
    @pytest.mark.parametrize("check_vma", [True, False])
    def test_averaged_gradients_need_no_axis_name(self, way, check_vma):
        tx = jmp.optim.loss_scaled(optax.adam(1e-2), jmp.DynamicLossScale())
        mesh = make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

        def step(grads, state, params):
            grads = jax.lax.pmean(jax.tree.map(lambda g: g.sum(0), grads), "d")
            return way(tx, grads, state, params)

        step = jax.shard_map(step, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=(P(), P()), check_vma=check_vma)
        grads = {"w": jnp.ones((4, 8)).at[2, 3].set(jnp.nan), "b": jnp.ones(4)}
        params = self._problem()[0]
        skipped, state = jax.jit(step)(grads, tx.init(params), params)
        assert bits(skipped) == bits(params)
        assert int(state.skipped_steps) == 1

    @pytest.mark.slow
    def test_an_axis_name_works_under_vmap(self, way):
        tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(), axis_name=("i", "j"))
        params = {"w": jnp.ones((2, 2))}
        grads = {"w": jnp.array([[1.0, jnp.inf], [1.0, 1.0]])}
        state = tx.init({"w": jnp.ones(())})
        step = jax.vmap(jax.vmap(way, (None, 0, None, 0), axis_name="j"), (None, 0, None, 0), axis_name="i")
        skipped, state = step(tx, grads, state, params)
        assert skipped["w"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert state.skipped_steps.tolist() == [[1, 1], [1, 1]]

    @pytest.mark.slow
    def test_fresh_states_may_be_donated_one_after_the_other(self, way):
        """Each array of a state is its own, also that of the loss scale the user holds on to."""
        tx = jmp.optim.loss_scaled(optax.adam(1e-2), jmp.DynamicLossScale())
        step = jax.jit(functools.partial(way, tx), donate_argnums=(1, 2))
        for _ in range(2):
            _, state = step(grads_of(0), tx.init(params_of()), params_of())
        assert int(state.loss_scale.counter) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    def test_jit_over_a_mesh_keeps_the_sharding(self, way, axis_type):
        """Under explicit sharding the zeros of a skipped step must be sharded like the updates they stand for."""
        tx = jmp.optim.loss_scaled(optax.adam(1e-2), jmp.DynamicLossScale())
        mesh = make_mesh((4,), ("d",), axis_types=(axis_type,))
        with jax.set_mesh(mesh):
            place = lambda x: jax.device_put(x, NamedSharding(mesh, P("d") if x.ndim else P()))
            params, grads = jax.tree.map(place, self._problem())
            skipped, state = jax.jit(functools.partial(way, tx))(grads, tx.init(params), params)
        assert bits(skipped) == bits(params)
        assert int(state.skipped_steps) == 1
        assert skipped["w"].sharding.is_equivalent_to(params["w"].sharding, 1)


@pytest.mark.parametrize("way", ["step", "update"])
def test_state_saved_without_a_loss_scale_is_an_error_that_says_where_it_goes(way):
    tx = jmp.optim.skip_nonfinite(optax.sgd(1.0))
    params = {"w": jnp.ones(2)}
    take = tx.update if way == "update" else functools.partial(jmp.optim.step, tx)
    with pytest.raises(TypeError, match=r"Expected the state of loss_scaled .* got tuple\. .*_replace\(inner_state="):
        take(params, optax.sgd(1.0).init(params), params)


def test_gradients_of_another_shape_are_named():
    tx = jmp.optim.skip_nonfinite(optax.adam(1e-3))
    params = {"layer": {"w": jnp.ones((2, 3))}}
    with pytest.raises(ValueError, match=r"\['layer'\]\['w'\] has the shape \(3, 2\), but the parameter has"):
        jmp.optim.step(tx, {"layer": {"w": jnp.ones((3, 2))}}, tx.init(params), params)


@pytest.mark.slow
def test_around_multisteps_the_scale_counts_microbatches():
    tx = jmp.optim.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 3), jmp.DynamicLossScale(8.0, period=2 * 3))
    update = jax.jit(lambda state: tx.update({"w": jnp.ones(2)}, state, {"w": jnp.ones(2)})[1])
    state, scales = tx.init({"w": jnp.ones(2)}), []
    for _ in range(6):
        state = update(state)
        scales.append(float(state.loss_scale.loss_scale))
    assert scales == [8.0] * 5 + [16.0]  # at the end of the second step of three
    assert int(state.inner_state.gradient_step) == 2


@pytest.mark.parametrize(
    "wrap", [lambda tx: jmp.optim.loss_scaled(tx, jmp.DynamicLossScale()), jmp.optim.skip_nonfinite]
)
def test_an_optimizer_that_would_lose_small_updates_of_half_parameters_warns_once(wrap):
    """A hundred steps of adam(1e-5) moved nothing, without a word."""
    params = {"layer": {"kernel": jnp.ones(3, jnp.bfloat16)}}
    text = r"^The parameter 'layer/kernel' is stored in bfloat16; an update below 2\*\*-9 .*optim\.master_weights\("
    plain = wrap(optax.adam(1e-5))
    with pytest.warns(UserWarning, match=text):
        plain.init(params)
    forms = [
        jmp.optim.master_weights,
        lambda tx: jmp.optim.master_weights(tx, mode="split"),
        jmp.optim.kahan,
        lambda tx: jmp.optim.stochastic_rounding(tx, jax.random.key(0)),
        lambda tx: optax.chain(optax.clip(1.0), jmp.optim.kahan(tx)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain.init(params)
        for form in forms:
            wrap(form(optax.adam(1e-5))).init(params)
        wrap(optax.adam(1e-5)).init({"kernel": jnp.ones(3)})


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
            jax.eval_shape(jmp.optim.skip_nonfinite(tx).init, params)
    with pytest.warns(UserWarning, match="^The parameter 'adapter' is stored in float16"):
        jmp.optim.skip_nonfinite(clipped).init({**params, "adapter": jnp.ones(3, jnp.float16)})


def test_an_optimizer_that_cannot_be_traced_at_init_warns_and_is_made():
    """Its update needs an axis that only the step has."""

    def mean(updates, state, params=None):
        return jax.tree.map(lambda x: jax.lax.pmean(x, "devices"), updates), state

    tx = optax.chain(optax.GradientTransformation(optax.init_empty_state, mean), optax.sgd(0.1))
    with pytest.warns(UserWarning, match="^The parameter 'kernel' is stored in bfloat16"):
        state = jmp.optim.skip_nonfinite(tx).init({"kernel": jnp.ones(3, jnp.bfloat16)})
    assert int(state.skipped_steps) == 0


def test_an_optimizer_of_nnx_warns_of_half_parameters_too():
    model = jmp.nnx.cast_params(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "float16")
    with pytest.warns(UserWarning, match=r"^The parameter 'bias' is stored in float16; an update below 2\*\*-12 of it"):
        jmp.nnx.Optimizer(model, optax.adam(1e-5), wrt=nnx.Param)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.nnx.Optimizer(model, jmp.optim.master_weights(optax.adam(1e-5)), wrt=nnx.Param)
