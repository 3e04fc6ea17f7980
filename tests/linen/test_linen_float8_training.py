"""Training linen modules in float8: whatever the optimizer does to gradients, the state is that of the true ones."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax.training import train_state
from float8_linen import OVERWRITE, X

import jmp_policy as jmp
from jmp_policy.linen import TrainState
from jmp_policy.optim import loss_scaled, skip_nonfinite

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

POLICY = "float8/4(min_size=0)_from_float32"
MODEL = jmp.with_policy(nn.Dense(16, name="layer"), POLICY)
KERNEL, COTANGENT = np.random.default_rng(1).normal(size=(2, 16, 16)).astype(np.float32)
VARIABLES = {
    "params": {"kernel": jnp.asarray(KERNEL), "bias": jnp.zeros(16)},
    OVERWRITE: jmp.quant.float8_state("float8/4(min_size=0)"),
}
BATCHES = jnp.stack([X, 5 * X, 2 * X, 3 * X])
STILL = optax.sgd(0.0)  # which leaves the weights as they are, so that all runs see the same gradients
UNSCALED = jmp.StaticLossScale(1.0)


def loss_fn(variables, x):
    """A loss whose gradient by the output does not depend on that, but on the batch."""
    return jnp.sum(MODEL.apply(variables, x) * COTANGENT * x)


def _gradients(variables, x, loss_scale=UNSCALED):
    return jmp.grad(loss_fn, loss_scale=loss_scale)(variables, x)


def _by_steps(tx, loss_scale=None):
    def step(carry, x):
        variables, opt_state = carry
        grads = _gradients(variables, x, opt_state if loss_scale is None else loss_scale)
        return jmp.optim.step(tx, grads, opt_state, variables), None

    return lambda batches: jax.lax.scan(step, (VARIABLES, tx.init(VARIABLES)), batches)[0][0]


def _by_train_state(kind, tx):
    def step(state, x):
        scale = state if kind is TrainState else UNSCALED
        return state.apply_gradients(grads=_gradients(state.params, x, scale)), None

    def run(batches):
        state = kind.create(apply_fn=MODEL.apply, params=VARIABLES, tx=tx)
        return jax.lax.scan(step, state.replace(step=jnp.int32(0)), batches)[0].params

    return run


def _by_minimize(tx):
    def step(carry, x):
        variables, opt_state, _ = jmp.optim.minimize(loss_fn, tx)(*carry, x)
        return (variables, opt_state), None

    return lambda batches: jax.lax.scan(step, (VARIABLES, tx.init(VARIABLES)), batches)[0][0]


SCALED = functools.partial(loss_scaled, loss_scale=jmp.StaticLossScale(2.0**10))
RUNS = {
    "clipped": _by_steps(optax.chain(optax.clip_by_global_norm(1e-3), STILL), UNSCALED),
    "decayed": _by_steps(optax.chain(optax.add_decayed_weights(0.5), STILL), UNSCALED),
    "scaled": _by_steps(SCALED(STILL)),
    "scaled and clipped": _by_steps(SCALED(optax.chain(optax.clip(1e-3), STILL))),
    "train state": _by_train_state(TrainState, SCALED(STILL)),
    "Flax's train state": _by_train_state(train_state.TrainState, STILL),
    "minimize": _by_minimize(SCALED(STILL)),
}


@pytest.fixture(scope="module")
def runs():
    """The variables after four steps, by each way of stepping: compiled at once."""
    every = RUNS | {"unclipped": _by_steps(STILL, UNSCALED)}
    return jax.jit(lambda batches: {name: run(batches) for name, run in every.items()})(BATCHES)


def assert_same(found, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


@pytest.mark.parametrize("name", RUNS)
def test_state_is_that_of_true_gradients_whatever_the_optimizer_does_to_them(runs, name):
    assert_same(runs[name], runs["unclipped"])


def test_history_holds_the_largest_magnitude_of_each_step(runs):
    state = runs["unclipped"][OVERWRITE]
    seen = np.abs(BATCHES).max((1, 2))
    assert state["input_amax_history"].tolist() == [seen[3], *seen[:3]]
    gradients = np.abs(COTANGENT * BATCHES).max((1, 2))
    np.testing.assert_allclose(state["output_grad_amax_history"], [gradients[3], *gradients[:3]], rtol=1e-6)


def test_norm_by_which_gradients_are_clipped_is_without_the_state(runs):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    grads, params = runs["unclipped"], VARIABLES["params"]
    step = lambda optimizer, grads, params: jmp.optim.step(optimizer, grads, optimizer.init(params), params)[0]
    for optimizer in (tx, SCALED(tx)):
        stepped, alone = jax.jit(
            lambda grads, tx=optimizer: (step(tx, grads, VARIABLES), step(tx, grads["params"], params))
        )(grads)
        assert_same(stepped["params"], alone)
        jax.tree.map(np.testing.assert_array_equal, stepped[OVERWRITE], grads[OVERWRITE])


@pytest.fixture(scope="module")
def accumulated():
    """The state after one step: of a batch, and of its two halves, the first of which is the larger."""
    micro = BATCHES[1:3]  # 5 X, then 2 X
    in_steps = loss_scaled(optax.MultiSteps(STILL, 2), jmp.StaticLossScale(1.0))

    def summed(x):
        grads = jmp.optim.accumulate(_gradients(VARIABLES, x[0]), _gradients(VARIABLES, x[1]))
        return jmp.optim.step(STILL, grads, STILL.init(VARIABLES), VARIABLES)[0]

    def whole(x):
        loss = lambda variables: loss_fn(variables, x[0]) + loss_fn(variables, x[1])
        grads = jmp.grad(loss, loss_scale=UNSCALED)(VARIABLES)
        return jmp.optim.step(STILL, grads, STILL.init(VARIABLES), VARIABLES)[0]

    found = {"whole": whole, "accumulate": summed, "MultiSteps": _by_steps(in_steps)}
    with jax.numpy_dtype_promotion("standard"):  # optax.MultiSteps divides by an int
        return jax.jit(lambda x: {name: run(x)[OVERWRITE] for name, run in found.items()})(micro)


@pytest.mark.parametrize("name", ["accumulate", "MultiSteps"])
def test_microbatches_leave_the_state_that_their_whole_batch_leaves(accumulated, name):
    assert_same(accumulated[name], accumulated["whole"])
    assert accumulated[name]["input_amax_history"].tolist() == [np.abs(5 * X).max(), 0, 0, 0]


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_skipped_step_keeps_the_state_in_every_bit(bad):
    good, both = BATCHES[:1], BATCHES[:2].at[1, 0, 0].set(bad)
    for name, (after_good, after_both) in _of_one_and_of_two(good, both).items():
        jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name), after_both, after_good)


@jax.jit
def _of_one_and_of_two(one, two):
    """The variables after one batch, and after two, by each optimizer that skips steps."""
    scaled = loss_scaled(STILL, jmp.DynamicLossScale(2.0))
    runs = {
        "loss_scaled": _by_steps(scaled),
        "skip_nonfinite": _by_steps(skip_nonfinite(STILL), UNSCALED),
        "train state": _by_train_state(TrainState, scaled),
    }
    return {name: (run(one), run(two)) for name, run in runs.items()}


def test_variables_without_state_are_named_and_the_remedy_runs_as_written():
    names = {"model": MODEL, "key": jax.random.key(1), "x": X, "params": VARIABLES["params"]}
    with pytest.raises(ValueError, match="finds none: its variables have no collection") as raised:
        MODEL.apply({"params": names["params"]}, X)
    remedy, other = re.search(r"variables = (.*?);.* the policy '(.*?)'", str(raised.value)).groups()
    assert jax.eval_shape(lambda: eval(remedy, names)) == jax.eval_shape(lambda: VARIABLES)
    jax.eval_shape(jmp.with_policy(nn.Dense(16), other).apply, {"params": names["params"]}, X)


def test_history_is_as_long_as_the_one_that_was_saved():
    longer = jmp.with_policy(nn.Dense(16), "float8/8(min_size=0)_from_float32")
    grads = jax.eval_shape(jax.grad(lambda variables: jnp.sum(longer.apply(variables, X))), VARIABLES)
    assert grads == jax.eval_shape(lambda: VARIABLES)


def test_state_is_saved_with_the_variables_and_restored(runs, tmp_path):
    trained = runs["scaled"]
    abstract = jax.eval_shape(lambda: MODEL.init(jax.random.key(0), X))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", trained)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "0", abstract)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), restored, trained)


def test_parameters_that_are_differentiated_without_float8_state_are_an_error_that_names_the_layer():
    model = jmp.with_policy(nn.Dense(16), "float8/4(min_size=0)_from_mixed_bfloat16")
    x = jnp.ones((16, 16))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    loss_fn = lambda params, rest: model.apply({"params": params} | rest, x).astype(jnp.float32).sum()
    tx = jmp.optim.skip_nonfinite(optax.sgd(0.1))
    rest = {name: variables[name] for name in variables if name != "params"}
    steps = [
        jmp.optim.minimize(loss_fn, tx),
        lambda params, state, rest: jmp.value_and_grad(loss_fn, loss_scale=state)(params, rest),
        lambda params, state, rest: jax.value_and_grad(loss_fn)(params, rest),
    ]
    for step in steps:
        with pytest.raises(
            ValueError, match=r"^The weight 'kernel' of shape \(16, 16\), .* state that scales it is not"
        ):
            jax.eval_shape(step, variables["params"], jax.eval_shape(tx.init, variables["params"]), rest)
