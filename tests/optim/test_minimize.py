"""`minimize` does what `value_and_grad` and `step` do, in fewer bytes."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from optimizer_registry import bits

import jmp_policy as jmp

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Net(nn.Module):
    """A layer cast once, a table that is read twice, and a norm with float32 parameters."""

    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(4, 4)
        x = nn.LayerNorm()(nn.Dense(4)(x + embed(jnp.arange(3))))
        return embed.attend(x)


NET = jmp.with_policy(Net(), "params=float32,compute=float16,output=float32")
with jax.numpy_dtype_promotion("standard"):  # the norm promotes its own float32 parameters
    PARAMS = jax.jit(NET.init)(jax.random.key(0), X)["params"]
INNER = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


def loss_fn(params, x, power=2):
    logits = NET.apply({"params": params}, x)
    return jnp.mean(logits**power), logits


def _wrap(kind, inner):
    scale = jmp.NoOpLossScale() if kind == "skip" else jmp.DynamicLossScale(2.0**6)
    return jmp.optim.loss_scaled(inner, scale)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scaled", "skip", "plain"])
@pytest.mark.parametrize("inner", INNER)
def test_it_is_value_and_grad_and_step(inner, kind):
    tx = INNER[inner]() if kind == "plain" else _wrap(kind, INNER[inner]())
    scale = (lambda state: jmp.NoOpLossScale()) if kind == "plain" else (lambda state: state)
    minimizing_step = jax.jit(jmp.optim.minimize(loss_fn, tx, has_aux=True))

    @jax.jit
    def reference(params, state, x):
        (loss, aux), grads = jmp.value_and_grad(loss_fn, has_aux=True, loss_scale=scale(state))(params, x)
        return *jmp.optim.step(tx, grads, state, params), loss, aux

    ours = theirs = (PARAMS, tx.init(PARAMS))
    for x in (X, X * np.inf if kind != "plain" else X, X + 1):
        ours, theirs = minimizing_step(*ours[:2], x), reference(*theirs[:2], x)
        # Two programs, in which XLA may fuse a product and a sum differently: within a rounding or two of float32.
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("inner", INNER)
def test_a_bad_step_keeps_every_bit(inner):
    tx = _wrap("scaled", INNER[inner]())
    state = tx.init(PARAMS)
    params, new_state, _, _ = jax.jit(jmp.optim.minimize(loss_fn, tx, has_aux=True))(PARAMS, state, X * np.inf)
    assert bits((params, new_state.inner_state)) == bits((PARAMS, state.inner_state))
    assert float(new_state.loss_scale.loss_scale) == 2.0**5


@pytest.mark.parametrize("kind", ["scaled", "plain"])
def test_an_optimizer_that_needs_the_loss_is_an_error_that_shows_how_to_pass_it(kind):
    polyak = optax.polyak_sgd()
    tx = polyak if kind == "plain" else _wrap(kind, polyak)
    with pytest.raises(TypeError, match="value") as error:
        jax.eval_shape(jmp.optim.minimize(jnp.sum, tx), jnp.ones(2), tx.init(jnp.ones(2)))
    (note,) = (note for note in error.value.__notes__ if "JAX" not in note)
    assert "jmp.optim.step(tx, grads, opt_state, params, value=loss)" in note
    with pytest.raises(TypeError, match="value") as error:
        jax.eval_shape(functools.partial(jmp.optim.step, tx), jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))
    assert error.value.__notes__.count(note) == 1


def test_keyword_arguments_reach_the_loss():
    tx = _wrap("scaled", optax.sgd(0.1))
    step = jmp.optim.minimize(lambda params, x, power: loss_fn(params, x, power)[0], tx)
    _, _, loss = step(PARAMS, tx.init(PARAMS), X, power=4)
    np.testing.assert_allclose(loss, loss_fn(PARAMS, X, 4)[0], rtol=1e-6)


@pytest.mark.exhaustive
def test_the_optimizer_sees_true_gradients_in_the_dtypes_of_parameters():
    seen = []

    def update(updates, state, params=None):
        seen.append({g.dtype.name for g in jax.tree.leaves(updates)})
        return updates, state

    spy = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    for kind in ("scaled", "skip"):
        tx = _wrap(kind, optax.chain(spy, optax.sgd(1.0)))
        new, _, _, _ = jmp.optim.minimize(loss_fn, tx, has_aux=True)(PARAMS, tx.init(PARAMS), X)
        true = jax.grad(lambda p: loss_fn(p, X)[0])(PARAMS)
        step = jax.tree.map(lambda old, new: old - new, PARAMS, new)
        jax.tree.map(lambda g, t: np.testing.assert_allclose(g, t, atol=2e-3), step, true)
    assert seen == [{"float32"}] * len(seen)


@pytest.mark.slow
def test_half_parameters_are_minimized_too():
    tx = _wrap("skip", jmp.optim.kahan(optax.adamw(1e-2)))
    params = jmp.cast_floating(PARAMS, "bfloat16")
    new, state, _, _ = jmp.optim.minimize(loss_fn, tx, has_aux=True)(params, tx.init(params), X)
    assert {p.dtype.name for p in jax.tree.leaves(new)} == {"bfloat16"}
    assert bool(state.grads_finite)


@pytest.mark.slow
def test_a_half_precision_loss_is_a_warning():
    tx = _wrap("scaled", optax.sgd(0.1))
    step = jmp.optim.minimize(lambda w: jnp.sum(w.astype(jnp.float16)), tx)
    with pytest.warns(UserWarning, match="The loss is float16"):
        step(jnp.ones(2), tx.init(jnp.ones(2)))


def test_states_without_a_loss_scale_or_with_one_in_the_wrong_place_are_errors():
    scaled = _wrap("scaled", optax.sgd(0.1))
    with pytest.raises(ValueError, match="exactly one loss scale, got tuple with 0"):
        jmp.optim.minimize(loss_fn, scaled, has_aux=True)(PARAMS, optax.sgd(0.1).init(PARAMS), X)
    inside = optax.MultiSteps(scaled, 2)
    with pytest.raises(ValueError, match=r"go outermost, .* loss_scaled\(optax.MultiSteps\("):
        jmp.optim.minimize(loss_fn, inside, has_aux=True)(PARAMS, inside.init(PARAMS), X)


def test_a_step_of_a_loss_of_nothing_but_parameters_can_be_donated():
    tx = jmp.optim.loss_scaled(optax.sgd(0.5), jmp.DynamicLossScale(4.0))
    step = jax.jit(jmp.optim.minimize(lambda params: jnp.sum(params**2), tx), donate_argnums=(0, 1))
    params, _, loss = step(jnp.ones(2), tx.init(jnp.ones(2)))
    assert params.tolist() == [0.0, 0.0]
    assert float(loss) == 2.0


@pytest.mark.slow
def test_static_names_are_found_where_the_step_has_them():
    def loss_of_power(params, x, power):
        return jnp.sum((params * x) ** power) if power > 1 else jnp.sum(params * x)

    tx = jmp.optim.skip_nonfinite(optax.sgd(0.5))
    step = jax.jit(jmp.optim.minimize(loss_of_power, tx), static_argnames="power")
    params = step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), 2)[0]
    assert params.tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_static_names_of_a_loss_that_declares_its_signature_are_found_too():
    def declare(fun):
        @functools.wraps(fun)
        def declared(*args, **kwargs):
            return fun(*args, **kwargs)

        declared.__signature__ = inspect.signature(fun)
        return declared

    @declare
    def loss_of_power(params, x, power):
        return jnp.sum((params * x) ** power) if power > 1 else jnp.sum(params * x)

    tx = jmp.optim.skip_nonfinite(optax.sgd(0.5))
    minimizing_step = jmp.optim.minimize(loss_of_power, tx)
    assert list(inspect.signature(minimizing_step).parameters) == ["params", "opt_state", "x", "power"]
    step = jax.jit(minimizing_step, static_argnames="power")
    assert step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), 2)[0].tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_a_loss_whose_arguments_are_named_like_those_of_the_step_still_trains():
    tx = jmp.optim.skip_nonfinite(optax.sgd(0.5))
    step = jax.jit(jmp.optim.minimize(lambda weights, params: jnp.sum(weights * params), tx))
    assert step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["novograd", "apply_if_finite"])
@pytest.mark.parametrize("way", ["minimize", "step", "update"])
def test_an_optimizer_that_needs_one_dtype_names_master_weights_under_half_precision(dtype, name, way):
    """Optax's error told of branches of `lax.cond` alone."""
    inner = {"novograd": optax.novograd(1e-3), "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3)}[name]
    params, grads = {"w": jnp.ones(4, dtype)}, {"w": jnp.ones(4)}
    loss_fn = lambda params: jnp.sum(params["w"].astype(jnp.float32) ** 2)

    def run(tx):
        state = tx.init(params)
        if way == "minimize":
            return jmp.optim.minimize(loss_fn, tx)(params, state)
        return jmp.optim.step(tx, grads, state, params) if way == "step" else tx.update(grads, state, params)

    scale = jmp.DynamicLossScale()
    with pytest.raises(TypeError, match="cond branches must have equal output types") as error:
        jax.eval_shape(lambda: run(jmp.optim.loss_scaled(inner, scale)))
    (note,) = (note for note in error.value.__notes__ if "JAX" not in note)
    assert f"parameters are {dtype} here" in note
    assert "loss_scaled(master_weights(optax.novograd(1e-3)), loss_scale)" in note
    jax.eval_shape(lambda: run(jmp.optim.loss_scaled(jmp.optim.master_weights(inner), scale)))
