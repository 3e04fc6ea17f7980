"""Casts are taken out of a function exactly where that changes no bit of a gradient."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy.optim._steps._minimize import _find_half_casts, extract_half_casts

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


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNS)
def test_a_parameter_is_a_copy_only_where_all_of_it_is_one_cast(name):
    fun, dtype = FUNS[name]
    copy, of_copy = extract_half_casts(fun, W)
    assert copy.dtype == dtype
    np.testing.assert_array_equal(of_copy(copy), fun(W))
    grad = jax.grad(of_copy)(copy)
    assert grad.dtype == dtype
    np.testing.assert_array_equal(grad.astype(jnp.float32), jax.grad(fun)(W))


def test_a_parameter_that_is_returned_is_no_copy():
    copy, of_copy = extract_half_casts(lambda w: (w.astype(HALF), w), W)
    assert copy.dtype == jnp.float32
    assert [x.dtype for x in of_copy(copy)] == [HALF, jnp.float32]


def test_trees_and_what_is_closed_over_come_through():
    @jax.jit
    def evaluate(params, x):
        fun = lambda p: {"loss": jnp.sum(p["w"].astype(HALF) @ x.astype(HALF)), "aux": (p["scale"], None)}
        copies, of_copy = extract_half_casts(fun, params)
        assert {name: copy.dtype for name, copy in copies.items()} == {"w": HALF, "scale": jnp.float32}
        return fun(params), of_copy(copies)

    expected, got = evaluate({"w": W, "scale": jnp.ones(2)}, jnp.ones(3))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
def test_custom_derivatives_are_kept():
    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    copy, of_copy = extract_half_casts(lambda w: jnp.sum(doubled(w.astype(HALF)).astype(jnp.float32)), W)
    np.testing.assert_array_equal(jax.grad(of_copy)(copy), jnp.full((2, 3), 2, HALF))


def test_all_parameters_are_looked_up_in_one_walk_through_the_jaxpr():
    """Tracing `minimize` took time quadratic in the number of parameters."""

    class CountedList(list):
        walks = 0

        def __iter__(self):
            self.walks += 1
            return super().__iter__()

    body = jax.make_jaxpr(lambda leaves: [leaf.astype(HALF) * 2 for leaf in leaves])([W] * 5).jaxpr
    counted = SimpleNamespace(invars=body.invars, outvars=body.outvars, eqns=CountedList(body.eqns))
    assert all(_find_half_casts(counted))
    assert counted.eqns.walks == 1
