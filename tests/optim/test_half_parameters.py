"""Half-precision parameters train as float32 does, and no state changes its dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh
from optax import contrib
from optimizer_registry import METHODS, OPTIMIZERS, WAYS, bits, grads_of, params_of, types

import jmp_policy as jmp
from jmp_policy import optim

ADAMW = optax.adamw(1e-2)
slow = functools.partial(pytest.param, marks=(pytest.mark.slow, pytest.mark.optimized))


def _trained(tx, params, grads, way="step"):
    """Parameters and state after a scan over stacked gradients, and the parameters after each step."""

    @jax.jit
    def train(params, state, grads):
        def body(carry, grads):
            params, state = WAYS[way](tx, grads, carry[1], carry[0])
            return (params, state), params

        return jax.lax.scan(body, (params, state), grads)

    (params, state), history = train(params, tx.init(params), grads)
    return params, state, history


def _history(dtype, bad=()):
    trees = [grads_of(step, np.nan if step in bad else None, dtype) for step in range(4)]
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "dtype", "optimizer", "way"),
    [
        ("masters", "bfloat16", "sgd", "step"),
        slow("masters", "float16", "MultiSteps", "update"),
        slow("split", "bfloat16", "sgd", "update"),
        slow("kahan", "bfloat16", "adafactor", "step"),
        slow("kahan", "float16", "adamw", "update"),
        slow("stochastic", "bfloat16", "adamw", "step"),
        slow("stochastic", "float16", "adamw", "update"),
    ],
)
def test_state_keeps_its_dtypes_and_a_bad_step_changes_nothing(method, dtype, optimizer, way):
    tx = optim.loss_scaled(METHODS[method](OPTIMIZERS[optimizer]()), jmp.DynamicLossScale())
    params = params_of(dtype)
    before = types((params, tx.init(params)))
    new_params, state, history = _trained(tx, params, _history("float32", bad=(1, 3)), way)
    assert types((new_params, state)) == before
    assert bool(jmp.all_finite((new_params, state.inner_state)))
    at = lambda step: bits(jax.tree.map(lambda x: x[step], history))
    assert at(1) == at(0) != at(2)
    assert at(3) == at(2)
    assert int(state.skipped_steps) == 2


@pytest.mark.parametrize(("method", "way"), [slow("masters", "update"), slow("split", "step"), slow("kahan", "step")])
def test_parameters_of_other_dtypes_are_updated_as_by_the_optimizer_alone(method, way):
    params, _, _ = _trained(METHODS[method](ADAMW), params_of(), _history("float32"), way)
    alone, _, _ = _trained(ADAMW, params_of(), _history("float32"), way)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), params, alone)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("method", "way"), [("masters", "step"), ("masters", "update"), ("split", "step"), ("split", "update")]
)
def test_masters_are_float32_training_and_parameters_their_rounding(method, way):
    """In every bit, over 300 random AdamW steps of many magnitudes, subnormal ones among them."""
    rng = np.random.default_rng(20261121)
    start = jnp.asarray(rng.normal(size=64) * 10.0 ** rng.integers(-42, 3, size=64), jnp.bfloat16)
    grads = jnp.asarray(rng.normal(size=(300, 64)) * 10.0 ** rng.integers(-30, 3, size=(300, 64)), jnp.float32)
    final, _, history = _trained(ADAMW, start.astype(jnp.float32), grads)
    params, state, parameters = _trained(METHODS[method](ADAMW), start, grads, way)
    assert bits(optim.master_params(state, params)) == bits(final)
    if method == "masters":
        assert bits(parameters) == bits(np.asarray(history).astype(jnp.bfloat16))


@pytest.mark.slow
def test_split_masters_keep_ties():
    """1 + 2**-8 lies between two bfloat16 numbers; with ties to even, joining would come out one step lower."""
    tx = optim.master_weights(optax.sgd(1.0), mode="split")
    params = jnp.ones(2, jnp.bfloat16)
    params, state = optim.step(tx, jnp.float32([-(2.0**-8), 2.0**-9]), tx.init(params), params)
    assert params.tolist() == [1.0078125, 1.0]
    assert optim.master_params(state, params).tolist() == [1 + 2.0**-8, 1 - 2.0**-9]


def test_what_changes_a_parameter_but_not_its_float32_copy_is_undone_by_the_next_step():
    tx, grads = optim.master_weights(optax.sgd(1.0)), jnp.float32([2.0**-10])
    params = jnp.full(1, 2.0, jnp.bfloat16)
    state, clipped = tx.init(params), jnp.ones_like(params)
    undone, _ = optim.step(tx, grads, state, clipped)
    assert undone.tolist() == [2.0]
    kept, _ = optim.step(tx, grads, *optim.with_master_params(state, clipped, jnp.ones(1))[::-1])
    assert kept.tolist() == [1.0]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_parameter_that_a_loop_sets_to_zero_trains_on_from_zero(zero):
    """With a remainder of another value, the zero became a nan, as for weights that are pruned or clipped."""
    tx, grads = optim.master_weights(optax.sgd(1.0), mode="split"), jnp.float32([2.0**-10])
    params = jnp.full(1, 3.0, jnp.bfloat16)
    _, state = optim.step(tx, grads, tx.init(params), params)  # 2.99902 is rounded up to 3
    pruned, _ = optim.step(tx, grads, state, jnp.full_like(params, zero))
    assert pruned.tolist() == [-(2.0**-10)]


@pytest.mark.parametrize("mode", ["float32", "split"])
def test_a_parameter_that_shrinks_at_once_still_fits_what_is_remembered(mode):
    """A float32 sum cannot reach 2**-30 from 1: the master moves to where the parameter lands."""
    tx = optim.master_weights(optax.sgd(1.0), mode=mode)
    start = jnp.ones(1, jnp.bfloat16)
    master = jnp.float32([1.0 + 2.0**-12])
    state = optim.MasterWeightsState(optax.sgd(1.0).init(master), master)
    if mode == "split":
        state = optim.SplitWeightsState(state.inner_state, jnp.uint16([2**11]))
    updates, state = tx.update(jnp.float32([1.0]), state, start)
    params = optax.apply_updates(start, updates)
    wide = optim.master_params(state, params)
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), params)
    np.testing.assert_allclose(wide, 2.0**-12, atol=2.0**-24)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "way"), [("kahan", "step"), slow("kahan", "update"), ("stochastic", "step"), slow("split", "step")]
)
def test_a_hundred_small_steps_arrive(method, way):
    """Rounding to nearest loses every one of a hundred steps of -1e-4 from one in bfloat16."""
    ones, grads = jnp.ones(4096, jnp.bfloat16), jnp.full((100, 4096), 1e-4, jnp.float32)
    plain, _, _ = _trained(optax.sgd(1.0), ones, grads)
    assert float(plain[0]) == 1.0
    params, state, _ = _trained(METHODS[method](optax.sgd(1.0)), ones, grads, way)
    assert abs(float(optim.master_params(state, params).mean()) - 0.99) < (1e-3 if method == "stochastic" else 1e-4)


def test_a_step_that_rounding_loses_is_remembered():
    tx, params = optim.kahan(optax.sgd(1.0)), {"w": jnp.ones(2, jnp.bfloat16)}
    with jax.numpy_dtype_promotion("strict"):
        params, state = optim.step(tx, {"w": jnp.array([2.0**-10, 0.0])}, tx.init(params), params)
    assert params["w"].tolist() == [1.0, 1.0]
    assert optim.master_params(state, params)["w"].tolist() == [1 - 2**-10, 1.0]


def test_kahan_survives_an_overflow_of_its_parameter():
    tx = optim.kahan(optax.sgd(1.0))
    params = jnp.full(1, 6e4, jnp.float16)
    params, state = optim.step(tx, jnp.float32([-1e4]), tx.init(params), params)
    assert (params.tolist(), state.compensation.tolist()) == ([np.inf], [0.0])


@pytest.mark.parametrize("method", METHODS)
def test_a_tree_without_arrays_takes_its_step(method):
    tx, empty = METHODS[method](ADAMW), {"none": None}
    params, state = optim.step(tx, empty, tx.init(empty), empty)
    assert params == empty
    assert int(optax.tree_utils.tree_get(state, "count")) == 1


PRIVATE = contrib.differentially_private_aggregate(1.0, 0.0, key=jax.random.key(0))
GROUPS = {
    "lookahead": (optax.lookahead(optax.sgd(0.5), 2, 0.5), optax.LookaheadParams.init_synced, ()),
    "per_example": (optax.chain(PRIVATE, optax.sgd(0.5)), lambda params: params, (3,)),
}
"""Optimizers whose gradients have another structure or shape than the parameters; how to start, and axes in front."""


@pytest.mark.parametrize(("method", "way"), [("masters", "step"), slow("split", "update"), slow("kahan", "step")])
@pytest.mark.parametrize("name", GROUPS)
def test_gradients_of_fast_parameters_or_of_each_example_train_masters_as_float32(name, method, way):
    """An error said that they do not fit the parameters."""
    tx, start, axes = GROUPS[name]
    params = {"w": jnp.array([1.0, -2.0, 0.5], jnp.bfloat16)}
    grads = {"w": jnp.full((4, *axes, 3), 0.01)}
    with jax.numpy_dtype_promotion("standard"):  # optax adds float32 updates to half-precision parameters
        wide, _, _ = _trained(tx, start(jmp.cast_floating(params, "float32")), grads, "update")
        wrapped = optim.loss_scaled(METHODS[method](tx), jmp.DynamicLossScale())
        half, state, _ = _trained(wrapped, start(params), grads, way)
    rtol = 2.0**-15 if method == "kahan" else 1e-6  # kahan has 16 significant bits
    for expected, found in zip(*map(jax.tree.leaves, (wide, optim.master_params(state, half))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=rtol)


@pytest.mark.parametrize("method", METHODS)
def test_bad_trees_and_nestings_are_errors_that_say_what_fits(method):
    make, adam = METHODS[method], optax.adam(1e-2)
    params = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    tx = make(adam)
    state = tx.init(params)
    with pytest.raises(TypeError, match=r"inner must be an optax transformation, got 3\. For example: optax.adamw"):
        make(3)
    with pytest.raises(
        ValueError, match="goes inside of loss_scaled, skip_spikes, master_weights, kahan and stochastic_rounding"
    ):
        make(optim.skip_nonfinite(adam))
    with pytest.raises(ValueError, match=r"go outside of \w+, which would change parameters on a step that they skip"):
        make(optax.chain(optim.skip_nonfinite(adam))).init(params)
    with pytest.raises(ValueError, match=r"gradients do not fit the parameters: \['w'\] has the shape \(3, 2\), but"):
        optim.step(tx, {"w": jnp.ones((3, 2))}, state, params)
    with pytest.raises(ValueError, match=r"gradients do not fit the parameters: \['w'\] is missing, but the"):
        optim.step(tx, {"v": jnp.ones((2, 3))}, state, params)
    with pytest.raises(ValueError, match=r"needs the parameters: tx.update\(grads, opt_state, params\)"):
        tx.update(params, state)
    restored = r"of \w+, got tuple\. Make one: tx\.init\(params\).*tx.init\(params\)\._replace\(inner_state=restored"
    with pytest.raises(TypeError, match=restored):
        tx.update(params, adam.init(params), params)
    with pytest.raises(TypeError, match=restored):
        optim.step(tx, params, adam.init(params), params)
    if method != "stochastic":  # whose state is no tree like the parameters
        other = {"w": jnp.ones((4, 3), jnp.bfloat16)}
        with pytest.raises(ValueError, match=r"do not fit the parameters: \['w'\] has the shape \(2, 3\), but"):
            optim.step(tx, other, state, other)


def test_modes_of_master_weights_are_checked():
    with pytest.raises(ValueError, match=r"Unknown mode 'splt'\. Did you mean 'split'\? For example: mode='split'"):
        optim.master_weights(optax.sgd(1.0), mode="splt")
    with pytest.raises(ValueError, match=r"needs bfloat16 parameters, .* got float16 for \['w'\]\. For float16: m"):
        METHODS["split"](optax.sgd(1.0)).init({"w": jnp.ones(2, jnp.float16)})


# Stochastic rounding is a function of its key, on one device and on several.

ONES = {"w": jnp.ones(64, jnp.bfloat16), "b": jnp.ones(64, jnp.bfloat16)}
SMALL = jax.tree.map(lambda x: jnp.full(64, 1e-3), ONES)


def _round(key, state=None):
    tx = optim.stochastic_rounding(optax.sgd(1.0), key)
    return optim.step(tx, SMALL, tx.init(ONES) if state is None else state, ONES)


def test_a_key_decides_and_every_parameter_and_step_draws_its_own_bits():
    first, state = _round(jax.random.key(0))
    raw, _ = _round(jax.random.PRNGKey(0))  # keys of both kinds are taken, and the same one gives the same bits
    np.testing.assert_array_equal(first["w"], raw["w"])
    other, later = _round(jax.random.key(1))[0], _round(jax.random.key(0), state)[0]
    for different in (first["b"], other["w"], later["w"]):
        assert (first["w"] != different).any()
    for bad in (7, jnp.ones(2), jax.random.split(jax.random.key(0), 3)):
        with pytest.raises(TypeError, match=r"key must be one random key, got .*\. For example: jax.random.key\(0\)"):
            optim.stochastic_rounding(optax.sgd(1.0), bad)


def test_a_donated_state_leaves_the_key_alone():
    key = jax.random.key(0)
    tx = optim.stochastic_rounding(optax.sgd(1.0), key)
    jax.jit(lambda state, params: optim.step(tx, SMALL, state, params)[1], donate_argnums=0)(tx.init(ONES), ONES)
    assert tx.init(ONES).key.tolist() == jax.random.key_data(key).tolist()


@pytest.mark.slow
def test_replicas_are_rounded_alike_and_shards_each_for_itself():
    mesh = make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    tx = optim.stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    take = lambda grads, params: optim.step(tx, grads, tx.init(params), params)[0]
    arguments = SMALL["w"], ONES["w"]
    sharded = jax.device_put(arguments, NamedSharding(mesh, P("d")))
    np.testing.assert_array_equal(jax.jit(take)(*sharded), jax.jit(take)(*arguments))
    for spec, kinds in ((P(), 1), (P("d"), 4)):
        out = jax.jit(jax.shard_map(take, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(*arguments)
        assert len({np.asarray(shard.data).tobytes() for shard in out.addressable_shards}) == kinds
