"""`minimize` does what `value_and_grad` and `step` do, in fewer bytes."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_registry import bits

import jmp_policy as jmp

# Optimizers see gradients after they were cast up: only this function returns the others.
from jmp_policy.optim._minimize import call_without_casts

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 16).reshape(4, 4), "table": jnp.linspace(0.5, -0.5, 12).reshape(3, 4)}
PARAMS["scale"] = jnp.ones(4)
INNER = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}
SGD = optax.sgd(0.5)
SKIP = jmp.optim.skip_nonfinite(SGD)
ONES = jnp.ones(2)


def loss_fn(params, x, power=2):
    """A weight that is cast once, a table that is read twice, and a float32 scale."""
    half = jmp.cast_floating(params, "float16")
    hidden = (x.astype(jnp.float16) + half["table"]) @ half["w"]
    logits = (hidden.astype(jnp.float32) * params["scale"]).astype(jnp.float16) @ half["table"].T
    return jnp.mean(logits.astype(jnp.float32) ** power), logits


def _wrap(kind, inner):
    scale = jmp.NoOpLossScale() if kind == "skip" else jmp.DynamicLossScale(2.0**6)
    return inner if kind == "plain" else jmp.optim.loss_scaled(inner, scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "kind"),
    [
        ("clipped", "scaled"),
        ("adamw", "plain"),
        ("MultiSteps", "skip"),
        ("MultiSteps", "scaled"),
    ],
)
def test_it_is_value_and_grad_and_step_and_a_bad_step_keeps_every_bit(inner, kind):
    tx = _wrap(kind, INNER[inner]())
    scale = (lambda state: jmp.NoOpLossScale()) if kind == "plain" else (lambda state: state)
    minimizing_step = jax.jit(jmp.optim.minimize(loss_fn, tx, has_aux=True))

    @jax.jit
    def reference(params, state, x):
        (loss, aux), grads = jmp.value_and_grad(loss_fn, has_aux=True, loss_scale=scale(state))(params, x)
        return *jmp.optim.step(tx, grads, state, params), loss, aux

    ours = theirs = (PARAMS, tx.init(PARAMS))
    for x in (X, X * np.inf if kind != "plain" else X, X + 1):
        before, ours, theirs = ours, minimizing_step(*ours[:2], x), reference(*theirs[:2], x)
        # Two programs, in which XLA may fuse a product and a sum differently: within a rounding or two of float16.
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2**-9, atol=2**-9), ours, theirs)
        if not np.isfinite(x).all():
            assert bits((ours[0], ours[1].inner_state)) == bits((before[0], before[1].inner_state))
            assert kind != "scaled" or float(ours[1].loss_scale.loss_scale) == 2.0**5


@pytest.mark.parametrize("kind", ["scaled", "plain"])
def test_an_optimizer_that_needs_the_loss_is_an_error_that_shows_how_to_pass_it(kind):
    tx = _wrap(kind, optax.polyak_sgd())
    with pytest.raises(TypeError, match="value") as error:
        jax.eval_shape(jmp.optim.minimize(jnp.sum, tx), ONES, tx.init(ONES))
    (note,) = (note for note in error.value.__notes__ if "JAX" not in note)
    assert "jmp.optim.step(tx, grads, opt_state, params, value=loss)" in note
    with pytest.raises(TypeError, match="value") as error:
        jax.eval_shape(functools.partial(jmp.optim.step, tx), ONES, tx.init(ONES), ONES)
    assert error.value.__notes__.count(note) == 1


@pytest.mark.slow
def test_keyword_arguments_reach_the_loss_and_true_gradients_the_optimizer():
    seen = []

    def update(updates, state, params=None):
        seen.append({g.dtype.name for g in jax.tree.leaves(updates)})
        return updates, state

    spy = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(1.0))
    tx = _wrap("scaled", spy)
    step = jmp.optim.minimize(lambda params, x, power: loss_fn(params, x, power)[0], tx)
    new, _, loss = jax.jit(functools.partial(step, power=4))(PARAMS, tx.init(PARAMS), X)
    expected, grads = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, X, 4)[0]))(PARAMS)
    np.testing.assert_allclose(loss, expected, rtol=1e-3)
    jax.tree.map(lambda g, old, new: np.testing.assert_allclose(g, old - new, atol=2e-3), grads, PARAMS, new)
    assert seen == [{"float32"}] * len(seen)


@pytest.mark.slow
def test_half_parameters_are_minimized_too():
    tx, params = _wrap("skip", jmp.optim.kahan(SGD)), jmp.cast_floating(PARAMS, "bfloat16")
    step = jmp.optim.minimize(loss_fn, tx, has_aux=True)
    new, state, _, _ = jax.eval_shape(step, params, tx.init(params), X)
    assert {p.dtype.name for p in jax.tree.leaves(new)} == {"bfloat16"}
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))


def test_a_half_precision_loss_is_a_warning():
    tx = _wrap("scaled", SGD)
    step = jmp.optim.minimize(lambda w: jnp.sum(w.astype(jnp.float16)), tx)
    with pytest.warns(UserWarning, match="The loss is float16"):
        jax.eval_shape(step, ONES, tx.init(ONES))


def test_states_without_a_loss_scale_or_with_one_in_the_wrong_place_are_errors():
    scaled = _wrap("scaled", SGD)
    with pytest.raises(ValueError, match="exactly one loss scale, got tuple with 0"):
        jmp.optim.minimize(loss_fn, scaled, has_aux=True)(PARAMS, SGD.init(PARAMS), X)
    inside = optax.MultiSteps(scaled, 2)
    with pytest.raises(ValueError, match=r"go outermost, .* loss_scaled\(optax.MultiSteps\("):
        jmp.optim.minimize(loss_fn, inside, has_aux=True)(PARAMS, inside.init(PARAMS), X)


def test_a_step_of_a_loss_of_nothing_but_parameters_can_be_donated():
    tx = jmp.optim.loss_scaled(SGD, jmp.DynamicLossScale(4.0))
    step = jax.jit(jmp.optim.minimize(lambda params: jnp.sum(params**2), tx), donate_argnums=(0, 1))
    params, _, loss = step(jnp.ones(2), tx.init(ONES))
    assert params.tolist() == [0.0, 0.0]
    assert float(loss) == 2.0


def loss_of_power(params, x, power):
    return jnp.sum((params * x) ** power) if power > 1 else jnp.sum(params * x)


@functools.wraps(loss_of_power)
def declared(*args, **kwargs):
    return loss_of_power(*args, **kwargs)


declared.__signature__ = inspect.signature(loss_of_power)


@pytest.mark.parametrize("fun", [loss_of_power, declared])
def test_static_names_are_found_where_the_step_has_them(fun):
    minimizing_step = jmp.optim.minimize(fun, SKIP)
    assert list(inspect.signature(minimizing_step).parameters) == ["params", "opt_state", "x", "power"]
    step = jax.jit(minimizing_step, static_argnames="power")
    assert jax.eval_shape(step, ONES, SKIP.init(ONES), ONES, 2)[0].shape == (2,)


def test_a_loss_whose_arguments_are_named_like_those_of_the_step_still_trains():
    step = jax.jit(jmp.optim.minimize(lambda weights, params: jnp.sum(weights * params), SKIP))
    assert step(ONES, SKIP.init(ONES), ONES)[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("way", "name", "dtype"),
    [
        ("minimize", "novograd", "bfloat16"),
        ("step", "apply_if_finite", "float16"),
        ("update", "novograd", "bfloat16"),
        ("step", "mechanize", "bfloat16"),
    ],
)
def test_an_optimizer_that_needs_one_dtype_names_master_weights_under_half_precision(dtype, name, way):
    """Optax's error told of branches of `lax.cond` alone, or of operands of `lax.clamp`."""
    inner = {
        "novograd": optax.novograd(1e-3),
        "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
        "mechanize": optax.contrib.mechanize(optax.adam(1e-3)),
    }[name]
    params, grads = {"w": jnp.ones(4, dtype)}, {"w": jnp.ones(4)}
    loss_fn = lambda params: jnp.sum(params["w"].astype(jnp.float32) ** 2)

    def run(tx):
        state = tx.init(params)
        if way == "minimize":
            return jmp.optim.minimize(loss_fn, tx)(params, state)
        return jmp.optim.step(tx, grads, state, params) if way == "step" else tx.update(grads, state, params)

    scale = jmp.DynamicLossScale()
    with pytest.raises(TypeError, match=r"dtypes do not match|the same dtypes") as error:
        jax.eval_shape(lambda: run(jmp.optim.loss_scaled(inner, scale)))
    (note,) = (note for note in error.value.__notes__ if "JAX" not in note)
    assert f"parameters are {dtype} here" in note
    assert "loss_scaled(master_weights(optax.novograd(1e-3)), loss_scale)" in note
    jax.eval_shape(lambda: run(jmp.optim.loss_scaled(jmp.optim.master_weights(inner), scale)))


