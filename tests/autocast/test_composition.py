"""Autocast among the transformations of JAX, and beside what an author wrote."""

import jax
import jax.numpy as jnp
import pytest

from jmp_policy.autocast import autocast

X, W = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4), jnp.linspace(0.0, 1.0, 16).reshape(4, 4)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_product_that_its_author_wrote_in_half_runs_as_written(compute):
    fun = lambda x, w: x.astype(jnp.float16) @ w.astype(jnp.float16)
    policy = f"params=float32,compute={compute},output=none"
    jaxpr = jax.make_jaxpr(autocast(fun, policy))(X, W)
    assert str(jaxpr) == str(jax.make_jaxpr(fun)(X, W))


def test_what_follows_a_half_product_of_the_author_stays_low():
    fun = lambda x, w: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.bfloat16) * 2
    jaxpr = jax.make_jaxpr(autocast(fun, "params=float32,compute=bfloat16,output=none"))(X, W)
    assert str(jaxpr) == str(jax.make_jaxpr(fun)(X, W))
