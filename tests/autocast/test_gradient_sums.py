"""The gradient of a weight that is used several times is summed in float32, wherever the derivative is taken."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import trace

import jmp_policy as jmp

POLICY = jmp.Policy("float32", "bfloat16", None)
USES = 64


def loss(weight, x):
    x = x @ weight  # the stream is in half precision
    for _ in range(USES - 1):
        x = x + 0.05 * jnp.tanh(x @ weight)
    return (x**2).mean()


def arguments():
    draw = np.random.default_rng().normal
    return jnp.asarray(draw(size=(8, 8)) / 8, jnp.float32), jnp.asarray(draw(size=(4, 8)), jnp.float32)


def sums(fun, *args):
    eqns = [eqn for eqn in trace(fun)(*args).eqns if eqn.primitive.name == "add_any"]
    return collections.Counter((eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype.name) for eqn in eqns)


@pytest.mark.slow
def test_gradients_of_activations_are_summed_in_half():
    counts = sums(jmp.autocast(jax.grad(loss), POLICY), *arguments())
    assert counts[(8, 8), "float32"] == USES - 1
    assert counts[(8, 8), "bfloat16"] == 0
    assert counts[(4, 8), "bfloat16"] >= USES - 1
    assert counts[(4, 8), "float32"] == 0


def test_the_gradient_of_logits_is_summed_in_float32_over_the_parts_of_a_loss():
    """Parts that JAX traces as jitted functions of their own: each would cast the logits for itself."""

    def classify(weight, x):
        with jax.numpy_dtype_promotion("standard"):
            return optax.softmax_cross_entropy_with_integer_labels(x @ weight, jnp.arange(4)).mean()

    counts = sums(jax.grad(jmp.autocast(classify, POLICY)), *arguments())
    assert counts[(4, 8), "float32"] >= 1
    assert counts[(4, 8), "bfloat16"] == 0


@pytest.mark.slow
def test_the_sum_has_the_error_of_float32():
    """Sixty-four equal addends: in bfloat16 their sum is short of as many as one in 256, in float32 of none."""

    def linear(weight, x):
        return sum(jnp.vdot(x @ weight, jnp.ones((4, 8))) for _ in range(USES))

    weight, x = arguments()
    x = jnp.abs(x).astype(jnp.bfloat16).astype(jnp.float32)
    grad = jax.jit(jmp.autocast(jax.grad(linear), POLICY))(weight, x)
    one = jax.jit(jmp.autocast(jax.grad(lambda w, x: jnp.vdot(x @ w, jnp.ones((4, 8)))), POLICY))(weight, x)
    np.testing.assert_allclose(grad, USES * np.asarray(one, np.float64), rtol=1e-6)
