"""Half-precision parameters train as float32 does, with every optimizer, and no state changes its dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from half_parameter_registry import HALVES, METHODS, OPTIMIZERS
from optimizer_registry import WAYS, bits, grads_of, params_of, types

import jmp_policy as jmp
from jmp_policy import optim
from jmp_policy._base._rounding import join_float32

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

STEPS = 1000


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


CASES = [
    *((method, "bfloat16", "adamw", "step") for method in METHODS),
    *((method, dtype, "adamw", "update") for method, dtype in HALVES),
    ("masters", "bfloat16", "MultiSteps", "step"),
    ("kahan", "bfloat16", "adafactor", "step"),
]
OTHERS = [(method, "bfloat16", optimizer, "step") for method in METHODS for optimizer in OPTIMIZERS]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS if case not in CASES]


@pytest.mark.parametrize(("method", "dtype", "optimizer", "way"), CASES)
def test_state_keeps_its_dtypes_and_a_bad_step_changes_nothing(method, dtype, optimizer, way):
    tx = optim.loss_scaled(METHODS[method](OPTIMIZERS[optimizer]()), jmp.DynamicLossScale())
    params = params_of(dtype)
    before = types((params, tx.init(params)))
    for grads_dtype in (dtype, "float32"):
        new_params, state, history = _trained(tx, params, _history(grads_dtype, bad=(1, 3)), way)
        assert types((new_params, state)) == before
        assert bool(jmp.all_finite((new_params, state.inner_state)))
        at = lambda step, history=history: bits(jax.tree.map(lambda x: x[step], history))
        assert at(1) == at(0)
        assert at(3) == at(2)
        assert int(state.skipped_steps) == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_parameters_of_other_dtypes_are_updated_as_by_the_optimizer_alone(method, way):
    inner = optax.adamw(1e-2)
    params, _, _ = _trained(METHODS[method](inner), params_of(), _history("float32"), way)
    alone, _, _ = _trained(inner, params_of(), _history("float32"), way)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), params, alone)


@pytest.fixture(scope="module")
def float32_training():
    """A thousand random AdamW steps over many magnitudes, subnormal ones among them, from bfloat16 parameters."""
    rng = np.random.default_rng(20261121)
    start = jnp.asarray(rng.normal(size=64) * 10.0 ** rng.integers(-42, 3, size=64), jnp.bfloat16)
    grads = jnp.asarray(rng.normal(size=(STEPS, 64)) * 10.0 ** rng.integers(-30, 3, size=(STEPS, 64)), jnp.float32)
    inner = optax.adamw(1e-2)
    with jax.numpy_dtype_promotion("standard"):
        final, _, history = _trained(inner, start.astype(jnp.float32), grads)
    return inner, start, grads, final, history


def _bits32(x):
    return np.asarray(x).view(np.uint32)


@pytest.mark.parametrize("way", WAYS)
def test_float32_masters_are_float32_training_and_parameters_their_rounding(float32_training, way):
    inner, start, grads, final, history = float32_training
    _, state, parameters = _trained(optim.master_weights(inner), start, grads, way)
    np.testing.assert_array_equal(_bits32(state.master), _bits32(final))
    expected = np.asarray(history).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(parameters).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("way", WAYS)
def test_split_masters_are_float32_training(float32_training, way):
    inner, start, grads, final, _ = float32_training
    params, state, _ = _trained(optim.master_weights(inner, mode="split"), start, grads, way)
    np.testing.assert_array_equal(_bits32(join_float32(params, state.remainder)), _bits32(final))


def test_split_masters_keep_ties():
    """1 + 2**-8 lies between two bfloat16 numbers; with ties to even, joining would come out one step lower."""
    tx = optim.master_weights(optax.sgd(1.0), mode="split")
    params = jnp.ones(2, jnp.bfloat16)
    params, state = optim.step(tx, jnp.float32([-(2.0**-8), 2.0**-9]), tx.init(params), params)
    assert params.tolist() == [1.0078125, 1.0]
    assert join_float32(params, state.remainder).tolist() == [1 + 2.0**-8, 1 - 2.0**-9]


def test_what_changes_a_parameter_but_not_its_float32_copy_is_undone_by_the_next_step():
    tx, grads = optim.master_weights(optax.sgd(1.0)), jnp.float32([2.0**-10])
    params = jnp.full(1, 2.0, jnp.bfloat16)
    state, clipped = tx.init(params), jnp.ones_like(params)
    undone, _ = optim.step(tx, grads, state, clipped)
    assert undone.tolist() == [2.0]
    kept, _ = optim.step(tx, grads, *optim.with_master_params(state, clipped, jnp.ones(1))[::-1])
    assert kept.tolist() == [1.0]


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
    wide = state.master if mode == "float32" else join_float32(params, state.remainder)
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), params)
    np.testing.assert_allclose(wide, 2.0**-12, atol=2.0**-24)


@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_small_steps_arrive(way):
    """Rounding to nearest loses every one of a hundred steps of -1e-4 from one in bfloat16."""
    ones, grads = jnp.ones(4096, jnp.bfloat16), jnp.full((100, 4096), 1e-4, jnp.float32)
    mean = lambda x: float(x.astype(jnp.float32).mean())
    plain, _, _ = _trained(optax.sgd(1.0), ones, grads, way)
    assert mean(plain) == 1.0
    stochastic, _, _ = _trained(METHODS["stochastic"](optax.sgd(1.0)), ones, grads, way)
    assert abs(mean(stochastic) - 0.99) < 1e-3
    params, state, _ = _trained(optim.kahan(optax.sgd(1.0)), ones, grads, way)
    assert abs(mean(params) + mean(state.compensation) - 0.99) < 1e-4
    split, _, _ = _trained(METHODS["split"](optax.sgd(1.0)), ones, grads, way)
    assert mean(split) == mean(jnp.full(1, 0.99, jnp.bfloat16))


def test_kahan_survives_an_overflow_of_its_parameter():
    tx = optim.kahan(optax.sgd(1.0))
    params = jnp.full(1, 6e4, jnp.float16)
    params, state = optim.step(tx, jnp.float32([-1e4]), tx.init(params), params)
    assert (params.tolist(), state.compensation.tolist()) == ([np.inf], [0.0])


@pytest.mark.parametrize("method", METHODS)
def test_a_tree_without_arrays_takes_its_step(method):
    tx, empty = METHODS[method](optax.adamw(1e-2)), {"none": None}
    params, state = optim.step(tx, empty, tx.init(empty), empty)
    assert params == empty
    assert int(optax.tree_utils.tree_get(state, "count")) == 1


@pytest.mark.parametrize("method", METHODS)
def test_bad_trees_and_nestings_are_errors_that_say_what_fits(method):
    make, adam = METHODS[method], optax.adam(1e-2)
    params = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    tx = make(adam)
    state = tx.init(params)
    with pytest.raises(TypeError, match=r"inner must be an optax transformation, got 3\. For example: optax.adamw"):
        make(3)
    with pytest.raises(ValueError, match="goes inside of loss_scaled, master_weights, kahan and stochastic_rounding"):
        make(optim.skip_nonfinite(adam))
    with pytest.raises(ValueError, match=r"go outside of \w+, which would change parameters on a step that they skip"):
        make(optax.chain(optim.skip_nonfinite(adam))).init(params)
    with pytest.raises(ValueError, match=r"gradients do not fit the parameters: \['w'\] has the shape \(3, 2\), but"):
        optim.step(tx, {"w": jnp.ones((3, 2))}, state, params)
    with pytest.raises(ValueError, match=r"gradients do not fit the parameters: \['w'\] is missing, but the"):
        optim.step(tx, {"v": jnp.ones((2, 3))}, state, params)
    with pytest.raises(ValueError, match=r"needs the parameters: tx.update\(grads, opt_state, params\)"):
        tx.update(params, state)
    with pytest.raises(TypeError, match=r"Expected the state of \w+, got tuple\. Make one: tx.init\(params\)"):
        tx.update(params, (state,), params)
    if method != "stochastic":  # whose state is no tree like the parameters
        other = {"w": jnp.ones((4, 3), jnp.bfloat16)}
        with pytest.raises(ValueError, match=r"do not fit the parameters: \['w'\] has the shape \(2, 3\), but"):
            optim.step(tx, other, state, other)


def test_modes_of_master_weights_are_checked():
    with pytest.raises(ValueError, match=r"Unknown mode 'splt'\. Did you mean 'split'\? For example: mode='split'"):
        optim.master_weights(optax.sgd(1.0), mode="splt")
    with pytest.raises(ValueError, match=r"needs bfloat16 parameters, .* got float16 for \['w'\]\. For float16: m"):
        METHODS["split"](optax.sgd(1.0)).init({"w": jnp.ones(2, jnp.float16)})
