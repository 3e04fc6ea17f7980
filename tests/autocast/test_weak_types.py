"""Numbers of Python stay weak through `autocast`, as through `jax.jit`: they promote nothing that they meet later."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp_policy as jmp

X, WEAK = jnp.ones((2, 2)), jnp.full((2, 2), 2.0)

FUNCTIONS = {
    "numbers": lambda w, x: (x, 2.0, 3, True, 1j),
    "weak matmul": lambda w, x: (w @ w, jnp.exp(w @ w), w @ x),
    "weak carry": lambda w, x: lax.scan(lambda c, r: (c * 0.5 + 1.0, (r @ x) * c), 1.0, x),
    "weak carry of a matmul": lambda w, x: lax.scan(lambda c, r: (c @ w, None), w, x)[0],
    "branches": lambda w, x: lax.cond(x[0, 0] > 0, lambda: 2.0, lambda: 3.0),
}


def types_of(fun):
    return [(leaf.dtype.name, leaf.weak_type) for leaf in jax.tree.leaves(fun(WEAK, X))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_as_weak_as_under_jit(name):
    fun = FUNCTIONS[name]
    cast = jmp.autocast(fun, "params=float32,compute=bfloat16,output=none")
    assert types_of(cast) == types_of(jax.jit(cast)) == types_of(jax.jit(fun))


def test_a_number_of_python_is_a_factor_of_a_carry_in_half():
    fun = jmp.autocast(lambda x: (x, 2.0), "params=float32,compute=bfloat16,output=none")
    turn = lambda carry, x: (carry * fun(x)[1], None)
    assert lax.scan(turn, jnp.ones((), jnp.bfloat16), X.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16
