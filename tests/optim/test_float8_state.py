"""Optimizers never see float8 state: parameters are what they are without it, and its gradient takes its place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from float8_problem import STATE, assert_same, compiled
from half_parameter_registry import METHODS
from optimizer_registry import OPTIMIZERS, WAYS, bits, grads_of, params_of

import jmp_policy as jmp

OLD = {"layer": {"input_scale": jnp.float32([2.0]), "input_amax_history": jnp.float32([3.0, 4.0, 5.0])}}
NEW = {"layer": {"input_scale": jnp.float32([6.0]), "input_amax_history": jnp.float32([7.0, 5.0, 3.0])}}
SCALE = jmp.DynamicLossScale(2.0**10)

HIDDEN = [
    "MultiSteps", "adafactor", "adamw", "clip_schedule", "dog", "flatten", "inject_hyperparams", "lamb", "lookahead",
    "masked", "noisy_sgd", "partition", "schedule_free",
]  # fmt: skip
"""Optimizers that look at all parameters together, or at the tree, and some that do neither."""
ZEROED = {
    "decay before a clip": lambda: optax.chain(
        optax.add_decayed_weights(0.1), optax.clip_by_global_norm(1e-3), optax.sgd(0.1)
    ),
    "normalized": lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "cast_state": lambda: jmp.optim.cast_state(optax.adamw(0.1), mu_dtype="bfloat16"),
    **{name: OPTIMIZERS[name] for name in ("MultiSteps", "adamw", "clip_schedule", "lamb", "lookahead", "masked")},
    **{name: OPTIMIZERS[name] for name in ("inject_hyperparams", "partition", "schedule_free")},
}
"""Optimizers that get zeros for state; half of them look at all parameters together."""


def with_state(tree, state=OLD):
    """A tree with float8 state in it, in the dictionary of a model among others."""
    return {"model": {"params": tree, STATE: state}}


def without_state(tree):
    """The parameters, of optax.lookahead those that are differentiated."""
    return getattr(tree, "fast", tree)["model"]["params"]


def start(name, params):
    return optax.LookaheadParams.init_synced(params) if name == "lookahead" else params


def text(fun, *args):
    """What `fun` lowers to, all of it that its results are made of."""
    return re.sub(r"jax\.result_info = [^,}]*|loc\(.*", "", jax.jit(fun).lower(*args).as_text())


def assert_trains_as_without_state(tx, name, dtype=jnp.float32):
    """Asserts that parameters and inner state come of the same program as without float8 state."""
    params, grads = params_of(dtype), grads_of(0, dtype=dtype)

    def step(grads, state, params):
        return jmp.optim.step(tx, grads, state, params)

    def ours(grads, state, params):
        params, state = step(grads, state, params)
        return without_state(params), state

    def alone(grads, state, params):
        params, state = step(grads, state, params)
        return getattr(params, "fast", params), state

    both, only = start(name, with_state(params)), start(name, params)
    of_both, of_only = tx.init(both), tx.init(only)
    assert [raw for _, raw in bits(of_both)] == [raw for _, raw in bits(of_only)]
    lowered = text(ours, with_state(grads, NEW), of_both, both), text(alone, grads, of_only, only)
    assert lowered[0].replace("jit_ours", "jit_alone") == lowered[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", HIDDEN)
def test_wrapped_optimizer_trains_as_without_state(name):
    assert_trains_as_without_state(jmp.optim.loss_scaled(OPTIMIZERS[name](), SCALE), name)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_wrapped_half_parameters_train_as_without_state(method):
    tx = jmp.optim.skip_nonfinite(METHODS[method](optax.adamw(0.1)))
    assert_trains_as_without_state(tx, method, jnp.bfloat16)


@pytest.fixture(scope="module")
def steps():
    """New parameters by every optimizer of optax, with state among them and without, in one program."""

    def step(name, params, grads):
        tx, params = ZEROED[name](), start(name, params)
        return jmp.optim.step(tx, grads, tx.init(params), params)[0]

    def all_steps():
        params, grads = params_of(), grads_of(0)
        both = {name: step(name, with_state(params), with_state(grads, NEW)) for name in ZEROED}
        return both, {name: step(name, params, grads) for name in ZEROED}

    with jax.numpy_dtype_promotion("standard"):
        return compiled(all_steps)()


@pytest.mark.slow
@pytest.mark.parametrize("name", ZEROED)
def test_optimizer_of_optax_trains_as_without_state(steps, name):
    both, alone = (params[name] for params in steps)
    assert_same(without_state(both), getattr(alone, "fast", alone))
    for tree in both if name == "lookahead" else [both]:
        assert_same(tree["model"][STATE], NEW)


@pytest.mark.parametrize("name", ["loss_scaled", "skip_nonfinite"])
def test_state_of_a_wrapped_optimizer_has_nothing_of_float8(name):
    wrap = {"loss_scaled": lambda tx: jmp.optim.loss_scaled(tx, SCALE), "skip_nonfinite": jmp.optim.skip_nonfinite}
    state = wrap[name](optax.adamw(0.1)).init(with_state(params_of()))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths
    assert not any(STATE in path for path in paths)


@functools.cache
def compiled_step(way):
    tx = jmp.optim.loss_scaled(optax.adamw(0.1), SCALE)
    return tx, compiled(lambda grads, state, params: WAYS[way](tx, grads, state, params))


def with_first(tree, value):
    """A tree with another number in the first place of its first array."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([leaves[0].at[..., 0].set(value), *leaves[1:]])


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_skipped_step_keeps_every_bit_of_state(way):
    tx, step = compiled_step(way)
    params = with_state(params_of())
    grads = with_state(grads_of(0, jnp.inf), NEW)
    new_params, state = step(grads, tx.init(params), params)
    assert_same(new_params, params)
    assert int(state.skipped_steps) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_amax_that_is_not_finite_neither_enters_the_state_nor_skips_a_step(way, bad):
    """Flax's own operations clip an infinite gradient, so that nothing but their state tells of it."""
    tx, step = compiled_step(way)
    params = with_state(params_of())
    new_params, state = step(with_state(grads_of(0), with_first(NEW, bad)), tx.init(params), params)
    new, old = NEW["layer"], OLD["layer"]
    expected = {"input_scale": new["input_scale"], "input_amax_history": old["input_amax_history"]}
    assert_same(new_params["model"][STATE]["layer"], expected)
    assert bool(state.grads_finite)
    assert bool((new_params["model"]["params"]["w"] != params["model"]["params"]["w"]).any())


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_layer_that_did_not_run_keeps_its_state(way):
    tx, step = compiled_step(way)
    params = with_state(params_of())
    new_params, _ = step(with_state(grads_of(0), jax.tree.map(jnp.zeros_like, NEW)), tx.init(params), params)
    assert_same(new_params["model"][STATE], OLD)