@pytest.mark.parametrize("wrap", [lambda tx: tx, jmp.optim.skip_nonfinite], ids=["plain", "skip"])
def test_both_parameters_of_lookahead_are_differentiated_and_the_fast_ones_trained(wrap):
    """The error was JAX's, of pytree prefixes: the gradients are a `LookaheadParams` too."""
    tx, params = wrap(optax.lookahead(optax.sgd(0.5), 2, 0.5)), optax.LookaheadParams.init_synced({"w": ONES})
    step = jax.jit(jmp.optim.minimize(lambda params: jnp.sum(params.fast["w"] ** 2) / 2, tx))
    with jax.numpy_dtype_promotion("standard"):
        params, state, _ = step(params, tx.init(params))
        assert params.fast["w"].tolist() == [0.5, 0.5]
        params, _, _ = step(params, state)  # the fast ones are 0.25 before they go half of the way back to 1
    assert params.slow["w"].tolist() == params.fast["w"].tolist() == [0.625, 0.625]


# Gradients stay in half precision exactly where that changes none of their bits.

HALF = jnp.float16
W = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def _cast_once(w):
    return jnp.sum(jnp.sin(w.astype(HALF)).astype(jnp.float32))


@jax.custom_vjp
def doubled(x):
    return x


doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
FUNS = {
    "cast once": (_cast_once, HALF),
    "cast twice": (lambda w: _cast_once(w) + _cast_once(2 * w), jnp.float32),
    "cast, and used": (lambda w: _cast_once(w) + jnp.sum(w), jnp.float32),
    "cast after a product": (lambda w: _cast_once(w * 2), jnp.float32),
    "cast inside jit": (lambda w: jax.jit(_cast_once)(w), jnp.float32),
    "cast inside a scan": (lambda w: jax.lax.scan(lambda c, x: (c + _cast_once(x), None), 0.0, w)[0], jnp.float32),
    "not used": (lambda w: jnp.float32(0.0), jnp.float32),
    "derivatives of its own": (lambda w: jnp.sum(doubled(w.astype(HALF)).astype(jnp.float32)), HALF),
}


