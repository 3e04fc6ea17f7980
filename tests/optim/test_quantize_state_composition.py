"""`quantize_state` inside of all that goes around it, and around all that goes inside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optimizer_registry import METHODS, bits
from quantized_moments import make_grads, make_params

import jmp_policy as jmp
from jmp_policy import optim

ADAMW = optax.adamw(1e-2)


def quantize(inner, **options):
    return optim.quantize_state(inner, min_size=500, **options)


def _labels(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "rest", params)


AROUND = {
    "loss_scaled": lambda: optim.loss_scaled(quantize(optax.adamw(1e-2, mu_dtype="bfloat16")), jmp.DynamicLossScale()),
    **{name: lambda make=make: optim.skip_nonfinite(make(quantize(ADAMW))) for name, make in METHODS.items()},
    "inject_hyperparams": lambda: optax.inject_hyperparams(lambda rate: quantize(optax.adam(rate)))(
        optax.linear_schedule(1e-2, 0.0, 10)
    ),
    "partition": lambda: optax.partition({"matrix": quantize(optax.adam(1e-2)), "rest": optax.sgd(1e-2)}, _labels),
    "MultiSteps around": lambda: optax.MultiSteps(quantize(ADAMW), 2).gradient_transformation(),
    "MultiSteps inside": lambda: quantize(optax.MultiSteps(ADAMW, 2).gradient_transformation()),
    "plateau": lambda: quantize(optax.chain(ADAMW, contrib.reduce_on_plateau(patience=1))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "bfloat16" if name in METHODS or "inside" in name else "float32") for name in AROUND]
)
def test_no_step_changes_a_dtype(name, dtype):
    tx, params = AROUND[name](), make_params(dtype)
    before = jax.eval_shape(lambda: (params, tx.init(params)))
    extra = {"value": jnp.float32(1)} if name == "plateau" else {}
    after = jax.eval_shape(functools.partial(optim.step, tx, **extra), params, *before[::-1])
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [(x.shape, x.dtype) for x in jax.tree.leaves(before)]
    assert [x.dtype for x in jax.tree.leaves(after)].count(jnp.uint8) in (3, 6)


def test_an_update_by_itself_keeps_the_dtypes_of_what_is_left_in_half_precision():
    tx, params = quantize(ADAMW), make_params("bfloat16")
    state = jax.eval_shape(tx.init, params)
    _, new = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.leaves(new) == jax.tree.leaves(state)
    assert new.inner_state[0].mu["b"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_without_loss_scaled_what_is_not_finite_stays_visible():
    tx, params = quantize(ADAMW), make_params()
    state = tx.init(params)
    update = jax.jit(tx.update)
    grads = make_grads(params, 0)
    grads["w"] = grads["w"].at[3, 5].set(-np.inf)
    updates, state = update(grads, state, params)
    is_bad = ~np.isfinite(updates["w"])
    assert is_bad[3, 5]
    assert is_bad.sum() == 1
    updates, state = update(make_grads(params, 1), state, params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state.scales)))


@pytest.mark.slow
@pytest.mark.parametrize(("elementwise", "large"), [(True, 2e19), (False, 1e30)])
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


def test_first_codes_are_written_and_not_computed():
    params = {"w": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    tx = optim.quantize_state(optax.rmsprop(1e-2, initial_scale=0.5, momentum=0.9))
    text = jax.jit(tx.init).lower(params).as_text()
    on_large = [line for line in text.splitlines() if "4096x1024" in line and "broadcast_in_dim" not in line]
    assert all("return" in line or "func.func" in line for line in on_large), on_large
    assert len(text) < 20_000  # no large constants
