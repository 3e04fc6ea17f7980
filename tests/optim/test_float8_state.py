"""Optimizers never see float8 state: parameters are what they are without it, and its gradient takes its place."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from float8_problem import STATE, assert_same, batch_of, compiled, joined, loss_fn, state_after, variables_of
from optimizer_registry import METHODS, OPTIMIZERS, WAYS, bits, grads_of, params_of

import jmp_policy as jmp

OLD = {"layer": {"input_scale": jnp.float32([2.0]), "input_amax_history": jnp.float32([3.0, 4.0, 5.0])}}
NEW = {"layer": {"input_scale": jnp.float32([6.0]), "input_amax_history": jnp.float32([7.0, 5.0, 3.0])}}
SCALE = jmp.DynamicLossScale(2.0**10)
LOOKS_AT_ALL = ("adafactor", "clip_schedule", "flatten", "lamb", "lookahead", "masked", "partition")
"""Optimizers that look at all parameters together, or at the tree."""
ZEROED = {
    "decay before a clip": lambda: optax.chain(
        optax.add_decayed_weights(0.1), optax.clip_by_global_norm(1e-3), optax.sgd(0.1)
    ),
    "cast_state": lambda: jmp.optim.cast_state(optax.adamw(0.1), mu_dtype="bfloat16"),
    **{name: OPTIMIZERS[name] for name in ("MultiSteps", "adamw", "lamb", "lookahead", "inject_hyperparams")},
}
"""Optimizers that get zeros for state."""


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


HIDDEN = {
    name: (lambda name=name: jmp.optim.loss_scaled(OPTIMIZERS[name](), SCALE), "float32") for name in LOOKS_AT_ALL
}
HIDDEN["kahan"] = lambda: jmp.optim.skip_nonfinite(METHODS["kahan"](optax.adamw(0.1))), "bfloat16"


@pytest.mark.parametrize("name", ["adafactor", *(pytest.param(n, marks=pytest.mark.slow) for n in [*HIDDEN][1:])])
def test_wrapped_optimizer_trains_as_without_state(name):
    """Parameters and inner state come of the same program."""
    make, dtype = HIDDEN[name]
    tx, params, grads = make(), params_of(dtype), grads_of(0, dtype=dtype)

    def ours(grads, state, params):
        params, state = jmp.optim.step(tx, grads, state, params)
        return without_state(params), state

    def alone(grads, state, params):
        params, state = jmp.optim.step(tx, grads, state, params)
        return getattr(params, "fast", params), state

    both, only = start(name, with_state(params)), start(name, params)
    of_both, of_only = tx.init(both), tx.init(only)
    assert [raw for _, raw in bits(of_both)] == [raw for _, raw in bits(of_only)]
    assert not any(STATE in path for path, _ in bits(of_both))
    lowered = text(ours, with_state(grads, NEW), of_both, both), text(alone, grads, of_only, only)
    assert lowered[0].replace("jit_ours", "jit_alone") == lowered[1]


@pytest.mark.slow
def test_optimizers_of_optax_train_as_without_state():
    """In one program for all of them."""

    def step(name, params, grads):
        tx, params = ZEROED[name](), start(name, params)
        return jmp.optim.step(tx, grads, tx.init(params), params)[0]

    @compiled
    def all_steps():
        both = {name: step(name, with_state(params_of()), with_state(grads_of(0), NEW)) for name in ZEROED}
        return both, {name: step(name, params_of(), grads_of(0)) for name in ZEROED}

    with_it, alone = all_steps()
    for name, params in with_it.items():
        assert_same(without_state(params), getattr(alone[name], "fast", alone[name]))
        for tree in params if name == "lookahead" else [params]:
            assert_same(tree["model"][STATE], NEW)


@functools.cache
def compiled_step(way):
    tx = jmp.optim.loss_scaled(optax.adamw(0.1), SCALE)
    return tx, compiled(functools.partial(WAYS[way], tx))


WAY_SLOW = ["step", pytest.param("update", marks=pytest.mark.slow)]


@pytest.mark.parametrize("way", WAY_SLOW)
def test_skipped_step_keeps_every_bit_of_state_and_so_does_a_layer_that_did_not_run(way):
    tx, step = compiled_step(way)
    params = with_state(params_of())
    new_params, state = step(with_state(grads_of(0, jnp.inf), NEW), tx.init(params), params)
    assert_same(new_params, params)
    assert int(state.skipped_steps) == 1
    new_params, _ = step(with_state(grads_of(0), jax.tree.map(jnp.zeros_like, NEW)), tx.init(params), params)
    assert_same(new_params["model"][STATE], OLD)


@pytest.mark.parametrize(("way", "bad"), [("step", jnp.inf), pytest.param("update", jnp.nan, marks=pytest.mark.slow)])
def test_amax_that_is_not_finite_neither_enters_the_state_nor_skips_a_step(way, bad):
    """Flax's own operations clip an infinite gradient, so that nothing but their state tells of it."""
    tx, step = compiled_step(way)
    params, new, old = with_state(params_of()), NEW["layer"], OLD["layer"]
    gradient = {"layer": new | {"input_amax_history": new["input_amax_history"].at[0].set(bad)}}
    new_params, state = step(with_state(grads_of(0), gradient), tx.init(params), params)
    assert_same(new_params["model"][STATE]["layer"], new | {"input_amax_history": old["input_amax_history"]})
    assert bool(state.grads_finite)
    assert bool((new_params["model"]["params"]["w"] != params["model"]["params"]["w"]).any())


