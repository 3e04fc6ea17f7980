"""Functions with derivatives of their own: a user's survives, even a wrong one; JAX's own are rewritten with theirs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import walk

from jmp_policy.autocast import autocast

X, W = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4), jnp.linspace(0.0, 1.0, 16).reshape(4, 4)
BFLOAT16 = "params=float32,compute=bfloat16,output=none"


@jax.custom_jvp
def wrong_jvp(x, w):
    return jnp.tanh(x @ w)


@wrong_jvp.defjvp
def _(primals, tangents):
    return jnp.tanh(primals[0] @ primals[1]), 7 * tangents[0]


@jax.custom_vjp
def wrong_vjp(x, w):
    return jnp.tanh(x @ w)


wrong_vjp.defvjp(lambda x, w: (jnp.tanh(x @ w), w), lambda w, ct: (7 * ct, 3 * w))


def matmul_dtypes(fun, *args):
    program = jax.make_jaxpr(fun)(*args).jaxpr
    return [str(step.eqn.outvars[0].aval.dtype) for step in walk(program) if step.name == "dot_general"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast runs no matmul in bfloat16")
@pytest.mark.parametrize("custom_rules", ["opaque", "inside"])
@pytest.mark.parametrize("wrong", [wrong_jvp, wrong_vjp])
def test_a_wrong_gradient_survives(wrong, custom_rules):
    cast = autocast(lambda x, w: wrong(x, w), BFLOAT16, custom_rules=custom_rules)
    for fun in cast, jax.jit(cast), lambda x, w: jax.vmap(cast, in_axes=(0, None))(x[None], w)[0]:
        np.testing.assert_array_equal(jax.grad(lambda x: fun(x, W).sum())(X), jnp.full((4, 4), 7.0))


@pytest.mark.parametrize("wrong", [wrong_jvp, wrong_vjp])
@pytest.mark.filterwarnings("ignore:autocast runs no matmul in bfloat16")
@pytest.mark.parametrize(("custom_rules", "dtype"), [("opaque", "float32"), ("inside", "bfloat16")])
def test_a_function_of_a_user_is_opaque_unless_it_is_asked_for(wrong, custom_rules, dtype):
    cast = autocast(lambda x, w: wrong(x, w), BFLOAT16, custom_rules=custom_rules)
    assert matmul_dtypes(cast, X, W) == [dtype]
    forward = lambda x, w: jax.grad(lambda x: cast(x, w).sum())(x)
    assert matmul_dtypes(forward, X, W) == [dtype]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu", "silu", "softplus", "gelu"])
def test_functions_of_jax_are_rewritten_with_their_derivatives(name):
    fun = getattr(jax.nn, name)
    cast = autocast(lambda x, w: fun(x @ w), BFLOAT16)
    expected = lambda x, w: fun(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
    gradient = lambda f: jax.jit(jax.grad(lambda x, w: f(x, w).sum()))(X, W)
    np.testing.assert_allclose(gradient(cast), gradient(expected), atol=0.02)


def test_relu_stays_in_bfloat16_forward_and_backward():
    cast = autocast(lambda x, w: jax.nn.relu(x @ w), BFLOAT16)
    program = jax.make_jaxpr(jax.grad(lambda x: cast(x, W).sum()))(X)
    of_relu = [step.eqn for step in walk(program.jaxpr) if step.name in ("max", "select_n", "gt")]
    assert {str(eqn.invars[-1].aval.dtype) for eqn in of_relu} == {"bfloat16"}
    assert len(of_relu) >= 3