ADAM = optax.adam(1e-2)
MISFITS = {
    "another tree": (ADAM.init, {"a": ONES}, r"it has nothing at .*mu\['b'\], where .* has the shape \(2,\)\."),
    "another shape": (
        ADAM.init,
        {"a": jnp.ones(3), "b": ONES},
        r"it has the shape \(3,\) at .*\['a'\], where .* \(2,\)\.",
    ),
    "another optimizer": (optax.sgd(1.0, 0.9).init, {"a": ONES, "b": ONES}, r"it has nothing at .*count, where"),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("wrap", [lambda tx: tx, jmp.optim.skip_nonfinite], ids=["bare", "skip_nonfinite"])
def test_a_state_of_other_parameters_is_named_with_the_place_that_does_not_fit(name, wrap):
    init, others, message = MISFITS[name]
    tx, params = wrap(ADAM), {"a": ONES, "b": ONES}
    fun = lambda params: jnp.sum(params["a"] * params["b"])
    state = wrap(optax.GradientTransformation(init, ADAM.update)).init(others)
    for take_step in (
        lambda: jmp.optim.minimize(fun, tx)(params, state),
        lambda: jmp.optim.step(tx, jax.grad(fun)(params), state, params),
    ):
        with pytest.raises((ValueError, TypeError, AttributeError)) as error:
            take_step()
        (note,) = (note for note in error.value.__notes__ if "JAX" not in note)
        assert re.match(f"The optimizer state does not fit the parameters: {message}", note)
        assert note.endswith("For example: opt_state = tx.init(params).")


def _differentiate(fun, params):
    return call_without_casts(jax.value_and_grad(fun), params)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNS)
def test_a_gradient_is_half_only_where_its_last_operation_is_a_cast(name):
    fun, dtype = FUNS[name]
    (loss, grad), (expected_loss, expected) = _differentiate(fun, W), jax.value_and_grad(fun)(W)
    assert grad.dtype == dtype
    np.testing.assert_array_equal(loss, expected_loss)
    np.testing.assert_array_equal(grad.astype(jnp.float32), expected)


def test_a_gradient_that_is_read_again_stays_in_float32():
    def differentiated(w):
        grad = jax.grad(_cast_once)(w)
        return jnp.sum(grad), grad

    total, grad = call_without_casts(differentiated, W)
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(total, jnp.sum(grad))


def test_parameters_with_one_gradient_share_it():
    fun = lambda params: _cast_once(params["a"] + params["b"]) + _cast_once(params["c"])
    params = dict.fromkeys("abc", W)
    _, grads = _differentiate(fun, params)
    assert {name: grad.dtype for name, grad in grads.items()} == {"a": HALF, "b": HALF, "c": HALF}
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.astype(y.dtype), y), grads, jax.grad(fun)(params))
