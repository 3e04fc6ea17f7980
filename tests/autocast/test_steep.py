"""Saturating functions whose results reach a logarithm or a quotient: as in float32, where half precision is 0 or 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import trace

import jmp_policy as jmp

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

HALVES = ["bfloat16", "float16"]
EYE = np.eye(8, dtype=np.float32)
LOGITS = np.array([-10, -7, -3, -0.5, 0.5, 3, 7, 10], np.float32)  # numbers of bfloat16
FILLED = np.broadcast_to(LOGITS, (8, 8)).copy()
FIRST = EYE[0]
sigmoid = jax.nn.sigmoid


def under(half, function):
    """A function of logits that are half, because a matmul made them."""
    return jmp.autocast(lambda x: function(x @ EYE), jmp.Policy("float32", half, None))


def with_gradient(fun, x):
    return jax.jit(jax.value_and_grad(lambda x: jnp.sum(fun(x))))(x)


@jax.custom_vjp
def negative_log(p):
    return -jnp.log(p)


negative_log.defvjp(lambda p: (-jnp.log(p), p), lambda p, cotangent: (-cotangent / p,))

BINARY_CROSS_ENTROPIES = {
    "clipped": lambda p: -jnp.log(1 - jnp.clip(p, 1e-7, 1 - 1e-7)),
    "bare": lambda p: -jnp.log(1 - p),
    "log1p": lambda p: -jnp.log1p(-p),
    "of both": lambda p: -(0.25 * jnp.log(p) + 0.75 * jnp.log(1 - p)),
    "bernoulli": lambda p: -jax.scipy.stats.bernoulli.logpmf(0, p),
    "logit": jax.scipy.special.logit,
    "of a user's derivative": lambda p: negative_log(1 - p),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("loss", BINARY_CROSS_ENTROPIES.values(), ids=BINARY_CROSS_ENTROPIES)
def test_a_binary_cross_entropy_by_hand_keeps_its_value_and_its_gradient(loss, half):
    """Of the same logits: what differs is the gradient's one rounding to half, on its way through the matmul."""
    fun = lambda h: loss(sigmoid(h))
    value, gradient = with_gradient(under(half, fun), FILLED)
    expected, exact_gradient = with_gradient(fun, FILLED)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=4e-3, atol=6e-8)


OTHERS = {
    "log of a squashed normal": lambda h: jnp.log(1 - jnp.tanh(h / 2) ** 2 + 1e-6),
    "inverse of a squash": lambda h: jnp.arctanh(jnp.tanh(h / 2)),
    "odds": lambda h: sigmoid(h) / (1 - sigmoid(h)),
    "root": lambda h: jnp.sqrt(1 - jnp.tanh(h / 2) ** 2),
    "quantile": lambda h: jax.scipy.special.erfinv(lax.erf(h / 4)),
    "log of a softmax": lambda h: jnp.log(jax.nn.softmax(2 * h)),
    "log of the probability of a class": lambda h: jnp.log(jnp.sum(jax.nn.softmax(2 * h) * FIRST, -1)),
    "log of a cumulative probability": lambda h: jnp.log(jnp.cumsum(jax.nn.softmax(2 * h), -1)),
    "log of 1 - softmax": lambda h: jnp.log(1 - jax.nn.softmax(h / 2) + 1e-9),
    "in a branch": lambda h: jnp.log(1 - lax.cond(h[0, 0] < 0, sigmoid, jnp.tanh, h)),
    "carried": lambda h: lax.scan(lambda sum, row: (sum + jnp.log(1 - row), row), jnp.zeros(8), sigmoid(h))[0],
    "around a loop": lambda h: jnp.log(1 - lax.fori_loop(0, 2, lambda _, p: sigmoid(p * 0 + h), h)),
    "recomputed": lambda h: jnp.log(1 - jax.checkpoint(sigmoid)(h)),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("fun", OTHERS.values(), ids=OTHERS)
def test_what_a_steep_operation_reads_is_that_of_float32(fun, half):
    value, gradient = with_gradient(under(half, fun), FILLED)
    expected, exact_gradient = with_gradient(fun, FILLED)
    np.testing.assert_allclose(value, expected, rtol=1e-2)  # where h / 2 is rounded, or a softmax is of 2 h
    np.testing.assert_allclose(gradient, exact_gradient, rtol=2e-2, atol=2e-6 * np.abs(exact_gradient).max())


@pytest.mark.parametrize("half", HALVES)
def test_the_gradient_inside_of_autocast_is_the_one_outside(half):
    def loss(x):
        return -jnp.mean(jnp.log(1 - jnp.clip(sigmoid(x @ EYE), 1e-7, 1 - 1e-7)))

    policy = jmp.Policy("float32", half, None)
    inside = jax.jit(jmp.autocast(jax.grad(loss), policy))(FILLED)
    np.testing.assert_allclose(inside, jax.jit(jax.grad(loss))(FILLED), rtol=4e-3, atol=6e-8)


GATES = {
    "gate": lambda h: sigmoid(h) * h,
    "gelu": jax.nn.gelu,
    "softmax": lambda h: jax.nn.softmax(h) / 0.9,
    "before a matmul and a logarithm": lambda h: jnp.log(jnp.exp(sigmoid(h) @ EYE)) @ EYE,
    "before a sum and a quotient": lambda h: sigmoid(h) / 3 + (h / sigmoid(h).sum() @ EYE) * 0,
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("fun", GATES.values(), ids=GATES)
def test_a_gate_stays_half(fun, half):
    program = trace(under(half, fun))(FILLED)
    assert program.eqns[-1].invars[0].aval.dtype == half  # before the cast to what was traced


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("norm", [lambda s: s / s.sum(), lambda s: s * lax.rsqrt(jnp.mean(s))])
def test_a_gate_whose_sum_reaches_a_root_or_a_quotient_stays_half(norm, half):
    program = trace(under(half, lambda h: norm(lax.logistic(h))))(FILLED)
    [gate] = [eqn for eqn in program.eqns if eqn.primitive.name == "logistic"]
    assert gate.outvars[0].aval.dtype == half


@pytest.mark.parametrize("half", HALVES)
def test_the_same_jitted_function_is_half_where_it_is_a_gate(half):
    def both(h):
        return sigmoid(h) * h, jnp.log(1 - sigmoid(h))

    program = trace(under(half, both))(FILLED)
    dtypes = [eqn.outvars[0].aval.dtype for eqn in program.eqns if eqn.primitive.name == "logistic"]
    dtypes += [
        eqn.outvars[0].aval.dtype
        for call in program.eqns
        if call.primitive.name == "jit"
        for eqn in call.params["jaxpr"].eqns
        if eqn.primitive.name == "logistic"
    ]
    assert sorted(map(str, dtypes)) == sorted([half, "float32"])
