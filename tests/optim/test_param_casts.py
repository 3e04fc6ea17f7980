"""Gradients stay in half precision exactly where that changes none of their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy.optim._minimize import call_without_casts

HALF = jnp.float16
W = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def _cast_once(w):
    return jnp.sum(jnp.sin(w.astype(HALF)).astype(jnp.float32))


FUNS = {
    "cast once": (_cast_once, HALF),
    "cast twice": (lambda w: _cast_once(w) + _cast_once(2 * w), jnp.float32),
    "cast, and used": (lambda w: _cast_once(w) + jnp.sum(w), jnp.float32),
    "cast after a product": (lambda w: _cast_once(w * 2), jnp.float32),
    "cast to float32": (lambda w: jnp.sum(w.astype(jnp.float32)), jnp.float32),
    "cast inside jit": (lambda w: jax.jit(_cast_once)(w), jnp.float32),
    "cast inside a scan": (lambda w: jax.lax.scan(lambda c, x: (c + _cast_once(x), None), 0.0, w)[0], jnp.float32),
    "not used": (lambda w: jnp.float32(0.0), jnp.float32),
}


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


def test_a_cast_that_is_left_out_is_not_in_the_jaxpr():
    def count_casts(gradient):
        return [eqn.primitive.name for eqn in jax.make_jaxpr(gradient)(W).eqns].count("convert_element_type")

    fun = lambda w: jnp.sum((w.astype(HALF) * 3).astype(jnp.float32))
    assert count_casts(lambda w: _differentiate(fun, w)) == count_casts(jax.value_and_grad(fun)) - 1


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


def test_auxiliary_data_and_what_is_closed_over_come_through():
    @jax.jit
    def evaluate(params, x):
        fun = lambda p: (jnp.sum((p["w"].astype(HALF) @ x.astype(HALF)).astype(jnp.float32)), (p["scale"], None))
        (loss, aux), grads = call_without_casts(jax.value_and_grad(fun, has_aux=True), params)
        assert {name: grad.dtype for name, grad in grads.items()} == {"w": HALF, "scale": jnp.float32}
        return fun(params), (loss, aux)

    expected, got = evaluate({"w": W, "scale": jnp.ones(2)}, jnp.ones(3))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
def test_custom_derivatives_are_kept():
    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    _, grad = _differentiate(lambda w: jnp.sum(doubled(w.astype(HALF)).astype(jnp.float32)), W)
    np.testing.assert_array_equal(grad, jnp.full((2, 3), 2, HALF))