@pytest.mark.slow
def test_update_gives_what_makes_state_the_next_one():
    tx, step = compiled_step("update")
    params, grads = with_state(params_of()), with_state(grads_of(0), NEW)
    by_update_and_apply, _ = step(grads, tx.init(params), params)
    by_step, _ = compiled_step("step")[1](grads, tx.init(params), params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), by_update_and_apply, by_step)


def test_update_without_parameters_is_an_error_that_says_so():
    tx, _ = compiled_step("update")
    params = with_state(params_of())
    with pytest.raises(ValueError, match=r"needs the parameters\. For example: tx\.update\(grads, opt_state, params\)"):
        tx.update(with_state(grads_of(0), NEW), tx.init(params))


@pytest.mark.slow
def test_figures_of_a_wrapped_optimizer_are_those_without_state():
    figures = []
    for tree, grads in ((with_state(params_of()), with_state(grads_of(0), NEW)), (params_of(), grads_of(0))):
        tx, step = compiled_step("step")
        _, state = step(grads, tx.init(tree), tree)
        jmp.optim.raise_if_stuck(state)
        figures.append((jmp.metrics(state), jmp.get_loss_scale(state)))
    assert_same(*figures)


@pytest.mark.parametrize("frozen", [{}, {"state": None}], ids=["left out", "none"])
def test_state_that_was_not_differentiated_does_not_keep_a_wrapped_optimizer_from_its_update(frozen):
    tx = jmp.optim.loss_scaled(optax.sgd(0.5), jmp.NoOpLossScale())
    params = {"w": jnp.ones(2), "state": jmp.quant.float8_state("float8/2")}
    grads = {"w": jnp.ones(2), **frozen}
    updates, _ = tx.update(grads, tx.init({"w": params["w"]}), params)
    assert updates["w"].tolist() == [-0.5, -0.5]