def test_update_without_parameters_is_an_error_that_says_so():
    tx, _ = compiled_step("update")
    with pytest.raises(ValueError, match=r"needs the parameters\. For example: tx\.update\(grads, opt_state, params\)"):
        tx.update(with_state(grads_of(0), NEW), tx.init(with_state(params_of())))


@pytest.mark.parametrize("frozen", [{}, {"state": None}], ids=["left out", "none"])
def test_state_that_was_not_differentiated_does_not_keep_a_wrapped_optimizer_from_its_update(frozen):
    tx = jmp.optim.loss_scaled(optax.sgd(0.5), jmp.NoOpLossScale())
    params = {"w": jnp.ones(2), "state": jmp.quant.float8_state("float8/2")}
    grads = {"w": jnp.ones(2), **frozen}
    updates, _ = tx.update(grads, tx.init({"w": params["w"]}), params)
    assert updates["w"].tolist() == [-0.5, -0.5]


def _with_groups(every):
    labels = lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, tree)
    groups = {name: optax.MultiSteps(optax.sgd(0.1), every).gradient_transformation() for name in ("used", "idle")}
    return optax.partition(groups, labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "make"),
    [
        ("float8/4(min_size=0)", lambda every: optax.MultiSteps(optax.sgd(0.1), every)),
        ("float8/4(recipe=delayed/2,min_size=0)", _with_groups),
        ("float8/1(recipe=delayed/most_recent,min_size=0)", _with_groups),
    ],
    ids=["MultiSteps", "each group has its MultiSteps", "most recent"],
)
def test_microbatches_of_multisteps_leave_the_state_of_one_big_batch(quantization, make):
    """Whatever their order, with bad ones between; each step is remembered once."""
    start, batches = variables_of(quantization), [batch_of(seed) for seed in range(4)]
    bad = batches[0] | {"x": batches[0]["x"].at[0, 0].set(jnp.inf)}
    tx = jmp.optim.loss_scaled(make(2), SCALE)

    @compiled
    def step(variables, state, batch):
        grads = jmp.grad(lambda v: loss_fn(v, batch, quantization), loss_scale=state)(variables)
        return jmp.optim.step(tx, grads, state, variables)

    variables, state = start, tx.init(start)
    for batch in (batches[1], bad, bad, batches[0]):
        variables, state = step(variables, state, batch)
    assert_same(variables[STATE], state_after(start, joined(*batches[:2]), quantization))
    assert int(state.skipped_steps) == 2
    expected = state_after(variables, joined(*batches[2:]), quantization)
    for batch in batches[2:]:
        variables, state = step(variables, state, batch)
    assert_same(variables[STATE], expected)
