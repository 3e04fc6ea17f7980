"""`quantize_state` inside of all that goes around it, and around all that goes inside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from optax import contrib
from optimizer_registry import bits, types
from quantized_moments import make_grads, make_params

import jmp_policy as jmp
from jmp_policy import optim


def quantize(inner, **options):
    return optim.quantize_state(inner, min_size=500, **options)


ADAMW = optax.adamw(1e-2)
is_matrix = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
label = lambda params: jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "rest", params)

AROUND = {
    "loss_scaled": lambda: optim.loss_scaled(quantize(ADAMW), jmp.DynamicLossScale()),
    "skip_nonfinite": lambda: optim.skip_nonfinite(quantize(ADAMW, stochastic=jax.random.key(1))),
    "master_weights": lambda: optim.loss_scaled(optim.master_weights(quantize(ADAMW)), jmp.DynamicLossScale()),
    "split": lambda: optim.skip_nonfinite(optim.master_weights(quantize(ADAMW), mode="split")),
    "kahan": lambda: optim.kahan(quantize(optax.lion(1e-3))),
    "stochastic_rounding": lambda: optim.stochastic_rounding(quantize(ADAMW), jax.random.key(0)),
    "MultiSteps": lambda: optax.MultiSteps(quantize(ADAMW), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(lambda rate: quantize(optax.adam(rate)))(
        optax.linear_schedule(1e-2, 0.0, 10)
    ),
    "partition": lambda: optax.partition({"matrix": quantize(optax.adam(1e-2)), "rest": optax.sgd(1e-2)}, label),
    "masked": lambda: optax.masked(quantize(ADAMW), is_matrix),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), quantize(ADAMW)),
    "MultiSteps inside": lambda: quantize(optax.MultiSteps(ADAMW, 2).gradient_transformation()),
    "plateau": lambda: quantize(optax.chain(ADAMW, contrib.reduce_on_plateau(patience=1))),
    "cast_state": lambda: optim.loss_scaled(quantize(optax.adamw(1e-2, mu_dtype="bfloat16")), jmp.NoOpLossScale()),
}
EXTRA = {"plateau": {"value": 1.0}}


def run(tx, params, steps=3, **extra):
    state = tx.init(params)
    step = jax.jit(functools.partial(optim.step, tx))
    for n in range(steps):
        params, state = step(make_grads(params, n), state, params, **extra)
    return params, state


HALF = ("master_weights", "split", "kahan", "stochastic_rounding", "MultiSteps inside")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in AROUND), *((name, "bfloat16") for name in HALF)]
)
def test_no_step_changes_a_dtype_or_loses_its_codes(name, dtype):
    tx, params = AROUND[name](), make_params(dtype)
    before = tx.init(params)
    new_params, state = run(tx, params, 2, **EXTRA.get(name, {}))
    assert types((new_params, state)) == types((params, before))
    assert jax.tree.structure(state) == jax.tree.structure(before)
    codes = [x for x in jax.tree.leaves(state) if x.dtype == jnp.uint8]
    assert len(codes) in (2, 4)
    assert all(len(np.unique(x)) > 20 for x in codes)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(new_params))


def test_an_update_by_itself_keeps_the_dtypes_of_what_is_left_in_half_precision():
    tx, params = quantize(ADAMW), make_params("bfloat16")
    state = jax.eval_shape(tx.init, params)
    _, new = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.leaves(new) == jax.tree.leaves(state)
    assert new.inner_state[0].mu["b"].dtype == jnp.bfloat16


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["copies", "split"])
def test_masters_of_half_parameters_take_the_steps_of_float32_parameters(mode):
    half = make_params("bfloat16")
    tx = optim.master_weights(quantize(ADAMW), **({} if mode == "copies" else {"mode": mode}))
    params, state = run(tx, half)
    wide, plain = jmp.cast_to_full(half), quantize(ADAMW)
    plain_state, update = plain.init(wide), jax.jit(plain.update)
    for n in range(3):
        updates, plain_state = update(make_grads(half, n), plain_state, wide)
        wide = optax.apply_updates(wide, updates)
    masters = optim.master_params(state, params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), masters, wide)
    assert bits(optax.tree_utils.tree_get(state, "mu")) == bits(optax.tree_utils.tree_get(plain_state, "mu"))


@pytest.mark.slow
def test_minimize_takes_a_step():
    tx = optim.loss_scaled(quantize(ADAMW), jmp.DynamicLossScale())
    params = make_params()
    loss_fn = lambda params: sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
    step = jax.jit(optim.minimize(loss_fn, tx))
    state = tx.init(params)
    losses = []
    for _ in range(3):
        params, state, loss, *_ = step(params, state)
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.exhaustive
def test_a_skipped_step_keeps_every_bit_of_codes_scales_and_key():
    tx = optim.loss_scaled(quantize(ADAMW, stochastic=jax.random.key(1)), jmp.DynamicLossScale())
    params = make_params()
    params, state = run(tx, params, 2)
    bad = make_grads(params, 2)
    bad["w"] = bad["w"].at[3, 5].set(jnp.nan)
    new_params, new = jax.jit(functools.partial(optim.step, tx))(bad, state, params)
    assert bits((new_params, new.inner_state)) == bits((params, state.inner_state))
    assert int(new.skipped_steps) == 1


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_without_loss_scaled_what_is_not_finite_stays_visible(bad):
    tx, params = quantize(ADAMW), make_params()
    state = tx.init(params)
    update = jax.jit(tx.update)
    grads = make_grads(params, 0)
    grads["w"] = grads["w"].at[3, 5].set(bad)
    updates, state = update(grads, state, params)
    is_bad = ~np.isfinite(updates["w"])
    assert is_bad[3, 5]
    assert is_bad.sum() == 1
    updates, state = update(make_grads(params, 1), state, params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state.scales)))


@pytest.mark.slow
@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("large", [2e19, 1e30])
def test_a_finite_gradient_whose_square_overflows_keeps_to_its_own_element(large, elementwise):
    """The scale of its block became infinite, and all 256 elements nan in the next step."""
    tx = optim.quantize_state(optax.adam(1e-2), min_size=0, elementwise=elementwise)
    params = {"w": jnp.ones((64, 64))}
    updated = []
    for first in (large, 1.0):
        state, update = tx.init(params), jax.jit(tx.update)
        for value in (1.0, first, 1.0, 1.0):
            updates, state = update({"w": jnp.ones((64, 64)).at[0, 0].set(value)}, state, params)
        updated.append(np.asarray(updates["w"]))
    assert np.isfinite(updated[0]).all()
    np.testing.assert_array_equal(updated[0].ravel()[1:], updated[1].ravel()[1:])


@pytest.mark.slow
def test_tree_map_params_takes_moments_and_scales_with_and_without_another_tree():
    tx, params = quantize(ADAMW, stochastic=jax.random.key(1)), make_params()
    state = tx.init(params)
    assert bits(optax.tree_map_params(tx, lambda x: x, state)) == bits(state)
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    named = optax.tree_map_params(tx, lambda _, name: name, state, names, transform_non_params=lambda _: "other")
    assert named.inner_state[0].mu == named.inner_state[0].nu == named.scales[0] == named.scales[1] == names
    assert (named.inner_state[0].count, named.key) == ("other", "other")


@pytest.mark.exhaustive
def test_extra_arguments_and_schedules_reach_the_optimizer():
    tx = quantize(optax.chain(optax.adam(optax.linear_schedule(1e-2, 0.0, 2)), contrib.reduce_on_plateau(patience=1)))
    params = make_params()
    _, state = run(tx, params, 3, value=jnp.float32(1))
    assert float(optax.tree_utils.tree_get(state, "scale")) < 1
    updates, _ = jax.jit(tx.update)(make_grads(params, 3), state, params, value=jnp.float32(1))
    assert not any(np.any(u) for u in jax.tree.leaves(updates))


@pytest.mark.exhaustive
def test_noise_is_new_at_each_step_and_the_same_for_the_same_key():
    first, second, other = (
        run(quantize(optax.lion(1e-3), stochastic=jax.random.key(seed)), make_params())[1] for seed in (1, 1, 2)
    )
    assert bits(first) == bits(second)
    codes, others = (np.asarray(s.inner_state[0].mu["w"], np.int32) for s in (first, other))
    assert (codes != others).any()
    assert np.abs(codes - others).mean() < 1
    _, earlier = run(quantize(optax.lion(1e-3), stochastic=jax.random.key(1)), make_params(), 2)
    assert not np.array_equal(first.key, earlier.key)


@pytest.mark.exhaustive
def test_linen_and_nnx_train_with_it():
    x = jnp.ones((4, 64))
    model = nn.Dense(64)
    params = model.init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optim.quantize_state(ADAMW))
    loss_fn = lambda params: jnp.mean(model.apply({"params": params}, x) ** 2)
    step = jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss_fn)(state.params)))
    after = step(step(state))
    assert float(loss_fn(after.params)) < float(loss_fn(params))
    assert types(after.opt_state) == types(state.opt_state)

    layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optim.quantize_state(ADAMW), wrt=nnx.Param)

    @nnx.jit
    def train(layer, optimizer):
        loss, grads = nnx.value_and_grad(lambda layer: jnp.mean(layer(x) ** 2))(layer)
        optimizer.update(layer, grads)
        return loss

    losses = [float(train(layer, optimizer)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert "uint8" in {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(optimizer)) if hasattr(leaf, "dtype")}


def test_first_codes_are_written_and_not_computed():
    params = {"w": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    tx = optim.quantize_state(optax.rmsprop(1e-2, initial_scale=0.5, momentum=0.9))
    text = jax.jit(tx.init).lower(params).as_text()
    on_large = [line for line in text.splitlines() if "4096x1024" in line and "broadcast_in_dim" not in line]
    assert all("return" in line or "func.func" in line for line in on_large), on_large
    assert len(text) < 20_000  # no large constants
