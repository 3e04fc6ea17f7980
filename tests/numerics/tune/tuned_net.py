"""A function that takes a moment to tune: products, of which one overflows in float16."""

import jax
import jax.numpy as jnp
import numpy as np

HALF = "params=float32,compute=float16,output=none"
ARGS = tuple(jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32) for _ in range(2))


def net(x, weight):
    for name in "abcd":
        with jax.named_scope(name):
            gain = 1e6 if name == "c" else 1.0
            x = (x @ (weight * gain)) / gain
    return x
